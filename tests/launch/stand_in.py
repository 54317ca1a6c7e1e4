"""Training program for the tests of the launcher. It does the words of `--run.description`.

`meet`: form a gloo group and print the sum of all ranks. `wait`: wait for a stop signal, finish a
"step" and end. `hang`: sleep and ignore signals. `fail:RANK:CODE`, `kill:RANK`, `raise:RANK`: that
rank ends badly while the others wait. `crash:FOLDER:CODE:STEP-STEP-...`: train in that folder;
start number n saves a checkpoint of the n-th step (0: none), and then the last rank ends with that
code, or by that signal if it is negative. A start beyond the last step does the next words.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from torchtitan_diloco.utils import FOLDER_NOTE, STOP_SIGNALS

RANK = int(os.environ.get("RANK", "0"))


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one write, so that lines of several ranks do not mix


say(f"importing pid={os.getpid()}")
time.sleep(float(os.environ.get("IMPORT_SECONDS", "0")))


def main(arguments: list[str]) -> int:
    say(f"started rank={RANK} threads={os.environ.get('OMP_NUM_THREADS')} {arguments}")
    for word in arguments[arguments.index("--run.description") + 1].split(","):
        name, *values = word.split(":")
        if name == "meet":
            meet()
        elif name == "hang":
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            say("hanging")
            time.sleep(600)
        elif name == "crash":
            steps = [int(step) for step in values[2].split("-")]
            if code := crash(Path(values[0]), int(values[1]), steps):
                return code
        elif name == "wait" or int(values[0]) != RANK:
            wait_for_signal()
        else:
            return fail(name, values)
    return 0


def fail(name: str, values: list[str]) -> int:
    time.sleep(0.5)  # so that the others wait by then
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "raise":
        raise RuntimeError("stand-in: the loss exploded")
    print(f"error: stand-in failed on rank {RANK}", file=sys.stderr, flush=True)
    return int(values[1])


def crash(folder: Path, code: int, steps: list[int]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    Path(os.environ[FOLDER_NOTE]).write_text(str(folder))
    starts = folder / f"starts-{RANK}"
    number = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("+" * (number + 1))
    if number == len(steps):
        return 0
    saved, crashed = folder / f"saved-{number}", folder / f"crashed-{number}"
    if RANK == 0:
        if steps[number]:
            checkpoint = folder / f"checkpoints/step-{steps[number]}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "manifest.json").touch()
        saved.touch()
    if int(os.environ.get("WORLD_SIZE", "1")) > RANK + 1:
        wait_for_file(crashed)
        while is_alive(int(crashed.resolve().name)):
            time.sleep(0.02)
        return 3  # as a rank that has lost another one
    wait_for_file(saved)
    crashed.symlink_to(str(os.getpid()))
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def wait_for_file(path: Path) -> None:
    while not os.path.lexists(path):
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Return False also for a process that has ended but was not waited for."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def meet() -> None:
    if "RANK" not in os.environ:
        return
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([RANK])
    dist.all_reduce(total)
    say(f"met rank={RANK} of {dist.get_world_size()} sum={total.item()}")
    dist.destroy_process_group()


def wait_for_signal() -> None:
    received: list[int] = []
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: received.append(number))
    say("waiting")
    while not received:
        time.sleep(0.02)
    time.sleep(0.2)  # the rest of the step
    say(f"finished rank={RANK} signal={signal.Signals(received[0]).name} count={len(received)}")
