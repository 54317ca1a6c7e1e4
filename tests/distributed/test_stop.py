"""Signals and requests that all ranks follow after the same step."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.distributed.test_world import join
from tests.processes import ProcessPool
from torchtitan_diloco.distributed import stop
from torchtitan_diloco.distributed.stop import StopRequest
from torchtitan_diloco.utils import STOP_SIGNALS


def _agree(signalled_rank: int) -> tuple[list[int], int]:
    """Take steps of different length on each rank. Rank 1 asks for a save in step 4, another one
    gets a signal in step 15. Return the steps after which all saved, and stopped."""
    world, saves = join(1), []
    with StopRequest(world, lag=3) as request:
        for step in range(1000):
            time.sleep(0.001 * (1 + world.rank))
            if step == 15 and world.rank == signalled_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            requests = request.agreed(step, save=world.rank == 1 and step == 4)
            saves += [step] * requests.save
            if requests.stop:
                return saves, step
    raise AssertionError


def test_all_ranks_save_and_stop_after_the_same_step_when_one_asks(processes: ProcessPool) -> None:
    assert processes.run(_agree, 3, 2) == [([7], 19)] * 3


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("ignored", [False, True])  # as nohup does
def test_a_signal_stops_a_single_process_and_its_handler_is_restored(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, ignored: bool
) -> None:
    monkeypatch.setattr(stop, "SAME_SIGNAL_SECONDS", 60.0)
    before = signal.getsignal(number)
    wanted = signal.SIG_IGN if ignored else before
    try:
        signal.signal(number, wanted)
        with StopRequest(join(1)) as request:
            assert request.agreed(1) == (False, False)
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # the same request, passed on by a launcher
            assert request.agreed(2, save=True) == (not ignored, True)
        assert signal.getsignal(number) == wanted
    finally:
        signal.signal(number, before)


HANGS = """
import ctypes, os, signal, threading
import torch
from torchtitan_diloco.diloco.heartbeat import OwnClock
from torchtitan_diloco.distributed import stop
from torchtitan_diloco.distributed.world import World

class Watch:
    is_lost, hanging, first_left, clock = False, set(), 1, OwnClock(1.0)
    def silent_ranks(self):
        return {3: "silent for 16 s"}
    def give_up(self, ranks):
        self.hanging = {1}
        print("gave up", ranks, flush=True)
    def wait_for_end(self, worker):
        print("waited for worker", worker, flush=True)

stop.HANGING_SECONDS = 0.1
world = World(0, 4, 2, torch.device("cpu"), control=object(), liveness=Watch())
with stop.StopRequest(world):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # waits for ever, and no Python signal handler runs
"""


def test_a_rank_that_hangs_does_not_keep_the_others_from_stopping() -> None:
    run = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 3, run.stderr
    assert run.stdout == "gave up {3: 'silent for 16 s'}\nwaited for worker 1\n"
    assert "rank 3 of worker 1 (silent for 16 s) hangs, so the run cannot stop" in run.stderr
