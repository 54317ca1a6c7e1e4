"""`plan --run` takes conditions from the records of a run."""

from pathlib import Path

import pytest

from tests.components.test_telemetry import TRAINED, Outer, log, telemetry
from tests.distributed.test_world import join
from tests.processes import ProcessPool
from tests.report.synthetic import round_records, step_records, write_run
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config.loader import load_config, to_toml
from torchtitan_diloco.diloco.round import LEAST_LINK_BYTES, Round
from torchtitan_diloco.distributed.world import leave_world
from torchtitan_diloco.planner.observed import observed_conditions

CONFIG = to_toml(load_config("debug"))
WORKERS = 2
ROUNDS = 2


class OuterOfRank(Outer):
    """Each rank receives its shard over its own streams: the second one twice as fast."""

    def __init__(self, rank_in_worker: int, other: int) -> None:
        super().__init__()
        self._rank = rank_in_worker
        self._other = other

    def rounds(self) -> list[Round]:
        applied = super().rounds()
        for exchange in applied:
            traffic = exchange.traffic
            traffic.heard = {self._other: 1.5}
            traffic.link_bytes = {self._other: LEAST_LINK_BYTES * (1 + self._rank)}
            traffic.link_until = {self._other: 2.5}
        return applied


def _record_rounds(folder: Path) -> None:
    """Write the records of rounds as a rank of a worker with several ranks."""
    world = join(WORKERS)
    outer = OuterOfRank(world.rank_in_worker, other=1 - world.worker)
    with telemetry(folder, outer, world=world) as own:
        for step in range(1, ROUNDS + 1):
            own.outer.step()
            own.measure(lambda: TRAINED)
            log(own, step)
        own.publish(all=True)
    leave_world(world)


def test_the_rate_of_a_link_is_that_of_all_ranks_of_a_worker(
    processes: ProcessPool, tmp_path: Path
) -> None:
    processes.run(_record_rounds, 2 * WORKERS, tmp_path)
    (tmp_path / "config.toml").write_text(CONFIG)
    conditions = observed_conditions(tmp_path, WORKERS)
    assert conditions.bits_per_second == pytest.approx(8 * LEAST_LINK_BYTES * (1 + 2))


@pytest.mark.parametrize("damage", [None, 0, "ten"])
@pytest.mark.parametrize("name", ["worker/steps", "worker/compute_seconds"])
def test_records_without_numbers_of_steps_are_named(
    tmp_path: Path, name: str, damage: object
) -> None:
    """A single damaged record changes little."""
    steps = step_records(100)
    write_run(tmp_path / "whole", steps, round_records(100))
    whole = observed_conditions(tmp_path / "whole", WORKERS)
    write_run(tmp_path / "one", [steps[0] | {name: damage}, *steps[1:]], round_records(100))
    one = observed_conditions(tmp_path / "one", WORKERS)
    assert one.step_seconds == pytest.approx(whole.step_seconds, rel=0.2)
    write_run(tmp_path / "none", [step | {name: damage} for step in steps], round_records(100))
    with pytest.raises(UserError, match=r"none has measured no times of steps: give a finished"):
        observed_conditions(tmp_path / "none", WORKERS)


def test_a_run_without_spreads_has_no_jitter(tmp_path: Path) -> None:
    steps = [step | {"worker/compute_spread": None} for step in step_records(100)]
    write_run(tmp_path, steps, round_records(100))
    assert observed_conditions(tmp_path, WORKERS).jitter == 0


def test_folders_that_were_copied_without_the_config_of_the_run(tmp_path: Path) -> None:
    """Two workers code as much in all formats, so theirs need not be known."""
    for workers in (2, 3):
        folder = tmp_path / str(workers)
        write_run(folder, step_records(100), round_records(100, workers=workers))
    assert observed_conditions(tmp_path / "2", 2).workers == 2
    with pytest.raises(
        UserError, match=r"3 has no diloco.*codec in .*: copy config.toml of the run"
    ):
        observed_conditions(tmp_path / "3", 3)
    (tmp_path / "3/config.toml").write_text(CONFIG)
    assert observed_conditions(tmp_path / "3", 3).workers == 3
