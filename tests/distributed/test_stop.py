"""Signals and requests that all ranks follow after the same step."""

import os
import signal
import time

import pytest

from tests.distributed.test_world import join
from tests.processes import ProcessPool
from torchtitan_diloco.distributed import stop
from torchtitan_diloco.distributed.stop import StopRequest
from torchtitan_diloco.log import STOP_SIGNALS


def _agree(signalled_rank: int) -> tuple[list[int], int, list[float]]:
    """Take steps of different length on each rank. Rank 1 asks for a save in step 4, another one
    gets a signal in step 15. Return the steps after which all saved, and stopped, and the sums of
    the ranks' numbers in the first steps."""
    world, saves, sums = join(1), [], []
    with StopRequest(world, lag=3) as request:
        for step in range(1000):
            time.sleep(0.001 * (1 + world.rank))
            if step == 15 and world.rank == signalled_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            number = 10.0 * step + world.rank
            requests = request.agreed(step, [number], save=world.rank == 1 and step == 4)
            if step < 3:  # asked for already, or not
                sums += request.ask(step, [number]).result()[2:]
            saves += [step] * requests.save
            if requests.stop:
                return saves, step, sums
    raise AssertionError


def test_all_ranks_save_and_stop_after_the_same_step_when_one_asks(processes: ProcessPool) -> None:
    assert processes.run(_agree, 3, 2) == [([7], 19, [3, 33, 63])] * 3


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
        with StopRequest(join(1), lag=0) as request:
            assert request.agreed(1) == (False, False)
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # the same request, passed on by a launcher
            assert request.agreed(2, save=True) == (not ignored, True)
        assert signal.getsignal(number) == wanted
    finally:
        signal.signal(number, before)
