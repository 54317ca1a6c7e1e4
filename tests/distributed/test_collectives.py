"""Agreement, sums, the names of lost ranks, and the step after which all save or stop."""

import math
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_world import join
from tests.processes import DIED, ProcessPool
from torchtitan_diloco.base.messages import TransferError, transfers
from torchtitan_diloco.base.process import STOP_SIGNALS
from torchtitan_diloco.base.user import UserError, cause_of
from torchtitan_diloco.diloco import WorkerLostError, delta_norms
from torchtitan_diloco.diloco.agreement import agree
from torchtitan_diloco.distributed import collectives
from torchtitan_diloco.distributed.collectives import (
    Asked,
    PendingMax,
    PendingRows,
    PendingSum,
    RanksLostError,
    StopRequest,
    lag_in_steps,
    naming_lost_ranks,
    on_all_ranks,
)
from torchtitan_diloco.distributed.world import leave_world


def _agree() -> tuple[Any, ...]:
    """Return sums over all ranks, and the errors where rank 1 fails and rank 2 differs."""
    world = join(1)
    values = [1.0 + world.rank, 2.0**40 + world.rank]
    total, nothing = (PendingSum(world, one, "in the test") for one in (values, []))
    assert on_all_ranks(world.control, lambda: world.rank) == world.rank
    agree({"corpus": "same"}, world.control, "rank")
    sums = total.result(), nothing.result()
    assert total.is_complete
    if world.size == 1:
        return sums

    def refuse() -> None:
        if world.rank == 1:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as refused:
        on_all_ranks(world.control, refuse)
    with pytest.raises(ValueError, match="differently") as different:
        agree({"corpus": "a" if world.rank != 2 else "b", "text": "same"}, world.control, "rank")
    return *sums, str(refused.value), str(different.value)


def test_all_ranks_get_the_same_and_the_error_of_one(processes: ProcessPool) -> None:
    assert processes.run(_agree, 1) == [([1.0, 2.0**40], [])]
    for rank, (total, nothing, refused, different) in enumerate(processes.run(_agree, 3)):
        assert (total, nothing) == ([6.0, 3 * 2.0**40 + 3], [])
        assert refused == ("no" if rank == 1 else "no (on rank 1)")
        assert "corpus: a on rank 0, b on rank 2" in different
        assert "text" not in different


def _merge(workers: int) -> tuple[list[float], list[list[float]], list[list[float]]]:
    """Return the maxima over all ranks, and the numbers of the ranks of this worker."""
    world = join(workers)
    largest = PendingMax(world, [-world.rank, -math.inf], "in the test")
    rows = [PendingRows(world, one, "in the test") for one in ([world.rank, 7.0], [])]
    found = largest.result(), rows[0].result(), rows[1].result()
    leave_world(world)
    return found


@pytest.mark.parametrize(("size", "workers"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_ranks_get_the_largest_of_the_job_and_all_numbers_of_their_worker(
    processes: ProcessPool, size: int, workers: int
) -> None:
    ranks = size // workers
    for rank, (largest, rows, nothing) in enumerate(processes.run(_merge, size, workers)):
        assert largest == [0.0, -math.inf]
        first = rank // ranks * ranks
        assert rows == [[float(other), 7.0] for other in range(first, first + ranks)]
        assert nothing == [[]]


def _agree_on_torch(versions: list[str]) -> str:
    """Return the error if each rank has its own version of torch."""
    world = join(1)
    with patch.object(torch, "__version__", versions[world.rank]):
        try:
            agree({}, world.control, "rank")
        except UserError as error:
            return str(error)
    return ""


def test_ranks_need_the_same_release_of_torch_but_not_the_same_build(
    processes: ProcessPool,
) -> None:
    assert processes.run(_agree_on_torch, 2, ["2.14.1+cu126", "2.14.1+cu128"]) == ["", ""]
    for message in processes.run(_agree_on_torch, 2, ["2.14.1+cu126", "2.14.0+cu126"]):
        assert "  torch version: 2.14.1 on rank 0, 2.14.0 on rank 1" in message


def _lose_a_rank(apart: float) -> str:
    world = join(1)
    dist.barrier(group=world.control)
    if world.rank == 2:
        os._exit(1)
    time.sleep(apart * world.rank)
    with pytest.raises(RanksLostError) as named, naming_lost_ranks(world, "in the test"):
        raise TransferError("closed")
    leave_world(world)
    return str(named.value)


def test_lost_ranks_are_the_same_for_all_that_ask_at_different_moments(
    processes: ProcessPool,
) -> None:
    """Rank 0 leaves before rank 1 asks, and is not taken for lost."""
    first, second, died = processes.run(_lose_a_rank, 3, 1.5, dying={2})
    for error in (first, second):
        assert re.fullmatch(
            r"rank 2 \(worker 0: .*\) left or did not answer in time in the test \(closed\)", error
        )
    assert died == DIED


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("a bug")])
def test_what_says_nothing_of_other_ranks_is_raised_as_it_is(error: Exception) -> None:
    world = replace(join(1), control=Mock())  # as on one of several ranks
    with pytest.raises(type(error)) as raised, naming_lost_ranks(world, "in the test"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[pair.cc:1] closed"), TransferError),  # as gloo has no type of its own
        (dist.DistBackendError("timeout"), TransferError),  # as NCCL
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
        (torch.AcceleratorError("an assertion"), torch.AcceleratorError),
    ],
)
def test_only_what_gloo_and_nccl_say_is_a_failed_transfer(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    with pytest.raises(kind), transfers():
        raise error
    monkeypatch.setattr(dist, "all_reduce", Mock(side_effect=error))
    with pytest.raises(WorkerLostError if kind is TransferError else kind):
        delta_norms.sum_over_ranks(1.0, Mock(size=lambda: 2), worker=0)


def test_the_cause_of_an_error_is_its_first_line() -> None:
    gloo = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:80. GLHF!"
    assert cause_of(RuntimeError(gloo)) == "Connection closed by peer [127.0.0.1]:80"
    late = "Timed out waiting 4000ms. Try again"
    assert cause_of(RuntimeError(f"{late}\nand more")) == late
    assert cause_of(RuntimeError()) == "RuntimeError"


def _save_and_stop(signalled_rank: int) -> tuple[list[int], int, list[float]]:
    """Take steps of different length on each rank. Rank 1 asks for a save in step 4, another one
    gets a signal in step 15. Return the steps after which all saved, and stopped, and the sums of
    the ranks' numbers in the first steps."""
    world = join(1)
    saves = []
    sums = []
    with StopRequest(world, longest_lag=3) as request:
        for step in range(1000):
            time.sleep(0.001 * (1 + world.rank))
            if step == 15 and world.rank == signalled_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            number = 10.0 * step + world.rank
            requests = request.agreed(step, [number], save=world.rank == 1 and step == 4)
            if step < 3:  # asked for already, or not
                sums += request.ask(step, [number]).result()[len(Asked._fields) :]
            saves += [step] * requests.save
            if requests.stop:
                return saves, step, sums
    raise AssertionError


def test_all_ranks_save_and_stop_after_the_same_step_when_one_asks(processes: ProcessPool) -> None:
    assert processes.run(_save_and_stop, 3, 2) == [([7], 19, [3, 33, 63])] * 3


def _begin_late(arrival: Path) -> bool:
    """Begin to handle signals, later on rank 0, and return whether rank 0 has arrived."""
    world = join(1)
    if world.rank == 0:
        time.sleep(0.5)
        arrival.touch()
    with StopRequest(world):
        return arrival.exists()


def test_no_rank_handles_signals_before_all_can(processes: ProcessPool, tmp_path: Path) -> None:
    """Ctrl-C before that ends all of them, and none of them reports that another one is lost."""
    assert processes.run(_begin_late, 2, tmp_path / "arrival") == [True, True]


@pytest.mark.parametrize(
    ("step_seconds", "longest", "steps"),
    [
        (0.0, 6, 6),
        (0.5, 6, 6),
        (0.5, 20, 8),
        (1.0, 6, 4),
        (1.9, 6, 3),
        (2.0, 6, 2),
        (60.0, 20, 2),
        (60.0, 1, 1),
        (0.1, 1, 1),
        (0.1, 0, 0),
    ],
)
def test_answers_are_read_earlier_if_steps_are_long(
    step_seconds: float, longest: int, steps: int
) -> None:
    assert lag_in_steps(step_seconds, longest) == steps


FAST, SLOW = range(21, 61), range(61, 101)
"""Steps that are short, after some that are long, and that are long again."""


def _save_at_any_speed(askers: dict[int, int]) -> tuple[dict[int, int], list[float]]:
    """Ask for saves after steps, each on a rank. Return the step of each save, and the usual times
    of a step. The clock of each rank has its own speed."""
    world = join(1)
    now = 0.0
    saves = dict[int, int]()
    usual = list[float]()
    clock = SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic)
    with (
        patch.object(collectives, "time", clock),
        StopRequest(world, longest_lag=6) as request,
    ):
        asked = list[int]()
        for step in range(1, SLOW.stop):
            now += (0.01 if step in FAST else 3.0) * (1 + world.rank)
            asked += [step] if step in askers else []
            if request.agreed(step, save=askers.get(step) == world.rank).save:
                saves[asked.pop(0)] = step
            if step in (1, 20, 60):
                usual.append(request.step_seconds)
    return saves, usual


def test_a_stop_comes_soon_if_steps_are_long(processes: ProcessPool) -> None:
    """All ranks derive the same lag from their sums, also while it changes."""
    askers = {1: 0, 10: 1, 20: 0, 40: 1, 49: 0, 62: 1, 80: 0}
    results = processes.run(_save_at_any_speed, 2, askers)
    saves, usual = results[0]
    assert results[1] == (saves, usual)
    assert usual == pytest.approx([0.0, 4.5, 0.015])
    assert saves == {1: 3, 10: 12, 20: 22, 40: 46, 49: 56, 62: 68, 80: 82}


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("ignored", [False, True])  # as nohup does
def test_a_signal_stops_a_single_process_and_its_handler_is_restored(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, ignored: bool
) -> None:
    monkeypatch.setattr(collectives, "SAME_SIGNAL_SECONDS", 60.0)
    before = signal.getsignal(number)
    wanted = signal.SIG_IGN if ignored else before
    try:
        signal.signal(number, wanted)
        with StopRequest(join(1), longest_lag=0) as request:
            assert request.agreed(1) == (False, False)
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # the same request, passed on by a launcher
            assert request.agreed(2, save=True) == (not ignored, True)
        assert signal.getsignal(number) == wanted
    finally:
        signal.signal(number, before)
