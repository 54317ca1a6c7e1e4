"""How a decision begins to count, call by call, and which objects are garbage."""

from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.islands.rules.desk import founded
from torchtitan_diloco.islands.rules.commit import (
    LIST_SECONDS,
    RETRY,
    STANDSTILL,
    WENT_BACK_SECONDS,
    Call,
    CallFailedError,
    Create,
    Delete,
    Get,
    List,
    Outcome,
    Reader,
    Sleep,
    StandBy,
    commit,
)
from torchtitan_diloco.islands.rules.decision import encode_decision
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.founding import WentBackError
from torchtitan_diloco.islands.rules.names import (
    Object,
    founding_name,
    history_name,
    incarnation_of,
    is_garbage,
    login_of,
    name_of,
    object_of,
    part_name,
    run_name,
    run_number,
)
from torchtitan_diloco.islands.rules.presence import MOST_LISTENED
from torchtitan_diloco.islands.rules.settings import MOST_PAUSE

LATE = CallFailedError("timed out")


def drive(calls: Generator[Call, Any, Any], *answers: tuple[Call, Any]) -> Any:
    """Expect these calls, answer them, and return the result."""
    call = next(calls)
    try:
        for expected, answer in answers:
            assert call == expected
            call = calls.throw(answer) if answer is LATE else calls.send(answer)
    except StopIteration as end:
        return end.value
    return call


MINE = b"mine"
CREATE = Create(run_name(7), MINE)
LOOK = List("run/", run_name(5))
BEFORE = run_name(6)
NOW = run_name(7)
HIGHER = run_name(90)
OF_OTHERS = [f"{HIGHER}.bak", "run/Thumbs.db", "run/desktop.ini", f"run/{HIGHER}"]
"""Names of objects that no syncer has written."""


MISSING: list[tuple[Call, Any]] = [(LOOK, [NOW]), (Sleep(0.6), None)]
COMMITS: list[tuple[list[tuple[Call, Any]], Outcome]] = [
    ([(CREATE, True), (LOOK, [BEFORE, NOW])], Outcome.COMMITTED),
    ([(CREATE, True), (LOOK, [BEFORE, NOW, HIGHER])], Outcome.SUPERSEDED),
    ([(CREATE, True), (LOOK, [NOW, HIGHER])], Outcome.SUPERSEDED),
    ([(CREATE, True), (LOOK, [BEFORE, NOW, *OF_OTHERS])], Outcome.COMMITTED),
    ([(CREATE, False)], Outcome.SUPERSEDED),
    (
        [(CREATE, LATE), (Sleep(RETRY), None), (CREATE, True), (LOOK, [BEFORE, NOW])],
        Outcome.COMMITTED,
    ),
    (
        [
            *((CREATE, True), (LOOK, LATE), (Sleep(RETRY), None)),
            *((CREATE, True), (LOOK, [BEFORE, NOW, HIGHER])),
        ],
        Outcome.SUPERSEDED,
    ),
    (
        [(CREATE, True), (LOOK, [NOW]), (Sleep(0.6), None), (LOOK, [BEFORE, NOW])],
        Outcome.COMMITTED,
    ),
]


@pytest.mark.parametrize(("answers", "outcome"), COMMITS)
def test_a_decision_counts_if_it_is_created_and_the_highest(
    answers: list[tuple[Call, Any]], outcome: Outcome
) -> None:
    assert drive(commit(7, MINE), *answers) is outcome


def test_the_first_decision_has_none_before_it() -> None:
    first = Create(run_name(1), MINE)
    look = List("run/", run_name(0))
    assert drive(commit(1, MINE), (first, True), (look, [run_name(1)])) is Outcome.COMMITTED


def test_a_decision_after_one_that_is_gone_is_withdrawn() -> None:
    """The store was put back: objects that it names may be missing."""
    for remaining, message in (
        ([run_name(4), NOW], "restart the syncer and all islands"),
        (["run/x", NOW], "the store was emptied .* with --islands.found true"),
    ):
        look: tuple[Call, Any] = (List("run/"), remaining)
        withdraw: list[tuple[Call, Any]] = [
            *(look, (Delete(NOW), LATE), (Sleep(RETRY), None)),
            *(look, (Delete(NOW), None)),
        ]
        with pytest.raises(WentBackError, match=message):
            drive(commit(7, MINE), (CREATE, True), *MISSING, *MISSING, *MISSING, *withdraw)


def test_the_highest_decision_is_read_as_a_number() -> None:
    names = [run_name(9), run_name(10), "run/x", "run/.run-tmp"]
    reader = Reader()
    assert drive(reader.read(0.0), (List("run/"), names), (Get(run_name(10)), b"x")) == b"x"
    assert reader.number == 10
    empty = Reader()
    assert drive(empty.read(0.0), (List("run/"), [])) is None
    assert empty.number is None
    late = Reader()
    assert drive(late.read(0.0), (List("run/"), [run_name(3)]), (Get(run_name(3)), None)) is None
    assert drive(late.read(0.1), (List("run/"), [run_name(3)]), (Get(run_name(3)), b"x")) == b"x"


def reader_at(number: int) -> Reader:
    reader = Reader()
    drive(reader.read(0.0), (List("run/"), [run_name(number)]), (Get(run_name(number)), b"x"))
    return reader


def test_a_reader_that_slept_finds_the_highest_decision() -> None:
    """The next one is deleted by then, or was created again by a syncer that slept, too."""
    reader = reader_at(5)
    names = [run_name(6), run_name(80)]
    assert drive(reader.read(1.0), (Get(run_name(6)), None)) is None
    slept = 1.0 + LIST_SECONDS
    assert drive(reader.read(slept), (List("run/"), names), (Get(run_name(80)), b"y")) == b"y"
    zombie: list[tuple[Call, Any]] = [(Get(run_name(6)), b"old"), (List("run/"), names)]
    assert drive(reader_at(5).read(1.0), *zombie, (Get(run_name(80)), b"y")) == b"y"


def test_a_store_that_was_put_back_is_an_error_for_people() -> None:
    reader = reader_at(5)
    older: tuple[Call, Any] = (List("run/"), [run_name(4)])
    assert drive(reader.read(LIST_SECONDS), older) is None, "a list may be late"
    assert reader.is_lower
    with pytest.raises(WentBackError, match="decision 5 was read, and the highest is 4"):
        drive(reader.read(LIST_SECONDS + WENT_BACK_SECONDS), older)


def test_a_store_that_was_emptied_is_said_to_be_empty() -> None:
    reader = reader_at(5)
    nothing: tuple[Call, Any] = (List("run/"), ["run/x"])
    assert drive(reader.read(LIST_SECONDS), nothing) is None, "a list may be late"
    remedy = "there is none now: the store was emptied .* with --islands.found true"
    with pytest.raises(WentBackError, match=remedy):
        drive(reader.read(LIST_SECONDS + WENT_BACK_SECONDS), nothing)


class Watch:
    """A stand-by that looks at a store with one decision."""

    def __init__(self, number: int | None, **fields: Any) -> None:
        self.stand_by = StandBy(**{k: v for k, v in fields.items() if k == "died"})
        self.number = number
        self.others = list[int]()
        """Numbers of other decisions that are listed."""
        self.fields = {k: v for k, v in fields.items() if k != "died"}

    def look(self, now: float, *, fails: bool = False) -> bool:
        calls = self.stand_by.watch(now)
        try:
            call = next(calls)
            while True:
                if fails:
                    calls.throw(LATE)
                elif isinstance(call, List):
                    numbers = [*self.others, *([] if self.number is None else [self.number])]
                    call = calls.send([run_name(number) for number in numbers])
                else:
                    assert isinstance(call, Get)
                    is_there = self.number is not None and call.name == run_name(self.number)
                    call = calls.send(self.content if is_there else None)
        except StopIteration as end:
            return bool(end.value)
        except CallFailedError:
            return False

    @property
    def content(self) -> bytes:
        state = founded()
        for key, value in ({"number": self.number} | self.fields).items():
            setattr(state, key, value)
        return encode_decision(state)


def test_a_stand_by_takes_over_when_the_number_stands_still() -> None:
    watch = Watch(5)
    assert not any(watch.look(float(second)) for second in range(int(STANDSTILL)))
    watch.number = 6
    assert not any(watch.look(10.0 + second) for second in range(int(STANDSTILL)))
    assert watch.look(20.0 + 1.0)
    assert Watch(5, stopped=True).look(0.0), "its syncer has ended in order"
    assert Watch(5, session="dead", died="dead").look(0.0), "it is known to be dead"
    assert Watch(None).look(0.0), "the location is empty"


def test_a_stand_by_waits_for_a_syncer_that_decides_rarely() -> None:
    rare = founded(commit_seconds=MOST_PAUSE, poll_seconds=MOST_PAUSE).settings
    watch = Watch(5, settings=rare)
    pause = 2 * MOST_PAUSE
    looks = [pause * number for number in range(4)]
    assert [watch.look(now) for now in looks] == [False, False, False, True], "three pauses"


def test_a_stand_by_that_looks_rarely_does_not_count_an_outage_either() -> None:
    watch = Watch(5, settings=founded(poll_seconds=MOST_PAUSE).settings)
    assert not watch.look(0.0)
    assert not watch.look(30.0, fails=True)
    assert not watch.look(60.0)
    assert not watch.look(66.0)


def test_two_late_lists_that_are_far_apart_are_no_stray_decision() -> None:
    watch = Watch(5, session="dead", died="dead")
    watch.others = [3]
    assert not watch.look(0.0)
    watch.fields["session"] = "alive"
    watch.number = 6
    watch.others = [5]
    assert not watch.look(5.0)
    watch.fields["session"] = "dead"
    watch.number = 9
    watch.others = [7]
    assert not watch.look(3600.0), "a list may be late again"
    watch.number = 10
    watch.others = [9]
    assert watch.look(3601.0)


def test_a_stand_by_leaves_a_run_alone_that_it_cannot_read() -> None:
    class Unreadable(Watch):
        content = b"of newer code"

    watch = Unreadable(5)
    for now in (0.0, 100.0, 200.0):
        with suppress(MalformedError):
            assert not watch.look(now)


def test_a_stand_by_does_not_count_an_outage_of_the_store() -> None:
    watch = Watch(5)
    assert not watch.look(0.0)
    assert not any(watch.look(float(second), fails=True) for second in range(1, 60))
    assert not watch.look(60.0)
    assert not watch.look(60.0 + STANDSTILL - 2 * MOST_LISTENED), "the leader needs time, too"


def test_a_stand_by_does_not_take_over_from_a_decision_that_is_gone() -> None:
    watch = Watch(5)
    assert not watch.look(0.0)
    watch.number = 4
    lasts = int(LIST_SECONDS + WENT_BACK_SECONDS)
    assert not any(watch.look(float(second)) for second in range(1, lasts))
    with pytest.raises(WentBackError):
        watch.look(lasts + 1.0)


def test_a_decision_that_follows_on_none_is_an_error_for_people() -> None:
    """A store was put back, and its syncer died before it could withdraw what it had created."""
    watch = Watch(57, stopped=True)
    watch.others = [43, 44]
    looks = range(int(WENT_BACK_SECONDS))
    assert not any(watch.look(float(second)) for second in looks), "a list may be late"
    remedy = "delete run/000000000057 from it, and the run goes on from run/000000000044"
    with pytest.raises(WentBackError, match=remedy):
        watch.look(WENT_BACK_SECONDS)
    watch = Watch(57, stopped=True)
    watch.others = [44]
    assert not watch.look(0.0)
    watch.others = [44, 56]
    assert watch.look(LIST_SECONDS)


NUMBERS = st.integers(1, 10**6)


@given(
    st.sampled_from(["version", "copy", "outer"]), NUMBERS, st.integers(0, 4095), NUMBERS, NUMBERS
)
def test_names_are_read_back(kind: str, number: int, fragment: int, version: int, n: int) -> None:
    stored = Object(kind, number, fragment, version)
    assert object_of(stored.name) == stored
    assert run_number(run_name(n)) == n
    island = "a.b-c/0f0f"
    for name in (part_name(island, fragment, n), founding_name(island, fragment)):
        assert incarnation_of(name) == island
    assert incarnation_of(founding_name(island)) == island
    assert (name_of(island), login_of(island)) == ("a.b-c", "a")
    assert is_garbage(stored.name, n, ()) == (number <= n)
    assert not is_garbage(stored.name, n, {stored.name})


def test_only_what_is_old_and_not_named_is_garbage() -> None:
    assert is_garbage("version/7-0-3", 7, {"version/8-0-4"})
    assert not is_garbage("version/7-0-3", 7, {"version/7-0-3"})
    assert not is_garbage("version/8-0-4", 7, ()), "its decision may name it yet"
    assert not is_garbage(history_name(3), 10**9, ())


@pytest.mark.parametrize(
    "name",
    [
        "island/../run/1",
        "island/a/b/0000",
        "island/.a/0000",
        "part/a/0000-1-1/x",
        "island/\n/0000",
    ],
)
def test_a_strange_name_belongs_to_nobody(name: str) -> None:
    assert incarnation_of(name) is None
    assert not is_garbage(name, 10**9, ())
