"""The rank grid, its groups, agreement between ranks and the agreed stop."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import DIED, ProcessPool
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.distributed.agreement import (
    assert_agreement,
    broadcast_text,
    code_fingerprint,
)
from torchtitan_diloco.distributed.reductions import start_max, start_sum, sum_over_ranks
from torchtitan_diloco.distributed.roll_call import missing_ranks
from torchtitan_diloco.distributed.stop import StopRequest
from torchtitan_diloco.distributed.world import (
    FSDP,
    NCCL_ERRORS,
    WORKER,
    World,
    join_world,
    leave_world,
    split_world,
)
from torchtitan_diloco.utils import STOP_SIGNALS


def join(workers: int, **timeouts: int) -> World:
    return join_world(Distributed(**timeouts), Link(), device="cpu", workers=workers, fsdp=0)


def test_a_single_process_has_no_process_groups() -> None:
    world = join(1)
    assert (world.size, world.mesh, world.control) == (1, None, None)
    assert not dist.is_initialized()
    assert sum_over_ranks(world, [2.5]) == [2.5]
    assert broadcast_text(world, "x") == "x"
    leave_world(world)


@pytest.mark.parametrize(
    ("size", "workers", "fsdp", "reason"),
    [(3, 2, 0, "multiple of 2"), (4, 2, 3, "parallel.fsdp = 2"), (1, 2, 0, "multiple of 2")],
)
def test_numbers_that_do_not_fit(size: int, workers: int, fsdp: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        split_world(size, workers, fsdp)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_cuda_without_a_gpu() -> None:
    with pytest.raises(ValueError, match=r'run.device = "cuda", .* "cpu"'):
        join_world(Distributed(), Link(), device="cuda", workers=1, fsdp=0)


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r'interface = "nosuch0" is no network interface.*choose one of .*lo'
    ):
        join_world(Distributed(), Link(interface="nosuch0"), device="cpu", workers=2, fsdp=0)


def _grid() -> tuple[int, list[int], list[int], tuple[int, ...]]:
    world = join(2)
    assert world.mesh is not None
    lines = [dist.get_process_group_ranks(world.mesh.get_group(dim)) for dim in (WORKER, FSDP)]
    return world.worker, lines[0], lines[1], tuple(world.mesh.shape)


def test_consecutive_ranks_form_a_worker(processes: ProcessPool) -> None:
    seen = processes.run(_grid, 4)
    assert [worker for worker, *_ in seen] == [0, 0, 1, 1]
    assert [across for _, across, _, _ in seen] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [within for _, _, within, _ in seen] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert {shape for *_, shape in seen} == {(2, 2)}


def _reductions() -> tuple[list[float], list[float], str]:
    world = join(1)
    values = [1.0 + world.rank, 2.0**40 + world.rank]
    total, largest = start_sum(world, values), start_max(world, values)  # both under way at once
    text = broadcast_text(world, f"from rank {world.rank}")
    return total.result(), largest.result(), text


def test_reductions_are_exact_sums(processes: ProcessPool) -> None:
    for total, largest, text in processes.run(_reductions, 3):
        assert total == [6.0, 3 * 2.0**40 + 3]
        assert largest == [3.0, 2.0**40 + 2]
        assert text == "from rank 0"


def _disagree() -> str:
    world = join(1)
    assert_agreement(world, {"corpus": "same", "code": code_fingerprint()})
    try:
        assert_agreement(world, {"corpus": "a" if world.rank != 2 else "b", "code": "c"})
    except ValueError as error:
        return str(error)
    return "nothing noticed"


def test_ranks_that_differ_are_named_on_every_rank(processes: ProcessPool) -> None:
    for message in processes.run(_disagree, 3):
        assert "corpus: a on rank 0, b on rank 2" in message
        assert "code" not in message


def _train_until_signalled(signalled_rank: int) -> int:
    """Steps of different length per rank; one rank gets a signal in its fifth."""
    world = join(1)
    with StopRequest(world) as stop:
        for step in range(1, 1000):
            time.sleep(0.001 * (1 + world.rank))
            if step == 5 and world.rank == signalled_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.agreed(step)[0]:
                return step
    return -1


@pytest.mark.parametrize("signalled_rank", [0, 2])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    processes: ProcessPool, signalled_rank: int
) -> None:
    steps = processes.run(_train_until_signalled, 3, signalled_rank)
    assert len(set(steps)) == 1
    assert 5 <= steps[0] <= 6


def _one_asks_to_save() -> list[int]:
    world = join(1)
    with StopRequest(world, lag=3) as stop:
        return [
            step for step in range(12) if stop.agreed(step, save=world.rank == 1 and step == 4)[1]
        ]


def test_what_one_rank_asks_for_all_save_at_the_same_step(processes: ProcessPool) -> None:
    assert processes.run(_one_asks_to_save, 3) == [[7]] * 3


def test_a_signal_stops_a_single_process_and_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest(join(1)) as stop:
        assert stop.agreed(1) == (False, False)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same request, passed on by a launcher
        assert stop.agreed(2, save=True) == (True, True)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_all_that_a_launcher_passes_on_stops(number: signal.Signals) -> None:
    with StopRequest(join(1)) as stop:
        os.kill(os.getpid(), number)
        assert stop.agreed(1) == (True, False)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequest(join(1)) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.agreed(1) == (False, False)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def _notice_one_after_the_other(apart: float) -> list[int]:
    world = join(1)
    dist.barrier(group=world.control)
    if world.rank == 2:
        os._exit(1)
    time.sleep(apart * world.rank)
    return missing_ranks(world)


def test_who_is_missing_is_the_same_for_all_who_ask_though_not_at_once(
    processes: ProcessPool,
) -> None:
    """Rank 0 is dead for nobody, though its word came before rank 1 listened."""
    assert processes.run(_notice_one_after_the_other, 3, 0.5, dying={2}) == [[2], [2], DIED]


def _one_rank_is_silent() -> str:
    world = join(1, train_timeout_seconds=2)
    if world.rank == 1:
        time.sleep(6)
        return "was silent"
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=world.group(FSDP))
    except RuntimeError:
        return "gave up" if time.monotonic() - started < 5.5 else "waited too long"
    return "went on"


def test_each_group_has_its_own_timeout(processes: ProcessPool) -> None:
    assert processes.run(_one_rank_is_silent, 2) == ["gave up", "was silent"]


def _watchdog_of_each_group(outer_loop: bool, decided: str) -> list[str | None]:
    seen: list[str | None] = []
    original = dist.new_group

    def new_group(*given: Any, **more: Any) -> Any:
        seen.append(os.environ.get(NCCL_ERRORS))
        return original(*given, **more)

    before = os.environ.pop(NCCL_ERRORS, None)
    if decided:
        os.environ[NCCL_ERRORS] = decided
    dist.new_group = new_group
    try:
        join_world(Distributed(), Link(), device="cpu", workers=2, fsdp=0, outer_loop=outer_loop)
        return [*seen[:3], os.environ.get(NCCL_ERRORS)]
    finally:
        dist.new_group = original
        os.environ.pop(NCCL_ERRORS, None)
        if before is not None:
            os.environ[NCCL_ERRORS] = before


@pytest.mark.parametrize(
    ("outer_loop", "decided", "expected"),
    [(True, "", ["0", None, None, None]), (False, "", [None] * 4), (True, "3", ["3"] * 4)],
)
def test_nccl_is_told_that_errors_are_ours_for_the_group_of_the_outer_loop_alone(
    processes: ProcessPool, outer_loop: bool, decided: str, expected: list[str | None]
) -> None:
    """The groups in the order in which they are made: between workers, then inside each of the two; and what is left."""
    assert processes.run(_watchdog_of_each_group, 2, outer_loop, decided) == [expected] * 2
