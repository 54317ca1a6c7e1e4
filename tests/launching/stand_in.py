"""Training program for the tests of the launcher. It does the words of `--run.description`.

`meet`: form a gloo group and print the sum of all ranks. `wait`: wait for a stop signal, finish a
"step" and end. `hang`: sleep and ignore signals. `clean`: delete the folder of messages.
`crash:CODE:TIMES`: the last rank ends with that code, or by that signal if it is negative, while
the others wait; not after so many restarts.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torchtitan_diloco.base.process import STOP_SIGNALS, run_and_exit
from torchtitan_diloco.base.user import FENCED, USER_ERROR, WORKER_LOST
from torchtitan_diloco.launching.launch import MESSAGES, end_run, follow_launcher

RANK, SIZE = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one write, so that lines of several ranks do not mix


def main(arguments: list[str]) -> int:
    follow_launcher()
    say(f"started pid={os.getpid()} rank={RANK} threads={os.environ.get('OMP_NUM_THREADS')}")
    say(f"arguments {arguments} run={os.environ['TORCHELASTIC_RUN_ID']}")
    for word in arguments[arguments.index("--run.description") + 1].split(","):
        name, *values = word.split(":")
        if name == "meet":
            meet()
        elif name == "hang":
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            say("hanging")
            time.sleep(600)
        elif name == "wait":
            wait_for_signal()
        elif name == "clean":
            shutil.rmtree(os.environ[MESSAGES], ignore_errors=True)
        elif int(values[1]) > restarts and RANK == SIZE - 1:
            return crash(int(values[0]))
        elif int(values[1]) > restarts:
            wait_for_signal()
            return WORKER_LOST
    return 0


def crash(code: int) -> int:
    time.sleep(0.5)  # so that the others wait by then
    if code < 0:
        os.kill(os.getpid(), -code)
    print(f"error: stand-in failed on rank {RANK}", file=sys.stderr, flush=True)
    if code in (USER_ERROR, FENCED):
        end_run(code)
    return code


def is_alive(pid: int) -> bool:
    """Return False also for a process that has ended but was not waited for."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def meet() -> None:
    import torch
    import torch.distributed as dist

    from torchtitan_diloco.diloco.rendezvous import store_of_attempt, store_of_job

    patience = timedelta(seconds=100)
    store = store_of_attempt(store_of_job(patience), RANK, SIZE, patience)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE)
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


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
