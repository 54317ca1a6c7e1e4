"""A training program for the tests of the launcher: each word it is given is something to do.

`started`: print one line about this rank. `meet`: form a gloo group and print the sum of all ranks. `wait`: sleep until
SIGINT or SIGTERM arrives, then finish a "step" and end well. `close`: take two more seconds. `hang`: sleep and ignore
them. `fail:RANK:CODE`,
`kill:RANK`, `raise:RANK`: that rank ends badly while the others wait.
"""

import os
import signal
import sys
import time
from types import FrameType

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
time.sleep(float(os.environ.get("IMPORT_SECONDS", "0")))


def main(arguments: list[str]) -> int:
    for word in arguments[-1].split(","):
        name, *values = word.split(":")
        if name == "started":
            threads = os.environ.get("OMP_NUM_THREADS")
            say(
                f"started rank={RANK} world={WORLD_SIZE} pid={os.getpid()} parent={os.getppid()} threads={threads}"
            )
        elif name == "meet":
            meet()
        elif name == "arguments":
            say(f"arguments={arguments[:-1]}")
        elif name == "wait":
            wait_for_signal()
        elif name == "close":
            time.sleep(2)
            say("closed")
        elif name == "hang":
            for stop_signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(stop_signal, signal.SIG_IGN)
            say("hanging")
            time.sleep(600)
        elif int(values[0]) == RANK:
            return fail(name, values)
        else:
            wait_for_signal()
    return 0


def fail(name: str, values: list[str]) -> int:
    time.sleep(0.5)  # the others are to be waiting by then
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
    say(f"met rank={RANK} sum={total.item()}")
    dist.destroy_process_group()


def wait_for_signal() -> None:
    received: list[int] = []

    def take(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {
        number: signal.signal(number, take)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    say("waiting")
    while not received:
        time.sleep(0.02)
    time.sleep(0.2)  # the rest of the step
    for number, handler in before.items():
        signal.signal(number, handler)
    say(f"finished rank={RANK} signal={signal.Signals(received[0]).name} count={len(received)}")


def say(text: str) -> None:
    # One write, so that lines of several ranks do not mix.
    os.write(1, f"{text}\n".encode())
