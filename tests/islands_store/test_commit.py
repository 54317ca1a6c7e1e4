"""How a decision begins to count, call by call, and which objects are garbage."""

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.islands_store.commit import (
    RETRY,
    STANDSTILL,
    Call,
    Create,
    Get,
    List,
    Outcome,
    Sleep,
    StandBy,
    StoreError,
    commit,
    read_newest,
)
from torchtitan_diloco.islands_store.names import (
    Object,
    incarnation_of,
    is_garbage,
    object_of,
    part_names,
    run_name,
    run_number,
)

LATE = StoreError("timed out")


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


MINE, OTHERS = b"mine", b"others"
CREATE, GET = Create(run_name(7), MINE), Get(run_name(7))
LOOK = List("run/", run_name(5))
BEFORE, NOW, HIGHER = run_name(6), run_name(7), run_name(90)


MISSING: list[tuple[Call, Any]] = [(LOOK, [NOW]), (Sleep(0.6), None)]
COMMITS: list[tuple[list[tuple[Call, Any]], Outcome]] = [
    ([(CREATE, True), (LOOK, [BEFORE, NOW])], Outcome.COMMITTED),
    ([(CREATE, True), (LOOK, [BEFORE, NOW, HIGHER])], Outcome.SUPERSEDED),
    ([(CREATE, True), (LOOK, [NOW, HIGHER])], Outcome.SUPERSEDED),
    ([(CREATE, False), (GET, OTHERS)], Outcome.SUPERSEDED),
    ([(CREATE, False), (GET, MINE), (LOOK, [BEFORE, NOW])], Outcome.COMMITTED),
    (
        [(CREATE, LATE), (Sleep(RETRY), None), (CREATE, True), (LOOK, [BEFORE, NOW])],
        Outcome.COMMITTED,
    ),
    (
        [
            *((CREATE, True), (LOOK, LATE), (Sleep(RETRY), None)),
            *((CREATE, False), (GET, MINE), (LOOK, [BEFORE, NOW, HIGHER])),
        ],
        Outcome.SUPERSEDED,
    ),
    (
        [(CREATE, False), (GET, None), (Sleep(RETRY), None), (CREATE, False), (GET, OTHERS)],
        Outcome.SUPERSEDED,
    ),
    ([(CREATE, True), *MISSING, *MISSING, *MISSING], Outcome.RESTORED),
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


def test_the_highest_decision_is_read_as_a_number() -> None:
    names = [run_name(9), run_name(10), "run/x", "run/.run-tmp"]
    assert drive(read_newest(), (List("run/"), names), (Get(run_name(10)), b"x")) == (10, b"x")
    assert drive(read_newest(), (List("run/"), [])) is None
    again: list[tuple[Call, Any]]
    again = [(List("run/"), [run_name(3)]), (Get(run_name(3)), None), (Sleep(RETRY), None)]
    assert drive(read_newest(), *again, (List("run/"), [])) is None


def test_a_stand_by_takes_over_when_the_number_stands_still() -> None:
    stand_by = StandBy()
    assert not stand_by.look(5, False, now=100.0)
    assert not stand_by.look(5, False, now=100.0 + STANDSTILL - 0.1)
    assert not stand_by.look(6, False, now=100.0 + STANDSTILL)
    assert not stand_by.look(6, False, now=99.0 + 2 * STANDSTILL)
    assert stand_by.look(6, False, now=100.0 + 2 * STANDSTILL)
    assert StandBy().look(5, True, now=0.0), "its syncer has ended in order"
    assert StandBy().look(None, False, now=0.0), "the location is empty"


NUMBERS = st.integers(1, 10**6)


@given(
    st.sampled_from(["version", "copy", "outer"]), NUMBERS, st.integers(0, 4095), NUMBERS, NUMBERS
)
def test_names_are_read_back(kind: str, number: int, fragment: int, version: int, n: int) -> None:
    stored = Object(kind, number, fragment, version)
    assert object_of(stored.name) == stored
    assert run_number(run_name(n)) == n
    [name] = part_names("a.b-c/0f0f", fragment, number, 1)
    assert incarnation_of(name) == "a.b-c/0f0f"
    assert is_garbage(stored.name, n, ()) == (number <= n)
    assert not is_garbage(stored.name, n, {stored.name})


def test_only_what_is_old_and_not_named_is_garbage() -> None:
    assert is_garbage("version/7-0-3", 7, {"version/8-0-4"})
    assert not is_garbage("version/7-0-3", 7, {"version/7-0-3"})
    assert not is_garbage("version/8-0-4", 7, ()), "its decision may name it yet"


@pytest.mark.parametrize(
    "name",
    [
        "island/../run/1",
        "island/a/b/0000",
        "island/.a/0000",
        "part/a/0000-1-1-0/x",
        "island/\n/0000",
    ],
)
def test_a_strange_name_belongs_to_nobody(name: str) -> None:
    assert incarnation_of(name) is None
    assert not is_garbage(name, 10**9, ())
