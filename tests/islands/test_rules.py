"""Tests of the decisions of one island, from what it knows of the others."""

from typing import Any

import pytest

from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import Hint, IslandFailedError, Members
from torchtitan_diloco.islands.records import Facts, Open, Part, Record, Take, encode
from torchtitan_diloco.islands.rules import Island, Timing

EXPIRY = 4.0


def two_owners() -> State:
    """Return the state of a run whose first two slots belong to i0 and i1."""
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


class Alone:
    """The island i0, which reads what i1 and itself have written."""

    def __init__(self, connected_for: float = 10.0) -> None:
        self.state, self.members = two_owners(), Members(EXPIRY)
        self.island = Island(self.state, self.members, 0, Timing(Schedule(10, 1, 1)), now=0.0)
        self.rounds = self.island.rounds[0]
        self.members.connect(0.0)
        pass_time(self.members, 0.0, connected_for, "i0", "i1")

    def read(self, record: Record, now: float = 0.0) -> int:
        """Read a record that is valid, and return its number."""
        assert not self.island.read(self.state.sequence + 1, encode(record), now).void
        return self.state.sequence

    def open(self, version: int, now: float = 0.0, grace: float = 1.0) -> None:
        who: dict[str, Any] = {"run": "r", "slot": 0, "incarnation": "i0", "fragment": 0}
        self.read(Open(**who, version=version, grace=grace), now)

    def part(self, slot: int, number: int, weight: int = 20, now: float = 0.0) -> int:
        start = self.state.slots[slot].ledgers[0].taken_to
        range_: dict[str, Any] = {"start": start, "end": start + weight, "weight": weight}
        return self.read(part_of(slot, number=number, base=number - 1, **range_), now)


def part_of(slot: int, checksum: str = "v0", **changed: Any) -> Part:
    fields: dict[str, Any] = {"number": 1, "base": 0, "start": 0, "end": 20, "weight": 20}
    who: dict[str, Any] = {"run": "r", "slot": slot, "incarnation": f"i{slot}", "fragment": 0}
    return Part(**who, checksum=checksum, **fields | changed)


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
    one = Alone()
    for version, weights in enumerate([(20, 20), (20, 1000), (20,)], start=1):
        one.open(version)
        checked = {one.part(slot, version, weight): "" for slot, weight in enumerate(weights)}
        close = one.rounds.close(checked, lr=1.0, now=10.0)
        assert close is not None
        assert close.lr == (1.0 if len(weights) == 2 else 0.5)
        one.read(close)


def test_the_lags_of_parts_that_are_fetched_in_another_order_are_known() -> None:
    """Else rounds would wait for half a cycle, as for parts of which nothing is known."""
    one = Alone(connected_for=40.0)
    one.island.step_seconds = 1.0
    one.open(1, now=10.0, grace=0.5)
    first, second = one.part(0, 1, now=10.0), one.part(1, 1, now=10.0)
    assert one.rounds.close({second: ""}, lr=1.0, now=10.1) is None
    assert one.rounds.close({first: "", second: ""}, lr=1.0, now=12.0) is not None
    assert [list(one.lags) for one in one.island.habits[:2]] == [[2.0], pytest.approx([0.1])]


@pytest.mark.parametrize("confirmed", [True, False])
def test_who_has_other_bits_ends_unless_another_island_has_them(confirmed: bool) -> None:
    state, members = two_owners(), Members(EXPIRY)
    take = Take(run="r", slot=2, incarnation="i2", replaces=None)
    state.read(4, encode(take))
    island = Island(state, members, 0, Timing(Schedule(10, 1, 1)), now=0.0)
    island.finish_step(2, 20, 0.1)
    island.leaving = True
    assert island.rounds[0].send_is_due(0.0)
    assert island.read(5, encode(part_of(1, checksum="other")), now=0.0).disputed
    assert not island.rounds[0].send_is_due(0.0), "nothing is written meanwhile"
    if confirmed:
        island.read(6, encode(part_of(2)), now=1.0)
        assert "i1 has other bits of fragment 0" in next(island.settle_disputes(1.0))
        assert island.rounds[0].send_is_due(1.0)
    else:
        assert list(island.settle_disputes(EXPIRY)) == []
        with pytest.raises(IslandFailedError, match="no island has confirmed"):
            list(island.settle_disputes(EXPIRY + 0.1))


def test_what_is_known_of_a_slot_is_that_of_its_owner() -> None:
    one = Alone()
    one.part(1, 1)
    one.island.habits[1].lags.append(3.0)
    assert one.island.habits[1].weight(0) == 20
    one.read(Take(run="r", slot=1, incarnation="new", replaces="i1"))
    assert (one.island.habits[1].weight(0), list(one.island.habits[1].lags)) == (0, [])


@pytest.mark.parametrize(("connected", "known"), [(7.0, 0), (0.0, 1)])
def test_lags_are_not_measured_while_an_outage_is_read(connected: float, known: int) -> None:
    """All its records come in a moment: nothing would seem to take any time."""
    one = Alone()
    one.members.connect(connected)
    pass_time(one.members, connected, 10.0, "i0", "i1")
    one.open(1, now=9.0)
    one.rounds.close({one.part(1, 1, now=10.0): ""}, lr=1.0, now=10.0)
    assert len(one.island.habits[1].lags) == known
