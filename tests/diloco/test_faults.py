"""What ends a run on all workers, and with which words."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.diloco.test_against_reference import Net, config, inner_step
from tests.processes import DIED, ProcessPool
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.diloco.transport import HEADER_BYTES, Header, WorkerLostError
from torchtitan_diloco.distributed.world import WORKER, World, join_world

TIMEOUT = 3


def join(workers: int) -> World:
    return join_world(
        Distributed(), Link(timeout_seconds=TIMEOUT), device="cpu", workers=workers, fsdp=0
    )


def train(
    world: World,
    at_step: dict[int, Callable[[StreamingDiLoCo], None]],
    delay: int = 3,
    seconds: float = 0.0,
) -> str:
    """Trains until an error, which it returns with the seconds since the last event."""
    model = Net()
    chosen = replace(config(2, delay=delay), link=Link(timeout_seconds=TIMEOUT))
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(1, 60):
            inner_step(model, optimizer, world.worker, step)
            time.sleep(seconds)
            if step in at_step:
                at_step[step](outer)
            outer.step()
    except (WorkerLostError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def die(outer: StreamingDiLoCo) -> None:
    """Between two exchanges. In the middle of one, a worker that has all it needs of the dead one would wait for a third, and
    blame that."""
    outer.drain()
    os._exit(1)


def _killed(workers: int, victim: int) -> tuple[str, float]:
    world = join(workers)
    started = time.monotonic()
    death: dict[int, Callable[[StreamingDiLoCo], None]] = {13: die}
    return train(
        world, death if world.worker == victim else {}, seconds=0.01
    ), time.monotonic() - started


@pytest.mark.parametrize(("workers", "victim"), [(2, 1), (3, 0), (3, 2)])
def test_a_worker_that_dies_is_named_by_the_others(
    processes: ProcessPool, workers: int, victim: int
) -> None:
    results = processes.run(_killed, workers, workers, victim, dying={victim})
    for worker, result in enumerate(results):
        if worker == victim:
            assert result == DIED
            continue
        message, seconds = result
        assert f"worker {victim} left or did not answer" in message
        assert f"seen by worker {worker}" in message
        assert "in the exchange of fragment" in message
        assert "sent after step" in message
        assert seconds < 2 * TIMEOUT + 5


def _silent(_: int) -> str:
    world = join(2)
    sleep: dict[int, Callable[[StreamingDiLoCo], None]] = {13: lambda _: time.sleep(3 * TIMEOUT)}
    return train(world, sleep if world.worker == 1 else {})


def test_a_worker_that_is_silent_beyond_the_timeout_is_named(processes: ProcessPool) -> None:
    first, _ = processes.run(_silent, 2, 0)
    assert "worker 1 left or did not answer" in first


def _after_a_failure(_: int) -> bool:
    """Whether local and shared parameters are what they were before the exchange that failed."""
    world = join(2)
    model = Net()
    chosen = replace(config(0, delay=0), link=Link(timeout_seconds=TIMEOUT))
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 8):
        inner_step(model, optimizer, world.worker, step)
        outer.step()
    inner_step(model, optimizer, world.worker, 8)
    if world.worker == 1:
        os._exit(1)
    before = {
        name: value.clone() for name, value in [*model.state_dict().items(), *_prefixed(outer)]
    }
    with pytest.raises(WorkerLostError):
        outer.step()
    after = dict([*model.state_dict().items(), *_prefixed(outer)])
    return all(torch.equal(value, after[name]) for name, value in before.items())


def _prefixed(outer: StreamingDiLoCo) -> list[tuple[str, torch.Tensor]]:
    return [(f"shared {name}", value) for name, value in outer.global_state_dict().items()]


def test_a_failed_exchange_changes_nothing(processes: ProcessPool) -> None:
    assert processes.run(_after_a_failure, 2, 0, dying={1})[0] is True


def _other_settings(kind: str) -> str:
    world = join(2)
    model, chosen, run_id = Net(), config(2), ""
    if world.worker == 1:
        if kind == "settings":
            chosen = config(2, mixing=0.25)
        elif kind == "model":
            model.gain = torch.nn.Parameter(torch.ones(2))
        else:
            run_id = "another"
    try:
        StreamingDiLoCo(model, world.group(WORKER), chosen, run_id=run_id)
    except ValueError as error:
        return str(error)
    return "started"


@pytest.mark.parametrize("kind", ["settings", "model", "run id"])
def test_workers_that_were_started_differently_are_refused(
    processes: ProcessPool, kind: str
) -> None:
    for message in processes.run(_other_settings, 2, kind):
        assert "workers were started differently" in message
        assert {
            "settings": "diloco.overlap.mixing: 0.5 on worker 0, 0.25 on worker 1",
            "model": "model: ",
        }.get(kind, kind) in message
        assert "on worker 0" in message
        assert "on worker 1" in message


def _extra_step(outer: StreamingDiLoCo) -> None:
    outer.step_count += 2


def _corrupt(outer: StreamingDiLoCo) -> None:
    state = outer._states[1]
    state.outer[3] += 1.0
    state.checksum ^= 1  # as it would be, had the outer step gone wrong


def _disagrees(event: str) -> str:
    world = join(2)
    events: dict[str, Any] = {"schedule": {9: _extra_step}, "checksum": {12: _corrupt}}
    return train(world, events[event] if world.worker == 1 else {}, delay=0)


def test_another_schedule_is_named_with_both_sides(processes: ProcessPool) -> None:
    for message in processes.run(_disagrees, 2, "schedule"):
        assert "schedules differ" in message
        assert "worker 0" in message
        assert "worker 1" in message


def test_shared_parameters_that_differ_name_the_fragment(processes: ProcessPool) -> None:
    for message in processes.run(_disagrees, 2, "checksum"):
        assert "fragment 1 differs between workers before outer round 2" in message
        assert "checksum" in message


def _two_runs_on_one_group() -> list[int]:
    world = join(2)
    runs = [StreamingDiLoCo(Net(), world.group(WORKER), config(2))._run for _ in range(2)]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, runs)
    return [*gathered[0], *gathered[1]]


def test_two_runs_of_one_configuration_are_told_apart(processes: ProcessPool) -> None:
    for first, second, first_too, second_too in processes.run(_two_runs_on_one_group, 2):
        assert (first, second) == (first_too, second_too)
        assert first != second


def test_headers() -> None:
    header = Header(
        flags=3,
        run=2**63 + 5,
        fragment=7,
        outer_round=9,
        step=10**12,
        weight=0.1,
        checksum=2**64 - 1,
    )
    assert len(header.pack()) == HEADER_BYTES
    assert Header.unpack(header.pack()) == header
    with pytest.raises(ValueError, match="some worker runs other code"):
        Header.unpack(b"\1" * HEADER_BYTES)
