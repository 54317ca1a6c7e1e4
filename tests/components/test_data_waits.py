"""The longest wait for data of a job is recorded, whichever rank has waited."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.components.test_telemetry import TRAINED, Clock, log, telemetry
from tests.distributed.test_world import join
from tests.processes import ProcessPool
from tests.test_trainer import curve, records
from torchtitan_diloco.components import telemetry as module
from torchtitan_diloco.components.telemetry import StepResult
from torchtitan_diloco.distributed.world import leave_world

LONGEST = "world/longest_data_seconds"


def _wait_for_data(folder: Path, waits: Sequence[Sequence[Sequence[float]]]) -> float:
    """Log every second step; return the total. `waits`: of ranks, steps and their batches."""
    world = join(2)
    steps = waits[world.rank]

    def load() -> Iterator[Any]:
        for wait in chain.from_iterable(steps):
            Clock.now += wait
            yield None

    with patch.object(module, "time", Clock()), telemetry(folder, world=world) as own:
        batches = own.timed(load())
        for step, of_batches in enumerate(steps, start=1):

            def train_step(count: int = len(of_batches)) -> StepResult:
                for _ in range(count):
                    next(batches)
                Clock.now += 1.0
                return TRAINED

            own.measure(train_step)
            if step % 2 == 0:
                log(own, step)
        own.publish(all=True)
    leave_world(world)
    return own.totals[LONGEST]


def test_the_longest_wait_for_data_is_that_of_a_step_of_any_rank(
    tmp_path: Path, processes: ProcessPool
) -> None:
    """The last rank of the second worker waits longest, for both batches of one step; then the
    first rank does."""
    usual = [[0.5, 0.25]] * 4
    waits = [[*usual[:2], [0.25, 0.75], [0.5, 0.5]], usual, usual, [[0.5, 0.5], [2, 1], *usual[:2]]]
    assert processes.run(_wait_for_data, 4, tmp_path, waits) == [3.0] * 4
    for worker in range(2):
        assert curve(records(tmp_path, worker=worker), LONGEST) == [3.0, 1.0]
