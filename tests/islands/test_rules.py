"""Tests of the decisions of one island, from what it knows of the others."""

from typing import Any

import pytest

from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import Hint, Members
from torchtitan_diloco.islands.records import Close, Facts, Open, Part, Take, encode
from torchtitan_diloco.islands.rules import Island, Timing

EXPIRY = 4.0


def two_owners() -> State:
    state = State(lambda _, __: "v0")
    facts = Facts(
        run="r", slots=3, begin=1, total_tokens=9, checksums=("v0",), fingerprints={"code": "a"}
    )
    takes = [Take(run="r", slot=slot, incarnation=f"i{slot}", replaces=None) for slot in (0, 1)]
    for sequence, record in enumerate([facts, *takes], start=1):
        assert not state.read(sequence, encode(record)).void
    return state


def hint(name: str, step: int, caught_up: bool = True) -> Hint:
    return Hint(name, step, tokens=0, step_seconds=0.0, caught_up=caught_up)


def pass_time(members: Members, begin: float, end: float, *heard: str) -> None:
    """Tick four times a second, and hear of some."""
    for quarter in range(int((end - begin) * 4) + 1):
        now = begin + quarter / 4
        members.tick(now)
        for name in heard:
            members.hear(hint(name, quarter), now)


def test_nobody_is_gone_in_the_first_expiry_time() -> None:
    members, state = Members(EXPIRY), two_owners()
    assert not members.is_gone("i1", 1000.0), "there is no connection yet"
    members.connect(1000.0)
    pass_time(members, 1000.0, 1003.5, "i0")
    assert not members.is_gone("i1", 1003.5)
    assert members.is_ready("i1", 1003.5, step_seconds=0.1)
    pass_time(members, 1003.5, 1004.0, "i0")
    assert members.is_gone("i1", 1004.0)
    assert not members.is_ready("i1", 1004.0, step_seconds=0.1)
    assert members.is_ready("i0", 1004.0, step_seconds=0.1)
    assert members.slot_to_take(state, "new/1", 1004.0) == (2, None), (
        "a free one before a dead one's"
    )


def test_a_pause_of_this_process_is_not_taken_for_silence_of_the_others() -> None:
    members = Members(EXPIRY)
    members.connect(0.0)
    pass_time(members, 0.0, 10.0, "i0")
    members.tick(18.0)
    assert not members.is_gone("i0", 18.0)
    pass_time(members, 18.0, 22.0)
    assert members.is_gone("i0", 22.0)


def test_who_does_not_move_or_has_not_caught_up_is_not_waited_for() -> None:
    members = Members(EXPIRY)
    members.connect(0.0)
    for second in range(10):
        members.tick(second)
        members.hear(hint("stands", 3), second)
        members.hear(hint("reads", second, caught_up=False), second)
    assert not members.is_ready("stands", 9.0, step_seconds=0.1)
    assert members.is_ready("stands", 9.0, step_seconds=4.0), (
        "its steps may be as long as one's own"
    )
    assert not members.is_ready("reads", 9.0, step_seconds=0.1)
    assert not members.is_gone("stands", 9.0)


def test_the_slot_of_a_dead_island_is_taken_when_none_is_free() -> None:
    members, state = Members(EXPIRY), two_owners()
    take = Take(run="r", slot=2, incarnation="i2", replaces=None)
    state.read(4, encode(take))
    members.connect(0.0)
    pass_time(members, 0.0, 5.0, "i0", "i2")
    assert members.slot_to_take(state, "new/1", 5.0) == (1, "i1")


def test_an_island_takes_the_slot_of_its_earlier_start_and_no_other() -> None:
    members, state = Members(EXPIRY), two_owners()
    members.connect(0.0)
    assert members.slot_to_take(state, "i1/again", 1.0) is None, "it may still be running"
    pass_time(members, 0.0, 5.0, "i0")
    assert members.slot_to_take(state, "i1/again", 5.0) == (1, "i1")
    with pytest.raises(ValueError, match="i0 is running already"):
        members.slot_to_take(state, "i0/again", 5.0)


def test_the_part_after_an_outage_is_not_taken_for_what_an_island_usually_sends() -> None:
    """It has the work of fifty cycles. The next round must not count on as much."""
    state, members = two_owners(), Members(EXPIRY)
    island = Island(state, members, 0, Timing(Schedule(10, 1, 1)), now=0.0)
    members.connect(0.0)
    pass_time(members, 0.0, 10.0, "i0", "i1")
    ends, weights = [0, 0], [(20, 20), (20, 1000), (20,)]

    def read(record: Open | Part | Close) -> int:
        sequence = state.sequence + 1
        assert not island.read(sequence, encode(record), now=0.0).void
        return sequence

    for version, of_slots in enumerate(weights):
        who: dict[str, Any] = {"run": "r", "fragment": 0}
        read(Open(**who, slot=0, incarnation="i0", version=version + 1, grace=1.0))
        checked = {}
        for slot, weight in enumerate(of_slots):
            start, ends[slot] = ends[slot], ends[slot] + weight
            part = Part(
                **who,
                slot=slot,
                incarnation=f"i{slot}",
                number=version + 1,
                base=version,
                checksum="v0",
                start=start,
                end=ends[slot],
                weight=weight,
                finite=True,
            )
            checked[read(part)] = ""
        close = island.rounds[0].close(checked, lr=1.0, now=10.0)
        assert close is not None
        assert close.lr == (1.0 if len(of_slots) == 2 else 0.5)
        read(close)


def test_the_lags_of_parts_that_are_fetched_in_another_order_are_known() -> None:
    """Else rounds would wait for half a cycle, as for parts of which nothing is known."""
    state, members = two_owners(), Members(EXPIRY)
    island = Island(state, members, 0, Timing(Schedule(10, 1, 1)), now=0.0)
    island.step_seconds = 1.0
    members.connect(0.0)
    pass_time(members, 0.0, 40.0, "i0", "i1")

    def read(record: type[Open] | type[Part], slot: int, now: float, **fields: Any) -> int:
        fields |= {"run": "r", "fragment": 0, "slot": slot, "incarnation": f"i{slot}"}
        made = record(**fields)
        assert not island.read(state.sequence + 1, encode(made), now).void
        return state.sequence

    def part(slot: int, number: int, now: float) -> int:
        ends: dict[str, int] = {"start": 20 * number - 20, "end": 20 * number, "weight": 20}
        return read(Part, slot, now, number=number, base=number - 1, checksum="v0", **ends)

    read(Open, 0, 10.0, version=1, grace=0.5)
    first, second = part(0, 1, 10.0), part(1, 1, 10.0)
    assert island.rounds[0].close({second: ""}, lr=1.0, now=10.1) is None
    assert island.rounds[0].close({first: "", second: ""}, lr=1.0, now=12.0) is not None
    assert [list(one.lags) for one in island.habits[:2]] == [[2.0], pytest.approx([0.1])]
