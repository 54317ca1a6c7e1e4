"""Parts that come later than the grace, in simulated networks."""

import pytest

from tests.islands.plan import Nature, Plan
from tests.islands.simulation import World, check


@pytest.mark.parametrize("delay", [1, 5])
def test_a_round_stays_open_for_parts_that_usually_come_late(delay: int) -> None:
    """The grace ends before any exchange can. Nobody stops training for longer than it."""
    plan = Plan(sync_every=20, delay=delay, steps=300, slots=2, begin=2, floor=0.05)
    world = World(plan)
    islands = [world.start(f"i{number}", Nature(upload=0.6)) for number in range(2)]
    world.run()
    check(world)
    assert {len(entry.parts) for _, entry in world.entries} == {2}
    assert {entry.close.lr for _, entry in world.entries} == {1.0}
    assert all(island.idle <= 1.0 for island in islands)


def test_who_uploads_for_most_of_a_cycle_sends_earlier() -> None:
    """Nobody waits so long for it. After some rounds its parts are there when the others open."""
    plan = Plan(sync_every=20, steps=300, slots=2, begin=2, floor=0.05)
    world = World(plan)
    islands = world.start("fast"), world.start("slow", Nature(upload=1.2))
    world.run()
    check(world)
    assert all(island.idle <= 1.0 for island in islands)
    for entry in (entry for at, entry in world.entries if 8.0 < at < 25.0):
        assert [part.base for part in entry.parts] == [entry.close.version - 1] * 2


def test_an_island_whose_uplink_is_too_slow_is_told_so() -> None:
    """The others neither wait for it nor say anything."""
    world = World(Plan(steps=300, slots=2, begin=2, floor=0.05))
    fast, slow = world.start("fast"), world.start("slow", Nature(upload=7.0))
    world.run()
    check(world)
    assert fast.idle < 1.0
    told = [text for text in slow.machine.notices if "needs an uplink of at least" in text]
    assert told
    assert all(int(one.split()[2]).bit_count() == 1 for one in told)
    assert not any("uplink" in text for text in fast.machine.notices)


@pytest.mark.parametrize("fault", ["pause", "cut"])
def test_a_pause_or_an_outage_is_no_slow_uplink(fault: str) -> None:
    world = World(Plan(steps=150, slots=2, begin=2, expiry=2.0))
    away, other = (world.start(f"i{number}", Nature(upload=0.3)) for number in range(2))
    world.after(4.0, lambda: away.pause(12) if fault == "pause" else away.cut(12))
    world.run()
    check(world)
    found = [*away.machine.notices, *other.machine.notices]
    assert not any("uplink" in text for text in found), found


@pytest.mark.parametrize("quorum", [1, 2])
def test_an_entry_without_a_ready_island_takes_a_share_of_an_outer_step(quorum: int) -> None:
    """With a quorum of two there is none: the round waits."""
    plan = Plan(sync_every=20, steps=300, slots=2, begin=2, floor=0.05, quorum=quorum, expiry=4.0)
    world = World(plan)
    fast, slow = world.start("fast"), world.start("slow", Nature(step=0.2))
    world.after(12.0, lambda: slow.pause(1.8))
    world.run()
    check(world)
    usual = [entry for at, entry in world.entries if 5.0 < at < 25.0]
    alone = [entry for entry in usual if len(entry.parts) == 1]
    assert bool(alone) == (quorum == 1)
    assert {entry.parts[0].incarnation for entry in alone} <= {fast.incarnation}
    for entry in usual:
        expected = 2 / 3 if entry in alone else 1.0  # it is twice as fast
        assert entry.close.lr == pytest.approx(expected, abs=0.05)
