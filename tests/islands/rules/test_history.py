"""What is kept of the past: nothing is lost, and nothing is counted twice."""

import copy

import msgspec
import pytest

from tests.islands.rules.desk import A, B, Desk, founded
from torchtitan_diloco.islands.rules import history
from torchtitan_diloco.islands.rules.decision import LEAVE
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.history import (
    BIN_SECONDS,
    MOST_BIN,
    MOST_EVENTS,
    MOST_VALIDATED,
    Bin,
    Event,
    EventKind,
    History,
    Sums,
    decode_bin,
    encode_bin,
)
from torchtitan_diloco.islands.rules.note import Note, NotedGauges

SOON = 20.0


@pytest.fixture
def _short_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BIN_SECONDS", SOON)


@pytest.mark.usefixtures("_short_bins")
def test_bins_have_the_sums_of_each_island() -> None:
    desk = Desk(founded(total_tokens=10**6))
    gauges = msgspec.Raw(msgspec.json.encode(NotedGauges(loss=2.5, validated=(10, 3.0))))
    for number in range(1, 5):
        for slot, incarnation in enumerate((A, B)):
            desk.note(incarnation, desk.part(slot), step=10 * number, gauges=gauges)
        desk.pass_time(1.0)
    sums = desk.state.history.open.islands
    assert set(sums) == {"a", "b"}
    assert (sums["a"].tokens, sums["a"].parts, sums["a"].loss / sums["a"].with_loss) == (40, 4, 2.5)
    assert sums["a"].step_seconds / sums["a"].parts == pytest.approx(0.1)
    assert desk.state.history.open.validated == [(10, 3.0)]
    desk.pass_time(SOON)
    assert [bin_.islands["a"].tokens for bin_ in desk.history] == [40]
    known = desk.state.history
    assert (known.number, known.closed, known.open.islands) == (1, None, {})


@pytest.mark.usefixtures("_short_bins")
def test_a_bin_is_stored_after_its_decision_counts() -> None:
    """Otherwise, a syncer that is superseded could store what never counted."""
    desk = Desk(founded(total_tokens=10**6))
    desk.note(A, desk.part(0), step=10)
    desk.pass_time(2.0)
    desk.commits_last = True
    desk.pass_time(2 * SOON)
    assert not desk.history


def test_a_successor_stores_the_same_bin() -> None:
    """Its predecessor was killed after the bin was closed, before or after it was stored."""
    known = History()
    known.note(1.0, EventKind.JOINED, "a")
    known.add_merged(A, 40, Note(counter=1), late=True)
    known.close_if_due(BIN_SECONDS)
    assert known.closed is not None
    state = founded()
    state.history = copy.deepcopy(known)
    state.history.add_merged(A, 2, None, late=False)
    desk = Desk(state)
    desk.pass_time(1.0)
    assert [encode_bin(bin_) for bin_ in desk.history] == [encode_bin(known.closed)]
    assert desk.state.history.number == 1
    assert desk.state.history.open.islands["a"] == Sums(tokens=2, parts=1)


def test_what_becomes_of_islands_is_an_event() -> None:
    desk = Desk(founded((), slots=1))
    for _ in range(3):
        desk.note(A, wish="join")
        desk.pass_time(0.3)
    for _ in range(20):
        desk.note("a/1111", wish="join")
        desk.pass_time(0.5)
    desk.note("a/1111", wish="give")
    desk.pass_time(1.0)
    desk.note(B, wish="join")
    desk.pass_time(0.5)
    events = desk.state.history.open.events
    assert [(event.kind, event.who) for event in events if event.kind is not EventKind.LED] == [
        (EventKind.JOINED, "a"),
        (EventKind.BEGUN, ""),
        (EventKind.RETURNED, "a"),
        (EventKind.LEFT, "a"),
        (EventKind.JOINED, "b"),
    ]


def test_an_island_that_is_silent_for_some_time_is_away() -> None:
    desk = Desk(founded())
    for step in range(40):
        desk.note(A, step=step)
        if not 5 <= step < 30:
            desk.note(B, step=step)
        desk.pass_time(0.5)
    events = desk.state.history.open.events
    assert [event.kind for event in events if event.who == "b"] == [EventKind.AWAY, EventKind.BACK]


def test_a_bin_is_bounded() -> None:
    known = History()
    for number in range(10 * MOST_EVENTS):
        known.note(1.0, EventKind.CHANGED, "x" * 1000, "y" * 1000)
        note = Note(counter=1, gauges=msgspec.Raw(f"[[],null,[{number},1.5]]".encode()))
        known.add_merged(f"island-{number}/0000", 10**11, note, late=False)
    assert len(known.open.events) == MOST_EVENTS
    assert known.open.left_out == 9 * MOST_EVENTS
    assert len(known.open.validated) <= MOST_VALIDATED
    for number in range(3000):
        known.add_left_out(f"other-{number}-{'z' * 50}/0000", is_lost=number % 2 == 0)
    raw = encode_bin(known.open)
    assert len(raw) <= MOST_BIN
    assert decode_bin(raw) == known.open


def test_a_bin_that_is_full_of_events_is_closed_early() -> None:
    known = History()
    for _ in range(MOST_EVENTS):
        known.note(1.0, EventKind.AWAY, "a")
    known.close_if_due(2.0)
    assert len(known.open.events) == MOST_EVENTS, "not at once"
    known.close_if_due(61.0)
    assert known.open.events == []
    for _ in range(MOST_EVENTS):
        known.note(62.0, EventKind.BACK, "a")
    known.close_if_due(1000.0)
    assert known.closed is not None
    assert known.closed.events[0].kind is EventKind.AWAY, "one bin after the other"


def test_an_altered_bin_is_not_read() -> None:
    raw = encode_bin(Bin(events=[Event(1, EventKind.LED)]))
    for altered in (raw[:-1], raw + b"x" * MOST_BIN, b"", b"junk"):
        with pytest.raises(MalformedError):
            decode_bin(altered)


def test_islands_that_leave_on_request_are_no_loss() -> None:
    desk = Desk(founded())
    desk.state.told[A] = LEAVE
    desk.note(A, wish="give")
    desk.pass_time(1.0)
    events = desk.state.history.open.events
    assert [(event.kind, event.who) for event in events][-1] == (EventKind.LEFT, "a")
