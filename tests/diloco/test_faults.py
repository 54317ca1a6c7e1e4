"""Faults that end a run on all workers, and their messages."""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.diloco.toy import Net, config, full, inner_step, join, parameters, sgd
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import Link, Quantization, StreamingDiLoCo, WorkerLostError
from torchtitan_diloco.distributed.world import WORKER, World

TIMEOUT, PATIENT = 3, 600
"""Seconds. With `PATIENT`, what ends in time was not ended by it."""
Event = Callable[[StreamingDiLoCo], None]


def train(world: World, at_step: dict[int, Event], delay: int = 3, timeout: int = PATIENT) -> str:
    """Train until an error, and return it."""
    model = Net()
    chosen = replace(config(2, delay=delay), link=Link(timeout_seconds=timeout))
    outer, optimizer = StreamingDiLoCo(model, world.group(WORKER), chosen), sgd(model)
    try:
        for step in range(1, 60):
            inner_step(model, optimizer, world.worker, step)
            if step in at_step:
                at_step[step](outer)
            outer.step()
    except (WorkerLostError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def _silent(_: int) -> str:
    world = join(2, timeout=TIMEOUT)
    sleep = {13: lambda _: time.sleep(2 * TIMEOUT)} if world.worker == 1 else {}
    return train(world, sleep, timeout=TIMEOUT)


def test_a_worker_that_is_silent_beyond_the_timeout_is_named(processes: ProcessPool) -> None:
    first, _ = processes.run(_silent, 2, 0)
    assert "worker 1 left or did not answer" in first


def everything(model: Net, outer: StreamingDiLoCo) -> dict[str, Tensor]:
    shared = {f"shared/{name}": full(value) for name, value in outer.global_state_dict().items()}
    return parameters(model) | shared


def _after_a_failure(delay: int) -> list[int]:
    """Return the fragments that worker 0 gives up when worker 1 dies, with some in flight."""
    world, model = join(2), Net()
    wire = Quantization("topk")
    chosen = replace(config(2, delay), link=Link(timeout_seconds=PATIENT), quantization=wire)
    outer, optimizer = StreamingDiLoCo(model, world.group(WORKER), chosen), sgd(model)
    with suppress(WorkerLostError):
        for step in range(1, 60):
            inner_step(model, optimizer, world.worker, step)
            if step == 20 and world.worker == 1:
                outer.state_dict()  # waits for what is in flight
                os._exit(1)
            before = everything(model, outer)
            outer.step()
    assert equal(before, everything(model, outer)), "a failed exchange changes nothing"
    outer.rounds()
    flying = list(outer._in_flight)
    saved = outer.state_without_others()
    given_up = set(flying) - {one.fragment for one in outer.rounds()}
    for index, fragment in enumerate(outer.fragments):
        lost = [saved.own[f"residual/{part.name}"] for part in fragment.parts]
        assert index not in given_up or not any(bool(one.any()) for one in lost)
        names = [f"shared/{part.name}" for part in fragment.parts]
        now = everything(model, outer)
        assert index not in given_up or all(torch.equal(before[one], now[one]) for one in names)

    again = Net()
    again.load_state_dict(model.state_dict())
    alone = StreamingDiLoCo(again, None, chosen)
    assert alone.load_state_dict(saved) == []
    assert equal(everything(again, alone), everything(model, outer))
    for _ in range(2 * chosen.sync_every):
        alone.step()
    return sorted(given_up)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("delay", [0, 6])
def test_after_a_failure_a_worker_can_be_saved_alone(processes: ProcessPool, delay: int) -> None:
    given_up, _ = processes.run(_after_a_failure, 2, delay, dying={1})
    assert given_up


OTHERS: dict[str, str] = {
    "diloco.overlap.mixing": "0.5 on worker 0, 0.25 on worker 1",
    "model": "",
    "run id": "",
    "total_steps": "0 on worker 0, 7 on worker 1",
}


def _other_settings(kind: str) -> str:
    world, model = join(2), Net()
    differs = kind if world.worker == 1 else ""
    if differs == "model":
        model.gain = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="workers were started differently") as error:
        StreamingDiLoCo(
            model,
            world.group(WORKER),
            config(2, mixing=0.25 if differs == "diloco.overlap.mixing" else 0.5),
            run_id="another" if differs == "run id" else "",
            total_steps=7 if differs == "total_steps" else 0,
        )
    return str(error.value)


@pytest.mark.parametrize("kind", OTHERS)
def test_workers_that_were_started_differently_are_refused(
    processes: ProcessPool, kind: str
) -> None:
    for message in processes.run(_other_settings, 2, kind):
        assert f"{kind}: {OTHERS[kind]}" in message


def _extra_step(outer: StreamingDiLoCo) -> None:
    outer.step_count += 2


def _corrupt(outer: StreamingDiLoCo) -> None:
    state = outer._states[1]
    state.outer[3] += 1.0
    state.checksum ^= 1  # as it would be, had the outer step gone wrong


def _disagrees(event: str) -> str:
    world = join(2, timeout=TIMEOUT)
    events: dict[str, Any] = {"schedule": {9: _extra_step}, "checksum": {12: _corrupt}}
    return train(world, events[event] if world.worker == 1 else {}, delay=0)


@pytest.mark.parametrize(
    ("event", "named"),
    [
        ("schedule", r"worker . sent fragment .* while worker .* schedules differ"),
        ("checksum", r"fragment 1 differs between workers before outer round 2: its checksum"),
    ],
)
def test_workers_that_disagree_are_named(processes: ProcessPool, event: str, named: str) -> None:
    for message in processes.run(_disagrees, 2, event):
        assert re.search(named, message), message


def _run_numbers() -> list[int]:
    world = join(2)
    return [StreamingDiLoCo(Net(), world.group(WORKER), config(2))._run for _ in range(2)]


def test_two_runs_of_one_configuration_are_kept_apart(processes: ProcessPool) -> None:
    (first, second), others = processes.run(_run_numbers, 2)
    assert others == [first, second]
    assert first != second
