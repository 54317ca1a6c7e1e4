"""Decisions of one island, given the state of the log and the heartbeats of the others."""

from typing import Any
from unittest.mock import Mock

import pytest

from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.diloco.vitals import HUNG, STOPPED, Vitals
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.machine import Machine
from torchtitan_diloco.islands.members import Hint, IslandFailedError, Members, Numbers
from torchtitan_diloco.islands.records import Done, Facts, Give, Open, Part, Record, Take, encode
from torchtitan_diloco.islands.rounds import Checked, Timing, find_outliers

EXPIRY, PATIENCE = 4.0, 10.0


def owned(*slots: int, total_tokens: int = 10**6, cycle: int = 1000) -> State:
    """Return the state of a run with three slots, in which i0 owns slot 0, and so on."""
    state = State()
    size: dict[str, Any] = {"slots": 3, "begin": 1, "total_tokens": total_tokens, "cycle": cycle}
    size["outer_lr"] = 1.0
    facts = Facts(run="r", **size, checksums=("v0",), fingerprints={"code": "a"})
    takes = [Take(run="r", slot=slot, incarnation=f"i{slot}", replaces=None) for slot in slots]
    for sequence, record in enumerate([facts, *takes], start=1):
        assert not state.read(sequence, encode(record)).void
    return state


def members(
    begin: float, end: float, *heard: str, of: Members | None = None, sick: str = ""
) -> Members:
    """Connect, or use those that are connected; tick four times a second, and hear of some."""
    found = of or Members(EXPIRY, PATIENCE)
    if of is None:
        found.connect(begin)
    for quarter in range(int((end - begin) * 4) + 1):
        now = begin + quarter / 4
        found.tick(now)
        for name in heard:
            copies = ((0, "other" if name in sick else "v0"),)
            found.hear(Hint(name, quarter, 0, 0.0, caught_up=True, copies=copies), now)
    return found


class Alone:
    """The island i0, which reads what i1 and itself have written."""

    def __init__(
        self, connected_at: float = 0.0, slots: tuple[int, ...] = (0, 1), **facts: int
    ) -> None:
        self.state, heard = owned(*slots, **facts), members(connected_at, 40.0, "i0", "i1")
        self.island = Machine("i0", heard, Timing(Schedule(10, 1, 1)))
        self.island.begin(self.state)
        heard.tick = Mock()  # type: ignore[method-assign]  # time goes back and forth
        assert self.island.records({}, 0.0) == []
        self.rounds = self.island.rounds[0]

    def read(self, record: Record, now: float = 10.0) -> int:
        """Read a record that is valid, and return its number."""
        outcome = self.island.read(self.state.sequence + 1, encode(record), now)
        assert not outcome.void
        if outcome.entry is not None:
            self.state.learn(0, outcome.entry.close.version, "v0")
        return self.state.sequence

    def open(self, version: int, now: float = 10.0, grace: float = 1.0) -> None:
        who: dict[str, Any] = {"run": "r", "slot": 0, "incarnation": "i0", "fragment": 0}
        self.read(Open(**who, version=version, grace=grace), now)

    def part(self, slot: int, number: int, weight: int = 20, now: float = 10.0) -> int:
        start = self.state.slots[slot].ledgers[0].taken_to
        range_: dict[str, Any] = {"start": start, "end": start + weight, "weight": weight}
        return self.read(part_of(slot, number=number, base=number - 1, **range_), now)


def part_of(slot: int, checksum: str = "v0", **changed: Any) -> Part:
    fields: dict[str, Any] = {"number": 1, "base": 0, "start": 0, "end": 20, "weight": 20}
    who: dict[str, Any] = {"run": "r", "slot": slot, "incarnation": f"i{slot}", "fragment": 0}
    return Part(**who, checksum=checksum, **fields | changed)


def test_nobody_is_gone_in_the_first_expiry_time_nor_after_a_pause() -> None:
    assert not Members(EXPIRY, 0.0).is_silent("i1", 1000.0), "there is no connection yet"
    found = members(1000.0, 1003.5, "i0")
    assert not found.is_silent("i1", 1003.5)
    assert found.is_ready("i1", 1003.5, step_seconds=0.1)
    members(1003.5, 1004.0, "i0", of=found)
    assert found.is_silent("i1", 1004.0)
    assert found.seconds_until_gone("i1", 1004.0) == 6.0
    assert not found.is_ready("i1", 1004.0, step_seconds=0.1)
    assert found.is_ready("i0", 1004.0, step_seconds=0.1)
    found.tick(1018.0)  # this process has paused, so the others may not be silent
    assert not found.is_silent("i0", 1018.0)
    members(1018.0, 1022.0, of=found)
    assert found.is_silent("i0", 1022.0)
    assert not found.seconds_until_gone("i0", 1022.0)
    found.disconnect()
    assert not found.is_silent("i0", 1030.0)


def test_who_does_not_move_or_has_not_caught_up_is_not_waited_for() -> None:
    found = members(0.0, 0.0)
    for second in range(10):
        found.tick(second)
        found.hear(Hint("stands", 3, 0, 0.0, caught_up=True), second)
        found.hear(Hint("reads", second, 0, 0.0, caught_up=False), second)
    assert not found.is_ready("stands", 9.0, step_seconds=0.1)
    assert found.is_ready("stands", 9.0, step_seconds=4.0), "its steps may be as long as one's own"
    assert not found.is_ready("reads", 9.0, step_seconds=0.1)
    assert not found.is_silent("stands", 9.0)


def test_who_hangs_is_not_judged_by_its_last_steps() -> None:
    found, said = members(0.0, 0.0), Numbers(vitals=Vitals(compute=0.5))
    for second in range(13):
        found.tick(second)
        found.hear(Hint("compiles", 0, 0, 0.0, caught_up=True), second)
        found.hear(Hint("leaves", 3, 0, 0.5, caught_up=True, leaving=True), second)
        for name, step_seconds in ("short", 0.5), ("long", 2.0):
            hint = Hint(name, 3, 0, step_seconds, caught_up=True, numbers=said)
            found.hear(hint, second)
    expected = {3.0: said.vitals, EXPIRY: Vitals(), PATIENCE: Vitals()}
    assert {now: found.report("short", now).vitals for now in expected} == expected
    assert found.report("long", EXPIRY).vitals == said.vitals, "its steps are that long"
    assert not found.report("short", EXPIRY).absent
    assert found.report("short", PATIENCE).absent == HUNG
    assert not found.report("compiles", PATIENCE).absent
    assert not found.report("leaves", PATIENCE).absent
    assert found.report("short", 12.0 + EXPIRY).absent == STOPPED


def test_the_slot_to_take() -> None:
    """An island takes the slot of its earlier start, else a free one, else one of a dead island."""
    found = members(0.0, 5.0, "i0", "i2")
    assert found.slot_to_take(owned(0, 1), "new/1", 5.0) == (2, None)
    assert found.slot_to_take(owned(0, 1, 2), "new/1", 5.0) is None, "it may come back"
    assert members(0.0, 10.0, "i0", "i2").slot_to_take(owned(0, 1, 2), "new/1", 10.0) == (1, "i1")
    assert found.slot_to_take(owned(0, 1), "i1/again", 5.0) == (1, "i1")
    assert members(0.0, 1.0).slot_to_take(owned(0, 1), "i1/again", 1.0) is None, "it may be running"
    with pytest.raises(ValueError, match="i0 is already running"):
        found.slot_to_take(owned(0, 1), "i0/again", 5.0)


def test_the_part_after_an_outage_is_not_taken_for_what_an_island_usually_sends() -> None:
    """It has the work of fifty cycles. The next round must not expect as much."""
    one = Alone()
    for version, weights in enumerate([(20, 20), (20, 1000), (20,)], start=1):
        one.open(version)
        checked = {
            one.part(slot, version, weight): Checked() for slot, weight in enumerate(weights)
        }
        close = one.rounds.close(checked, lr=1.0, now=40.0)
        assert close is not None
        assert close.lr == (1.0 if len(weights) == 2 else 0.5)
        one.read(close)


def test_who_has_other_bits_than_most_islands_ends() -> None:
    """While half of them have others, nobody writes, and then both begin again."""
    one = Alone(slots=(0, 1, 2))
    disputes = one.island.others.disputes
    one.island.finish_step(2, 20, 0.1)
    one.island.leaving = True
    members(40.0, 40.0, "i1", of=one.island.members, sick="i1")
    assert disputes.settle(40.0) == []
    assert not one.rounds.send_is_due(40.0)
    members(40.0, 45.0, "i1", of=one.island.members, sick="i1")
    with pytest.raises(IslandFailedError, match="it is unknown which one is right"):
        disputes.settle(45.0)
    one.read(part_of(2), now=45.0)
    [warning] = disputes.settle(45.0)
    assert "fragment 0 has different bits on island i1 than on this one and 1 more" in warning
    assert "(version 0 is v0 here, and other on i1)" in warning
    assert disputes.settle(45.0) == []
    assert one.rounds.send_is_due(45.0)
    assert not disputes.is_outvoted(45.0)
    members(45.0, 45.0, "i2", of=one.island.members, sick="i2")
    assert disputes.is_outvoted(45.0)
    with pytest.raises(IslandFailedError, match=r"island i1, i2 .*takes the shared copies"):
        disputes.settle(45.0)


@pytest.mark.parametrize("sick", ["i0", "i1"])
def test_who_agreed_before_others_differ_has_no_vote(sick: str) -> None:
    """The one with a flipped bit hears of one that differs first, and must not name it."""
    one = Alone(slots=(0, 1, 2))
    disputes = one.island.others.disputes
    members(40.0, 40.0, "i1", "i2", of=one.island.members)
    disputes.note(0, "i2", 5, same=True)
    disputes.note(0, "i1", 6, same=False)
    disputes.note(0, "i1", 7, same=False)
    assert disputes.settle(40.0) == []
    assert disputes.is_undecided(0)
    disputes.note(0, "i2", 6, same=sick == "i1")
    if sick == "i0":
        with pytest.raises(
            IslandFailedError, match="different bits on island i1, i2 than on this one"
        ):
            disputes.settle(40.5)
    else:
        [warning] = disputes.settle(40.5)
        assert "different bits on island i1 than on this one and 1 more" in warning
        assert not disputes.is_undecided(0)


def test_who_is_slow_to_read_ends_no_island_with_the_right_bits() -> None:
    one = Alone(slots=(0, 1, 2))
    disputes = one.island.others.disputes
    disputes.note(0, "i2", 5, same=True)
    disputes.note(0, "i1", 6, same=False)
    told = list[str]()
    for second in range(20):
        members(40.0 + second, 40.0 + second, "i1", "i2", of=one.island.members)
        told += disputes.settle(40.0 + second)
        assert disputes.is_undecided(0) == (second <= EXPIRY)
    assert len(told) == 1
    assert "different bits on island i1 than on this one and 1 more" in told[0]


@pytest.mark.parametrize(
    ("norms", "merged", "alone", "outliers"),
    [
        ([1, 2, 50], [], False, [2]),
        ([1, 50], [], False, []),
        ([50], [], False, []),
        ([1, 50], [1] * 5, False, [1]),
        ([50], [1] * 5, False, [0]),
        ([50], [1] * 5, True, []),
        ([50, 60], [1] * 5, False, []),
        ([0, 0, 1], [], False, []),
        ([1, 50, 60], [1] * 4 + [50], False, [1, 2]),
    ],
)
def test_a_part_is_judged_by_the_others_and_by_those_before(
    norms: list[float], merged: list[float], alone: bool, outliers: list[int]
) -> None:
    """Of two parts without a history, nobody can tell which is right."""
    assert [*find_outliers(dict(enumerate(norms)), merged, 20.0, alone=alone)] == outliers


@pytest.mark.parametrize("silent", [True, False])
def test_an_island_whose_neighbors_died_is_not_left_out_by_itself(silent: bool) -> None:
    """Its learning rate may have changed, and nobody is there to compare with."""
    one = Alone()
    one.island.timing = Timing(Schedule(10, 1, 1), norm_limit=20.0)
    one.state.fragments[0].norms = [1.0] * 5
    members(40.0, 60.0, "i0", *([] if silent else ["i1"]), of=one.island.members)
    one.open(1, now=50.0)
    part = one.part(0, 1, now=50.0)
    close = one.rounds.close({part: Checked(norm=50.0)}, lr=1.0, now=60.0)
    assert close is not None
    assert [refusal.outlier for refusal in close.refused] == ([] if silent else [True])


def test_an_island_leaves_when_its_last_work_is_sent() -> None:
    """It waits for the entry with its last part, but not forever: there may be no quorum, and it
    may be killed soon."""
    one = Alone()
    island, rounds = one.island, one.rounds
    island.finish_step(20, 20, 0.1)
    one.read(rounds.send(10.0))
    island.finish_step(2, 2, 0.1)
    island.leaving = island.stopped = True
    assert island.last_record(10.0) is None
    assert isinstance(island.last_record(10.0 + EXPIRY), Give), "nobody opens a round for it"
    one.open(1, now=10.0, grace=300.0)
    assert island.last_record(10.0) is None
    assert isinstance(island.last_record(10.0 + 2 * EXPIRY), Give)


def test_an_island_that_is_done_closes_the_last_round_of_one_that_is_gone() -> None:
    """No slot is ready then."""
    one = Alone(total_tokens=100, cycle=100)
    one.read(Done(run="r", slot=0, incarnation="i0"))
    who: dict[str, Any] = {"run": "r", "slot": 1, "incarnation": "i1", "fragment": 0}
    one.read(Open(**who, version=1, grace=1.0))
    number = one.part(1, 1)
    members(40.0, 60.0, of=one.island.members)
    assert not one.island.ready_slots(60.0)
    closed = one.rounds.close({number: Checked()}, lr=1.0, now=60.0)
    assert closed is not None
    assert closed.parts == (number,)
