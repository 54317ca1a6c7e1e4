"""The end of simulated runs, sick islands, false records, and parts that come late."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.islands.plan import Nature, Plan
from tests.islands.simulation import World, check
from tests.islands.test_simulation import PHASES
from torchtitan_diloco.islands.records import Close, End, Open, Part, decode

# --- the end, and false records -------------------------------------------------------------------


@settings(max_examples=15, phases=PHASES)
@given(
    deaths=st.integers(0, 3),
    outage=st.tuples(st.floats(3.0, 15.0), st.floats(2.0, 30.0)),
    steps=st.lists(st.sampled_from([0.1, 0.107, 0.2]), min_size=4, max_size=4),
    seed=st.integers(0, 999),
)
def test_the_run_ends_when_its_tokens_are_merged(
    deaths: int, outage: tuple[float, float], steps: list[float], seed: int
) -> None:
    """In an outage an island counts its own tokens for all. Others may have died meanwhile."""
    at, seconds = outage
    plan = Plan(steps=150, slots=4, begin=4)
    world = World(plan, seed)
    islands = [world.start(f"i{n}", Nature(step=step)) for n, step in enumerate(steps)]

    def strike() -> None:
        for island in (one for one in islands if not one.finished):
            island.cut(seconds)
        for number, island in enumerate(islands[:deaths]):
            island.alive = False
            world.start(f"i{number}", island.nature, at=seconds + 5.0)

    world.after(at, strike)
    world.run()
    state, _ = check(world)
    assert state.is_complete
    facts = plan.facts
    assert min(one.clock for one in state.fragments) >= facts.total_tokens - facts.cycle


@settings(max_examples=12, phases=PHASES)
@given(
    count=st.integers(2, 4),
    at=st.floats(2.0, 4.0),
    delay=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
def test_one_wrong_bit_ends_no_healthy_island(count: int, at: float, delay: int, seed: int) -> None:
    """Of two, nobody knows which is healthy: both replay the log, and go on."""
    world = World(Plan(steps=80, slots=count, begin=count, delay=delay), seed)
    sick, *healthy = (world.start(f"i{number}", Nature(jitter=0.02)) for number in range(count))
    world.after(at, sick.flip)
    world.run()
    state, _ = check(world)
    assert state.is_complete
    assert sick.failed
    assert {one.failed for one in healthy} == {count == 2}


@settings(max_examples=10, phases=PHASES)
@given(sick_at=st.integers(0, 40), steps=st.sampled_from([0.1, 0.13]), seed=st.integers(0, 99))
def test_only_the_sick_island_is_left_out(sick_at: int, steps: float, seed: int) -> None:
    """Its parameters go wrong, so its deltas are a hundred times as large."""
    world = World(Plan(steps=60), seed)
    sick = world.start("sick", Nature(sick_at=sick_at, step=steps))
    for name in ("one", "other"):
        world.start(name, Nature(jitter=0.02))
    world.run()
    check(world)
    merged = {part.chunks[0].sequence for _, entry in world.entries for part in entry.parts}
    assert {world.norms[number] for number in merged} == {1.0}
    left_out = {part.incarnation for _, entry in world.entries for part in entry.outliers}
    assert left_out == {sick.incarnation}


@pytest.mark.parametrize("seed", range(4))
def test_an_island_whose_parts_are_all_left_out_does_not_delay_the_end(seed: int) -> None:
    """Its clock follows the merged tokens, and the others, which are done, add none."""
    world = World(Plan(sync_every=20, steps=60), seed)
    world.start("sick", Nature(sick_at=40, step=0.13))
    for name in ("one", "other"):
        world.start(name)
    world.run(until=60.0)
    state, _ = check(world)
    assert state.ended


FALSE = [
    {"weight": 2**52},
    {"weight": 2**53},
    {"end": 2**53},
    {"ranks": 65_536},
    {"grace": 1e6},
    {"grace": 3600.0},
    {"lr": 1e300},
    {"absent": ("everybody",)},
]


@settings(max_examples=20, phases=PHASES)
@given(wrong=st.sampled_from(FALSE), at=st.floats(0.5, 5.0), seed=st.integers(0, 99))
def test_no_record_ends_stalls_or_crashes_a_run(
    wrong: dict[str, object], at: float, seed: int
) -> None:
    """A record of one of the islands, with one number changed, or the end of the run."""
    world = World(Plan(steps=60), seed)
    islands = [world.start(f"i{number}") for number in range(3)]

    def strike() -> None:
        state = islands[0].state
        if "absent" in wrong:
            owners = state.owners()
            who = {"run": "r1", "slot": 0, "incarnation": owners.get(0, "nobody")}
            absent = tuple(owners.values())
            world.append(End(**who, absent=absent, heads=state.heads))  # type: ignore[arg-type]
            return
        for raw in reversed(world.log):
            record = decode(raw)
            if wrong.keys() <= set(record.__struct_fields__):
                changes = dict(wrong)
                if isinstance(record, Part | Open | Close):
                    version = state.fragments[record.fragment].version
                    changes |= {"number": 1000} if isinstance(record, Part) else {}
                    changes |= {"version": version + 1} if isinstance(record, Open | Close) else {}
                world.append(msgspec.structs.replace(record, **changes))
                return

    world.after(at, strike)
    world.run(until=60.0)
    state, _ = check(world)
    assert state.is_complete
    assert all(island.finished for island in islands)
    assert max(island.idle for island in islands) < 10.0


# --- no starvation --------------------------------------------------------------------------------


@settings(max_examples=20, phases=PHASES)
@given(
    steps=st.lists(st.sampled_from([0.1, 0.12, 0.2, 0.4]), min_size=2, max_size=3),
    uploads=st.lists(st.sampled_from([0.01, 0.2, 0.5]), min_size=3, max_size=3),
    delay=st.sampled_from([0, 1, 5]),
    alpha=st.sampled_from([0.0, 0.25, 0.5]),
    seed=st.integers(0, 99),
)
def test_all_work_is_merged_in_time(
    steps: list[float], uploads: list[float], delay: int, alpha: float, seed: int
) -> None:
    """With uploads shorter than H steps of the fastest island."""
    plan = Plan(delay=delay, alpha=alpha, steps=60, slots=len(steps), begin=len(steps), expiry=4.0)
    world = World(plan, seed)
    islands = [
        world.start(f"i{number}", Nature(step=step, upload=upload, jitter=0.01))
        for number, (step, upload) in enumerate(zip(steps, uploads, strict=False))
    ]
    world.run()
    state, entries = check(world)
    assert [one.void for one in world.void if isinstance(one.record, Part)] == []
    valid = [entry.close for entry in entries]
    for fragment in range(plan.fragments):
        closes = [close for close in valid if close.fragment == fragment]
        fastest_cycle = plan.sync_every * (min(steps) - 0.01)
        assert len(closes) <= world.now / fastest_cycle, "rounds come no faster than that"
        for number, slot in enumerate(state.slots):
            island = islands[[one.machine.slot for one in islands].index(number)]
            assert not slot.ledgers[fragment].lost
            left = island.machine.position - slot.ledgers[fragment].taken_to
            assert left <= 2 * (plan.sync_every + 1) * plan.batch, "two cycles before the end"


@pytest.mark.parametrize("delay", [0, 1])
def test_a_fast_island_is_hardly_idle_beside_a_slow_one(delay: int) -> None:
    plan = Plan(delay=delay, slots=2, begin=2, steps=200, floor=0.05)
    world = World(plan)
    fast, slow = (world.start(f"i{step}", Nature(step=step)) for step in (0.1, 0.4))
    world.run()
    state, _ = check(world)
    ledgers = state.slots[slow.machine.slot].ledgers
    assert min(ledger.taken_to for ledger in ledgers) >= 0.9 * slow.machine.position
    assert fast.idle < 0.1 * fast.machine.step * 0.1 * (10 if delay == 0 else 1), fast.idle


# --- parts that come later than the grace ---------------------------------------------------------


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
