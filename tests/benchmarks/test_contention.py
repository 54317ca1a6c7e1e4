import ctypes
import threading

import pytest
import torch

from benchmarks.contention import Work, beside, in_thread


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_beside_training_ends_the_measurement() -> None:
    def fail() -> None:
        raise OSError("no room")

    thread = threading.Thread(target=fail)
    with (
        pytest.raises(RuntimeError, match="has ended"),
        beside(thread, threading.Event(), ctypes.c_long(-1)),
    ):
        pass


@pytest.mark.parametrize("codec", ["fp32", "fp4_e3m0"])
def test_a_thread_exchanges_beside_training(codec: str) -> None:
    with in_thread(codec, 5000) as count:
        assert count() >= 0
    work = Work(codec, 5000)
    before = work.state.outer.clone()
    with torch.no_grad():
        for part in work.state.fragment.parts:
            part.parameter.add_(1.0)
    work.exchange()
    moved = (work.state.outer > before).float().mean()
    assert moved > 0.9, "the outer step goes where the worker went"
