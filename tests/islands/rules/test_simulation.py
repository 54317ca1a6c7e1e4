"""The promises of islands, in simulated runs that drive the shipped rules.

`python -m tests.islands.rules.simulate --seeds 5000` runs many more with faults.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.islands.rules import toy
from tests.islands.rules.faults import build, stop_and_return
from tests.islands.rules.island_process import Nature
from tests.islands.rules.liars import Liar, ask
from tests.islands.rules.simulation import Plan, Simulation
from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.islands.rules import fragment
from torchtitan_diloco.islands.rules.changes import Set
from torchtitan_diloco.islands.rules.decision import Fate
from torchtitan_diloco.islands.rules.names import name_of

SEEDS = 100
EACH = 10


@pytest.mark.parametrize("first", range(0, SEEDS, EACH))
def test_any_faults(first: int) -> None:
    for seed in range(first, first + EACH):
        build(seed).run()


# --- A: one job -----------------------------------------------------------------------------------


def lockstep(plan: Plan, seed: int = 1) -> Simulation:
    simulation = Simulation(plan, seed)
    for number in range(plan.start_with):
        simulation.start(f"i{number}", Nature(step=plan.step))
    return simulation


def check_one_job(simulation: Simulation) -> None:
    """Compare all versions but those of the end, where islands send what is left."""
    plan = simulation.plan
    schedule = Schedule(plan.sync_every, plan.fragments, plan.delay)
    expected = toy.one_job(schedule, plan.start_with, plan.steps, plan.alpha, plan.batch)
    for number, versions in enumerate(expected):
        assert len(versions) > 3
        for version, published in enumerate(versions):
            known = simulation.known[number, version]
            assert known == {toy.checksum(published)}, f"fragment {number}, version {version}"


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    ("delay", "alpha", "fragments"), [(0, 0.0, 2), (1, 0.5, 3), (5, 0.25, 1), (2, 0.0, 4)]
)
def test_islands_in_lockstep_make_the_versions_of_one_job(
    workers: int, delay: int, alpha: float, fragments: int
) -> None:
    plan = Plan(
        sync_every=8,
        fragments=fragments,
        delay=delay,
        alpha=alpha,
        steps=48,
        start_with=workers,
        grace=4.0,
        is_rough=False,
    )
    simulation = lockstep(plan)
    simulation.start_syncer()
    simulation.run()
    check_one_job(simulation)


@pytest.mark.parametrize("half", [0.0, 0.5])
@pytest.mark.parametrize("first", range(10, 60, 5))
def test_a_syncer_that_is_killed_between_any_two_calls(
    first: int, half: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor goes on with the bits of one job, as the outer state of the last version is
    there: one is written with each version."""
    monkeypatch.setattr(fragment, "FRESH", 60.0)  # they wait for the successor, too
    plan = Plan(sync_every=8, steps=32, grace=60.0, is_rough=False, copies_every=1)
    for call in range(first, first + 5):
        simulation = lockstep(plan)
        simulation.start_syncer()
        simulation.start_syncer(after=0.05)
        simulation.world.run(lambda: False, until=0.1)
        simulation.syncers[0].dies_at = call + half
        simulation.run()
        assert not simulation.losses
        assert set(simulation.fates) <= {Fate.MERGED, Fate.OVER}
        if simulation.is_exact:
            check_one_job(simulation)


# --- D: no starvation -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uploads", "slower"),
    [
        ((0.05, 1.0, 2.0), (1, 1, 1)),
        ((0.05, 0.7, 1.4, 2.1), (1, 1.4, 1.7, 2.1)),
        ((0.05, 0.05), (1, 4)),
    ],
)
def test_rounds_come_at_the_pace_of_the_fastest_and_all_work_is_merged(
    uploads: tuple[float, ...], slower: tuple[float, ...]
) -> None:
    plan = Plan(sync_every=30, steps=360, start_with=len(uploads), step=0.1, delay=5, fragments=1)
    simulation = Simulation(plan, seed=3)
    simulation.start_syncer()
    for number, (upload, factor) in enumerate(zip(uploads, slower, strict=True)):
        simulation.start(f"i{number}", Nature(step=0.1 * factor, upload=upload))
    simulation.run()
    steps = max(process.machine.step for process in simulation.islands)
    [shared] = simulation.last.fragments
    assert 0.8 <= shared.version / (steps / plan.sync_every) <= 1.4
    assert max(simulation.late) <= 4
    assert not simulation.losses
    for slot, process in enumerate(simulation.islands):
        merged = sum(
            part.end - part.start
            for _, _, parts, _ in simulation.versions
            for number, part in parts
            if number == process.machine.slot
        )
        unmerged = process.machine.position - merged
        assert unmerged <= 2 * plan.sync_every * plan.batch, (
            f"island {slot}: not only its last parts"
        )
        assert process.waited.seconds <= 0.03 * simulation.world.now


@pytest.mark.parametrize(
    ("honest", "lies"),
    [
        (1, {"is_idle": True}),
        (1, {"faster": 0}),
        (2, {"faster": 1000, "samples": 1}),
        (2, {"faster": 1000, "samples": 20}),
    ],
)
def test_an_island_that_lies_starves_nobody(honest: int, lies: dict[str, Any]) -> None:
    """The uploads of the others take about a cycle, or two: if versions came faster, their parts
    would be too old. With a single honest island, one that lies about its steps could set the pace.
    """
    plan = Plan(sync_every=30, steps=4000, start_with=1, step=0.1, delay=5, fragments=1)
    simulation = Simulation(plan, seed=5)
    simulation.start_syncer()
    for number in range(honest):
        simulation.start(f"i{number}", Nature(step=0.1, upload=2.5 * honest))
    simulation.world.run(lambda: False, until=3.0)
    Liar(simulation, "liar", notes=10_000, **lies)
    simulation.world.run(lambda: False, until=50.0)
    step = max(island.machine.step for island in simulation.islands)
    [shared] = simulation.last.fragments
    assert shared.version <= 2.3 * step / plan.sync_every
    assert Fate.STALE not in simulation.fates
    for island in simulation.islands:
        assert island.machine.slot is not None
        ledger = simulation.last.slots[island.machine.slot].ledgers[0]
        unmerged = plan.batch * island.machine.step - ledger.taken
        assert unmerged <= 4 * plan.sync_every * plan.batch
        assert ledger.lost == 0


def test_a_store_that_is_restarted_leaves_the_leader_in_its_place() -> None:
    plan = Plan(steps=60, start_with=2)
    simulation = lockstep(plan)
    simulation.start_syncer()
    simulation.start_syncer(after=1.0)
    simulation.world.schedule(
        6.0, None, lambda: setattr(simulation.world.store, "away_until", simulation.world.now + 23)
    )
    simulation.run()
    assert (simulation.terms, simulation.superseded) == (1, 0)
    assert not simulation.losses


def test_an_island_that_slept_goes_on_with_the_highest_decision() -> None:
    plan = Plan(steps=200, start_with=2)
    simulation = lockstep(plan)
    simulation.start_syncer()
    simulation.world.run(lambda: False, until=8.0)
    sleeper = simulation.islands[0]
    before = sleeper.machine.decision
    sleeper.paused_until = 50.0
    simulation.run()
    assert before is not None
    assert sleeper.machine.decision is not None
    assert sleeper.machine.decision.number > before.number + 20
    assert sleeper.ending in ("ended", "rejoin")


def test_a_lost_location_goes_on_from_a_checkpoint() -> None:
    """Its ranges and clocks go on where they were, with changed settings and added slots."""
    simulation = lockstep(Plan(steps=60, slots=2))
    simulation.save_every = 5
    simulation.start_syncer()
    for change in (Set("slots", "3"), Set("sync_every", "8"), Set("total_tokens", "900")):
        ask(simulation, change)
    simulation.start("added", after=6.0)
    simulation.world.run(lambda: False, until=12.0)
    again = Simulation(simulation.plan, seed=2)
    again.start_syncer()
    for process in simulation.islands:
        again.start(process.name, checkpoint=process.checkpoint)
    again.run()
    first = again.first_founded
    founder = name_of(first.founder)
    checkpoint = next(island for island in simulation.islands if island.name == founder).checkpoint
    assert checkpoint is not None
    assert first.run == checkpoint.saved.run
    assert [shared.clock for shared in first.fragments] == checkpoint.saved.clocks
    settings = again.settings
    settings = replace(settings, sync_every=8, slots=3, total_tokens=900)
    assert replace(first.settings, fastest=settings.fastest) == settings
    assert len(first.slots) == 3
    assert all(
        ledger.taken == began.position
        for slot, began in zip(first.slots, checkpoint.saved.slots, strict=True)
        for ledger in slot.ledgers
    )


def test_a_mute_island_stalls_nobody() -> None:
    plan = Plan(steps=90, start_with=2, grace=2.0, step=0.2)
    simulation = Simulation(plan, seed=4)
    simulation.start_syncer()
    for name in ("a", "b"):
        simulation.start(name, Nature(step=0.2))
    simulation.start("mute", Nature(step=0.2, is_mute=True))
    simulation.run(until=200.0)
    healthy = [island for island in simulation.islands if not island.nature.is_mute]
    assert all(island.waited.seconds < 10 * plan.grace for island in healthy)


def test_a_planned_stop_loses_nothing() -> None:
    plan = Plan(steps=60)
    simulation = lockstep(plan)
    simulation.start_syncer()
    rng = simulation.world.random
    simulation.world.schedule(
        6.0, None, lambda: stop_and_return(simulation, simulation.islands[0], rng)
    )
    simulation.run()
    assert len(simulation.islands) == 3
    assert simulation.islands[0].ending == "left"
    assert not simulation.losses
    assert simulation.islands[2].name == simulation.islands[0].name


def test_the_bits_of_uploads_that_outlast_ten_decisions() -> None:
    plan = Plan(steps=60)
    simulation = lockstep(plan)
    simulation.upload_seconds = 12.0
    simulation.start_syncer()
    simulation.run()
    assert not simulation.losses
