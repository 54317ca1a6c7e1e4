"""Validity of records."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.islands.written import FACTS, Log
from torchtitan_diloco.islands.log import MOST_SAMPLES, VERSIONS_KNOWN, VERSIONS_LATE, State
from torchtitan_diloco.islands.records import (
    LARGEST,
    MOST_GRACE,
    MOST_RANKS,
    Close,
    Done,
    End,
    Give,
    Open,
    Refusal,
    Take,
    decode,
    digest,
    encode,
)

changed = msgspec.structs.replace


# --- closes ---------------------------------------------------------------------------------------


def test_a_close_that_is_wrong_anywhere_is_void_as_a_whole() -> None:
    """Its parts determine everything but the learning rate, which is bounded, and the norms."""
    log = Log()
    log.open()
    log.part(0, 10)
    log.part(1, 20)
    right = log.build(5, 6)
    wrong: dict[str, Any] = {"run": "other", "slot": 7, "incarnation": "c", "fragment": 7}
    wrong |= {"version": 2, "after": 5, "previous": "0", "checksum": "v9", "weights": (10, 21)}
    wrong |= {"parts": (6, 5), "clock": 31, "refused": (Refusal(5, "also named"),)}
    wrong |= {"norms": (1.0,), "lr": 0.6}
    assert {*wrong} == set(Close.__struct_fields__)
    for name, value in wrong.items():
        assert log.write(changed(right, **{name: value})).void, name
    assert log.write(log.build()).void == "takes nothing"
    for parts in ((5, 5), (5, 9)):
        size = len(parts)
        assert log.write(changed(right, parts=parts, weights=(10,) * size, norms=(1,) * size)).void
    assert log.write(changed(right, clock=31)).void == "clock is 31, not 30"
    assert log.state.fragments[0].version == 0
    assert not log.write(right).void, "a void record does not get in the way of a valid one"
    assert log.write(right).void == "no round is open"


def test_a_refused_part_is_given_up_also_alone() -> None:
    log = Log()
    log.open()
    log.part(0, 10)
    outcome = log.write(log.build(refused=(Refusal(5, "not finite"),)))
    assert outcome.entry is not None
    assert outcome.entry.parts == ()
    assert log.waiting == {}
    assert not log.part(0, 15, start=0).void, "the next part carries its range"


def test_a_part_with_a_norm_beyond_the_usual_is_lost() -> None:
    """Its island takes the shared copy, so its next part begins after it."""
    log = Log()
    log.round(10, 10)
    log.open()
    log.part(0, 20)
    log.part(1, 20)
    _, sick = log.waiting
    close = log.build(sick - 1, refused=(Refusal(sick, "its norm", outlier=True),))
    outcome = log.write(close)
    assert outcome.entry is not None
    lost = outcome.entry.part_of("b")
    assert lost is not None
    assert outcome.entry.is_lost(lost)
    ledger = log.state.slots[1].ledgers[0]
    assert (ledger.merged, ledger.lost, ledger.entries) == (10, 10, 2)
    assert "relative to version 1, older than 2" in log.part(1, 30, base=1, checksum="v1").void
    assert not log.part(1, 30).void
    assert log.state.fragments[0].norms == [1.0] * 3


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"start": 9}, "starts at 9, not at 10"),
        ({"end": 10}, "has no data"),
        ({"number": 1}, "already known"),
        ({"base": 0, "checksum": "v0"}, "older than 1"),
        ({"base": 2}, "no version 2"),
        ({"checksum": "v9"}, "checksum of version 1 is v9"),
        ({"finite": False}, "is not finite"),
        ({"incarnation": "old"}, "slot 0 belongs to a"),
    ],
)
def test_a_wrong_part_is_void(wrong: dict[str, Any], reason: str) -> None:
    """`base` is the copy before its last part was merged, so the delta contains that part again."""
    log = Log()
    log.round(10)
    assert reason in log.part(0, **{"end": 30, **wrong}).void
    assert not log.part(0, 30).void
    assert "already known" in log.part(0, 30, number=2).void
    assert "another part" in log.part(0, 40).void


def test_a_late_part_waits_for_four_versions_and_is_then_given_up() -> None:
    log = Log()
    late = len(log.raw) + 1
    log.part(1, 5)
    for version in range(1, VERSIONS_LATE + 2):
        assert late in log.waiting
        log.open()
        log.part(0, 10 * version)
        assert not log.write(log.build(len(log.raw))).void
    assert log.waiting == {}
    assert not log.part(1, 8, start=0).void


# --- bounds ---------------------------------------------------------------------------------------


BOUNDED = changed(FACTS, total_tokens=1000, cycle=10)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"weight": 81}, "has a weight above"),
        ({"weight": LARGEST}, "has a weight above"),
        ({"end": MOST_SAMPLES + 1}, "more samples than any island reads"),
        ({"end": LARGEST}, "more samples than any island reads"),
        ({"ranks": MOST_RANKS + 1}, "not a record"),
        ({"number": LARGEST}, "leaves none after it"),
    ],
)
def test_no_record_can_end_a_run_or_cost_much(wrong: dict[str, Any], reason: str) -> None:
    """Its weight counts towards the end of the run, and its range moves the data of its slot."""
    log = Log(BOUNDED)
    long = Open(**log.owner(0), fragment=0, version=1, grace=2 * MOST_GRACE)
    assert "not a record" in log.write(long).void
    assert reason in log.part(0, **{"end": 80, **wrong}).void
    assert not log.part(0, 80).void


@pytest.mark.parametrize(
    "wrong", [{"slots": 2**40}, {"total_tokens": LARGEST}, {"cycle": LARGEST}, {"outer_lr": 1e300}]
)
def test_facts_with_numbers_beyond_any_run_are_void(wrong: dict[str, Any]) -> None:
    """A clock may reach the total and a part of each slot, and must still have an encoding."""
    state = State()
    assert state.read(1, encode(changed(FACTS, **wrong))).void
    assert not state.read(2, encode(FACTS)).void


def test_rounds_open_until_a_fragment_has_its_tokens_and_the_run_ends_then() -> None:
    """Fragments may lack the work since their last rounds, a cycle at most."""
    log = Log(changed(FACTS, total_tokens=100, cycle=10))
    done = [Done(run="r", slot=slot, incarnation=name) for slot, name in enumerate("ab")]
    end = End(run="r", slot=0, incarnation="a", absent=("a", "b"), heads=log.state.heads)
    for record in (*done, end):
        assert log.write(record).void == "the run has not merged its tokens"
    for fragment in log.state.fragments:
        fragment.clock = 90
    for record in (*done, changed(end, absent=())):
        assert not log.write(record).void
    log = Log(changed(FACTS, total_tokens=100, cycle=10))
    log.state.fragments[0].clock = 99
    assert not log.open().void
    log = Log(changed(FACTS, total_tokens=100, cycle=10))
    log.state.fragments[0].clock = 100
    assert log.open().void == "the fragment has merged all tokens of the run"


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("close_first", [True, False])
def test_a_take_races_with_a_close_of_the_old_owners_part(close_first: bool) -> None:
    log = Log()
    log.open()
    log.part(0, 10)
    close = log.build(5, slot=1)
    if close_first:
        assert not log.write(close).void
    assert not log.take(0, "c", replaces="a").void
    if not close_first:
        assert "not a waiting part" in log.write(close).void
    assert log.state.slots[0].start == (10 if close_first else 0)
    assert "slot 0 belongs to c" in log.part(0, 20, incarnation="a").void
    fates = [(ledger.merged, ledger.lost) for ledger in log.state.slots[0].ledgers]
    assert fates == ([(10, 0), (0, 10)] if close_first else [(0, 0)] * 2)
    assert log.state.slots[0].read_twice == (0 if close_first else 10)


def test_of_two_takes_one_wins_and_an_island_takes_one_slot_only() -> None:
    log = Log(changed(FACTS, slots=3))
    assert log.take(2, "a/2").void == "its island has slot 0"
    assert not log.take(0, "a/2", replaces="a").void
    assert "belongs to a/2" in log.take(0, "d", replaces="a").void
    assert "only once" in log.take(0, "a", replaces="a/2").void
    assert not log.write(Give(run="r", slot=0, incarnation="a/2")).void
    assert "only once" in log.take(0, "a/2").void
    assert "belongs to nobody" in log.part(0, 10, incarnation="a/2").void


def test_the_end_waits_for_all_owners_and_fixes_the_copy() -> None:
    log, other = Log(), Log()
    log.round(10)
    done = [Done(run="r", slot=slot, incarnation=name) for slot, name in enumerate("ab")]
    end = End(run="r", slot=0, incarnation="a", absent=(), heads=log.state.heads)
    log.write(done[0])
    assert log.part(0, 20).void == "its writer is done"
    assert log.write(end).void == "b is not done"
    log.open(slot=1)
    log.part(1, 5)
    assert not log.write(log.build(len(log.raw), slot=1)).void
    log.write(done[1])
    assert log.write(end).void == "an entry was made since"
    assert not log.write(changed(end, heads=log.state.heads)).void
    assert log.write(end).void == "the run has ended"
    other.write(done[0])
    assert not other.write(changed(end, absent=("b",), heads=other.state.heads)).void


# --- the log as a whole ---------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"{}", b'{"kind":"take"}', b"[1]"])))
def test_garbage_changes_nothing(garbage: list[bytes]) -> None:
    log, clean = Log(), Log()
    for raw in garbage:
        assert log.state.read(log.state.sequence + 1, raw).void
    log.raw = [b""] * log.state.sequence
    assert not log.part(0, 10).void
    assert not clean.part(0, 10).void
    assert log.state.slots == clean.state.slots


@given(st.data())
def test_altered_records_are_never_an_error(data: st.DataObject) -> None:
    source = Log()
    source.round(10, 20)
    raw = source.raw[data.draw(st.integers(0, len(source.raw) - 1))]
    position = data.draw(st.integers(0, len(raw) - 1))
    altered = raw[:position] + data.draw(st.binary(max_size=3)) + raw[position + 1 :]
    for state in (source.state, State()):
        state.read(state.sequence + 1, altered)


@pytest.mark.parametrize("record", [b'"\\ud800"', b" ", b"[" * 5000])
def test_odd_encodings_are_void(record: bytes) -> None:
    log = Log()
    assert "not a record" in log.state.read(4, record).void
    taken = encode(Take(run="r", slot=0, incarnation="c", replaces="a"))
    assert "canonical" in log.state.read(5, taken.replace(b":", b": ", 1)).void
    assert log.state.owners() == {0: "a", 1: "b"}


def test_a_log_with_a_gap_is_refused() -> None:
    log = Log()
    with pytest.raises(ValueError, match="record 5 of the log follows record 3"):
        log.state.read(5, log.raw[-1])


def test_who_has_a_wrong_copy_sees_disputes_and_replays_to_the_same_state() -> None:
    healthy, faulty = Log(), Log(checksum="x")
    for log, wrong in ((healthy, "x1"), (faulty, "v1")):  # each disagrees with the other
        assert log.round(10, 20).entry is not None
        assert log.part(0, 20, checksum=wrong).disputed
    repaired, reader, judge = Log(), Log(), Log(checksum="y")
    repaired.state, reader.state, judge.state = State(), State(verifies=False), State()
    for raw in faulty.raw:
        repaired.read(raw)
    assert repaired.waiting != faulty.waiting, "its own bits made another part valid"
    for raw in healthy.raw:
        reader.read(raw)
    assert reader.waiting, "who has no parameters checks no checksums"
    healthy.open()
    healthy.part(0, 20)
    assert not healthy.write(healthy.build(*healthy.waiting)).void
    for raw in healthy.raw:
        judge.read(raw)
    assert judge.state.fragments[0].version == 1


def test_a_newcomer_begins_with_a_state_and_snapshots() -> None:
    """The chain of hashes gives it the checksums between them."""
    log = Log(changed(FACTS, total_tokens=1000))
    log.round(10, 20)
    begun = log.state.encode()
    for number in range(2, 14):
        log.round(10 * number, 20 * number)
    head, other = log.state.heads
    log.write(changed(decode(log.raw[-1]), checksum="forged", version=1, previous="0" * 64))
    state, records = State.decode(begun), [decode(raw) for raw in log.raw]
    assert state.encode() == begun
    assert state.adopt(1, (0, other, "v0"), records)
    assert not state.adopt(0, (13, head, "v13"), records[-10:]), "some are missing"
    assert not state.adopt(0, (13, digest(b""), "v13"), records)
    assert state.adopt(0, (13, head, "v13"), records)
    assert state.fragments[0].checksums == {n: f"v{n}" for n in range(14)}
    for sequence, raw in enumerate(log.raw[state.sequence :], start=state.sequence + 1):
        state.read(sequence, raw)
    assert state == log.state
    assert len(state.fragments[0].checksums) == VERSIONS_KNOWN


@given(st.integers(1, 40))
def test_a_state_does_not_grow_with_the_log(rounds: int) -> None:
    log = Log(changed(FACTS, total_tokens=10**6))
    for number in range(1, 60 + rounds):
        assert not log.round(10 * number, 10 * number).void
    assert len(log.state.encode()) < 6000


def test_a_log_that_continues_another_one_goes_on_with_its_clock_and_data() -> None:
    old = Log()
    old.round(10, 20)
    places = {"clocks": old.state.clocks, "positions": old.state.positions}
    log = Log(changed(FACTS, run="r", slots=3, **places))
    assert (log.state.clocks, log.state.positions) == ((30, 0), (10, 20, 0))
    assert "starts at 0, not at 10" in log.part(0, 15, start=0).void
    assert not log.part(0, 15).void
    for wrong in ({"clocks": (1,)}, {"clocks": (101, 0)}, {"positions": (LARGEST,)}):
        assert State().read(1, encode(changed(FACTS, **wrong))).void
