"""Changes that a person makes during a run."""

import copy
import math

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as some

from tests.islands.rules.desk import A, B, Desk, founded, round_of_all
from torchtitan_diloco.diloco.formats import island_formats
from torchtitan_diloco.islands.rules.changes import (
    MOST_DONE,
    SETTLED_SECONDS,
    Admit,
    Change,
    Changes,
    Evict,
    Leave,
    Set,
    changed,
    keep_begun_phases,
    make,
)
from torchtitan_diloco.islands.rules.commit import PAUSES_STILL
from torchtitan_diloco.islands.rules.decision import BARRED
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.history import EventKind
from torchtitan_diloco.islands.rules.settings import MOST_PAUSE
from torchtitan_diloco.islands.waiting import UNDECIDED_SECONDS


class Requests:
    """Changes that are listed until the syncer deletes them."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.listed: dict[str, bytes] = {}

    def ask(self, name: str, change: Change) -> None:
        self.listed[f"change/{name}"] = msgspec.json.encode(change)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            for name in self.desk.syncer.choose_changes(sorted(self.listed)):
                self.desk.syncer.on_change(name, self.listed[name])
            self.desk.pass_time(0.1)
            for name in self.desk.deleted:
                self.listed.pop(name, None)


def test_a_successor_loads_a_run_that_has_ended_once_it_is_longer() -> None:
    """At the end of a run, each standby leads in turn. Copies and outer states are large."""
    before = Desk(founded(total_tokens=40))
    for step in (10, 20):
        round_of_all(before, step)
    before.pass_time(1.0)
    assert before.state.ended
    assert before.loads == [0]
    before.syncer.is_stopping = True
    before.pass_time(2.0)
    assert before.state.stopped
    after = Desk(before.state)
    after.pass_time(10.0)
    assert after.state.ended
    assert after.loads == []
    after.syncer.on_change("change/1", msgspec.json.encode(Set("total_tokens", "60")))
    after.pass_time(1.0)
    assert not after.decisions[-1].ended
    assert after.loads == [0]
    for step in (10, 20):
        round_of_all(after, step)
    assert after.state.fragments[0].clock == 60
    assert after.loads == [0], "once"


def test_a_change_counts_once_wherever_its_name_is_in_the_list() -> None:
    desk = Desk(founded())
    requests = Requests(desk)
    requests.ask("9", Set("sync_every", "20"))
    requests.pass_time(1.0)
    requests.ask("1", Set("sync_every", "30"))
    requests.pass_time(1.0)
    requests.ask("9", Set("sync_every", "20"))  # a list that is late
    requests.pass_time(1.0)
    assert desk.state.settings.sync_every == 30
    requests.ask("2", Set("sync_every", "0"))
    requests.ask("3", Set("start_with", "1"))
    requests.ask("4", Set("slots", "2"))
    requests.pass_time(1.0)
    assert all(desk.state.done[f"change/{number}"] for number in (2, 3, 4))
    assert desk.state.done["change/1"] == ""
    assert not requests.listed
    requests.pass_time(SETTLED_SECONDS + 1)
    assert not desk.state.done
    events = [(event.kind, event.text) for event in desk.state.history.open.events]
    assert (EventKind.CHANGED, "sync_every = 30") in events


def test_a_hundred_changes_are_made_in_order_and_once() -> None:
    desk = Desk(founded())
    requests = Requests(desk)
    for number in range(100):
        requests.ask(f"{number:03}", Set("total_tokens", str(20_000 + number)))
    requests.pass_time(1.0)
    assert len(desk.state.done) == MOST_DONE
    assert desk.state.settings.total_tokens == 20_000 + MOST_DONE - 1
    requests.pass_time(SETTLED_SECONDS + 1)
    assert not requests.listed
    assert desk.state.settings.total_tokens == 20_099
    totals = [decision.settings.total_tokens for decision in desk.decisions[1:]]
    assert totals == sorted(totals)


def test_a_change_is_deleted_once_its_decision_counts() -> None:
    """Otherwise, a syncer that is killed in between would lose it."""
    desk = Desk(founded())
    desk.commits_last = True
    change = msgspec.json.encode(Set("sync_every", "20"))
    for _ in range(5):
        desk.syncer.choose_changes(["change/1"])
        desk.syncer.on_change("change/1", change)
        desk.pass_time(0.5)
    assert desk.deleted == []
    successor = Desk(copy.deepcopy(desk.state))
    requests = Requests(successor)
    requests.ask("1", Set("sync_every", "20"))
    requests.pass_time(1.0)
    assert successor.state.settings.sync_every == 20
    assert successor.deleted.count("change/1") >= 1


def test_a_change_whose_syncer_was_killed_before_its_deletion_is_not_made_again() -> None:
    desk = Desk(founded())
    desk.syncer.on_change("change/1", msgspec.json.encode(Set("sync_every", "20")))
    desk.pass_time(0.5)
    desk.syncer.on_change("change/2", msgspec.json.encode(Set("sync_every", "30")))
    desk.pass_time(0.5)
    successor = Desk(copy.deepcopy(desk.state))
    requests = Requests(successor)
    requests.ask("1", Set("sync_every", "20"))
    requests.pass_time(1.0)
    assert successor.state.settings.sync_every == 30
    assert not requests.listed


def test_an_island_is_asked_to_leave_evicted_and_admitted() -> None:
    desk = Desk(founded())
    requests = Requests(desk)
    requests.ask("5", Leave("a"))
    requests.ask("6", Evict("b"))
    requests.pass_time(1.0)
    assert desk.state.told == {A: "leave", B: BARRED}
    assert desk.state.owners() == [A]
    again = "b/1111"
    other = "b.2/1111"
    for _ in range(3):
        desk.note(again, wish="join")
        desk.note(other, wish="join")
        requests.pass_time(0.5)
    assert desk.state.told[again] == BARRED
    assert desk.state.owners() == [A, other], "another island of this login"
    requests.ask("7", Admit("b"))
    requests.pass_time(1.0)
    desk.note("b/2222", wish="join")
    requests.pass_time(0.5)
    assert "b/2222" in desk.state.owners()


def test_phases_that_have_begun_stay_so_in_a_longer_run() -> None:
    """An island may have entered one that no note of it has said yet."""
    desk = Desk(founded((A,), phases=(0.1, 0.5), total_tokens=100))
    desk.note(A, desk.part(0, samples=20), step=10, entered=[])
    desk.pass_time(1.0)
    assert desk.state.phases == 1
    requests = Requests(desk)
    requests.ask("1", Set("total_tokens", "1000"))
    requests.pass_time(1.0)
    assert desk.state.settings.total_tokens == 1000
    assert desk.state.settings.phases == pytest.approx((0.01, 0.5))
    assert desk.state.phases == 1
    desk.note(A, desk.part(0, samples=5), step=20, position=25, entered=[20])
    desk.pass_time(1.0)
    assert desk.state.slots[0].entered == [20]
    assert desk.ledger(0).taken == 25


@given(
    share=some.floats(0.001, 0.999),
    total=some.integers(10**3, 10**9),
    longer=some.integers(1, 10**9),
)
def test_no_phase_begins_twice(share: float, total: int, longer: int) -> None:
    """Whatever the rounding."""
    state = founded((A,), phases=(share,), total_tokens=total)
    state.fragments[0].clock = math.ceil(share * total)
    assume(state.phases == 1)
    state.settings = keep_begun_phases(
        state, msgspec.structs.replace(state.settings, total_tokens=total + longer)
    )
    assert state.phases == 1


@pytest.mark.parametrize("key", ["commit_seconds", "poll_seconds"])
def test_pauses_are_shorter_than_what_takes_a_syncer_for_dead(key: str) -> None:
    state = founded()
    assert MOST_PAUSE * PAUSES_STILL < UNDECIDED_SECONDS
    changed(state.settings, Set(key, f"{MOST_PAUSE}"))
    with pytest.raises(MalformedError, match=f"{key} = 6"):
        changed(state.settings, Set(key, "6"))


@pytest.mark.parametrize("codec", ["fp5", "topk", "other"])
def test_a_codec_that_no_process_has_is_refused(codec: str) -> None:
    with pytest.raises(MalformedError, match=f"codec = {codec}: give one of fp32, "):
        changed(founded().settings, Set("codec", codec))
    assert all(
        changed(founded().settings, Set("codec", codec)).codec == codec
        for codec in island_formats()
    )


def test_tokens_may_be_written_as_people_do() -> None:
    settings = founded().settings
    assert changed(settings, Set("total_tokens", "1e9")).total_tokens == 10**9
    assert changed(settings, Set("grace", "2")).grace == 2.0
    assert changed(settings, Set("mixing_end", "0.5")).mixing_end == 0.5
    for key, value in (("total_tokens", "1.5"), ("mixing", "nan"), ("fastest", "inf")):
        with pytest.raises(MalformedError):
            changed(settings, Set(key, value))


def test_a_run_is_not_shorter_than_what_is_merged() -> None:
    state = founded()
    state.fragments[0].clock = 500
    with pytest.raises(MalformedError, match="the run has merged 500, give at least that"):
        make(state, msgspec.json.encode(Set("total_tokens", "400")))
    make(state, msgspec.json.encode(Set("total_tokens", "500")))
    state.fragments[0].clock = 530
    make(state, msgspec.json.encode(Set("grace", "2")))
    assert (state.settings.total_tokens, state.settings.grace) == (500, 2.0)


@pytest.mark.parametrize("key", ["streams", "block", "phases", "outer_optimizer", "facts"])
def test_what_decides_the_order_of_samples_never_changes(key: str) -> None:
    with pytest.raises(MalformedError, match="cannot be changed during a run"):
        changed(founded().settings, Set(key, "1"))


def test_done_changes_are_kept_while_they_are_listed() -> None:
    changes = Changes()
    state = founded()
    raw = msgspec.json.encode(Set("sync_every", "20"))
    for second in range(60):
        chosen = changes.choose(state, ["change/1"], float(second))
        assert chosen == (["change/1"] if second == 0 else [])
        made = changes.make(state, "change/1", raw)
        assert (made is None) == (second > 0)
    changes.choose(state, [], 61.0 + SETTLED_SECONDS)
    assert not state.done
