"""Training program for the tests of the launcher. It does the words of its last argument.

`meet`: form a gloo group and print the sum of all ranks. `wait`: wait for a stop signal, finish a
"step" and end. `hang`: sleep and ignore signals. `fail:RANK:CODE`, `kill:RANK`, `raise:RANK`: that
rank ends badly while the others wait.
"""

import os
import signal
import sys
import time

from torchtitan_diloco.utils import STOP_SIGNALS

RANK = int(os.environ.get("RANK", "0"))


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one write, so that lines of several ranks do not mix


say(f"importing pid={os.getpid()}")
time.sleep(float(os.environ.get("IMPORT_SECONDS", "0")))


def main(arguments: list[str]) -> int:
    say(f"started rank={RANK} threads={os.environ.get('OMP_NUM_THREADS')} {arguments[:-1]}")
    for word in arguments[-1].split(","):
        name, *values = word.split(":")
        if name == "meet":
            meet()
        elif name == "hang":
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            say("hanging")
            time.sleep(600)
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


def meet() -> None:
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
