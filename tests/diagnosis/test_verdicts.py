"""Verdicts about recorded and injected histories."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.base.hardware import SHORT_OF_CORES
from torchtitan_diloco.diagnosis.kinds import WORDS, Cause, Verdict
from torchtitan_diloco.diagnosis.verdicts import (
    IN_A_ROW,
    LASTING,
    MEASURED,
    Judge,
    Observation,
)
from torchtitan_diloco.diloco.flags import NOT_FINITE
from torchtitan_diloco.diloco.vitals import ALL_WORKERS, Report, VerdictKind, Vitals

CYCLE = 5.0
ROUND = 6.0
OTHER_WAY = {"upload": "download", "download": "upload"}
SEEDED = st.integers(0, 2**32).map(random.Random)


def clean(workers: int, rng: random.Random, noise: float = 0.04) -> list[Vitals]:
    def around(value: float) -> float:
        return value * rng.uniform(1 - noise, 1 + noise)

    return [Vitals(around(0.5), around(0.01), around(0.002)) for _ in range(workers)]


def with_links(said: list[Vitals], links: dict[tuple[int, int], float]) -> list[Vitals]:
    """Set the transfers from the seconds of each link (sender, receiver)."""
    workers = range(len(said))
    return [
        vitals._replace(transfers=tuple(links.get((other, me), 0.0) for other in workers))
        for me, vitals in enumerate(said)
    ]


def links_of(
    workers: int, rng: random.Random, slow: Callable[[int, int], float]
) -> dict[tuple[int, int], float]:
    pairs = [(a, b) for a in range(workers) for b in range(workers) if a != b]
    return {pair: 0.8 * rng.uniform(0.95, 1.05) * slow(*pair) for pair in pairs}


def judged(
    judge: Judge, histories: Sequence[list[Vitals]], flags: int = 0, first: int = 0
) -> list[Verdict]:
    found = list[Verdict]()
    for step, said in enumerate(histories, first):
        seen = {f"worker {one}": Report(vitals) for one, vitals in enumerate(said)}
        if flags:
            seen["worker 0"] = seen["worker 0"]._replace(flags=flags)
        found += judge.hear(Observation(seen, step, step * ROUND, CYCLE))
    return found


@given(st.integers(2, 6), SEEDED, st.floats(0.0, 0.04))
def test_a_clean_run_has_no_verdict(workers: int, rng: random.Random, noise: float) -> None:
    histories = [
        with_links(clean(workers, rng, noise), links_of(workers, rng, lambda *_: 1.0))
        for _ in range(60)
    ]
    assert judged(Judge(), histories) == []


@given(
    st.integers(2, 6),
    SEEDED,
    st.sampled_from(
        [
            ("compute", 0.15, VerdictKind.COMPUTE),
            ("data", 0.2, VerdictKind.DATA),
            ("save", 0.2, VerdictKind.SAVE),
        ]
    ),
    st.floats(1.0, 6.0),
)
def test_a_slow_worker_is_named_after_two_rounds_until_it_is_well(
    workers: int, rng: random.Random, fault: tuple[str, float, VerdictKind], factor: float
) -> None:
    """At least 1.3 times as slow, which is 0.15 s of 0.5."""
    field, extra, kind = fault
    victim = rng.randrange(workers)
    judge = Judge()
    assert judged(judge, [clean(workers, rng) for _ in range(20)]) == []
    sick = [clean(workers, rng) for _ in range(10)]
    for said in sick:
        slow = getattr(said[victim], field) + extra * factor
        said[victim] = said[victim]._replace(**{field: slow})
    found = judged(judge, sick, first=20)
    cause = Cause(kind, f"worker {victim}")
    assert [one.cause for one in found] == [cause]
    assert found[0].since == 20
    assert list(judge.verdicts) == [cause]
    healed = judged(judge, [clean(workers, rng) for _ in range(IN_A_ROW)], first=30)
    assert [(one.cause, one.over) for one in healed] == [(cause, True)]
    assert judge.verdicts == {}


def test_who_says_nothing_is_not_judged_by_what_it_said() -> None:
    said = Vitals(0.5, upload=0.5)
    slow = Vitals(0.5, upload=5.0)
    assert judged(Judge(), [[said, said, slow], *[[said, said, Vitals()]] * 9]) == []
    assert judged(Judge(), [[said, said, slow], *[[said, said, slow]] * 9]) != []
    waits = [[said, said, Vitals(download=5.0 + 0.1 * one)] for one in range(9)]
    said = said._replace(download=0.5)
    waits = [[said, said, slow], *([said, said, one] for _, _, one in waits)]
    found = [one.cause for one in judged(Judge(), waits)]
    assert found == [Cause(VerdictKind.RECEIVING, "worker 2")], "it waits for its downloads"


def test_slowness_within_the_noise_is_named_once_it_lasts() -> None:
    def rounds(extra: float) -> list[list[Vitals]]:
        noisy = [0.46 + extra, 0.54 + extra] * LASTING
        return [[Vitals(0.5), Vitals(0.5), Vitals(one)] for one in noisy]

    judge = Judge()
    cause = Cause(VerdictKind.COMPUTE, "worker 2")
    assert judged(judge, rounds(0.0)) == []
    (verdict,) = judged(judge, rounds(0.1), first=2 * LASTING)
    assert verdict.cause == cause
    assert 0 < verdict.since - 2 * LASTING < LASTING
    healed = judged(judge, rounds(0.0)[:IN_A_ROW], first=4 * LASTING)
    assert [(one.cause, one.over) for one in healed] == [(cause, True)]


@given(st.integers(3, 6), SEEDED, st.floats(2.5, 10.0))
def test_a_slow_link_is_told_from_a_slow_side(
    workers: int, rng: random.Random, factor: float
) -> None:
    victim = rng.randrange(workers)
    other = (victim + 1) % workers
    faults: dict[Cause, Callable[[int, int], float]] = {
        Cause(VerdictKind.LINK, f"worker {victim} -> worker {other}"): lambda a, b: (
            # Acknowledgements of the other direction wait, too.
            {(victim, other): factor, (other, victim): factor / 2}.get((a, b), 1.0)
        ),
        Cause(VerdictKind.SENDING, f"worker {victim}"): lambda a, _: factor if a == victim else 1.0,
        Cause(VerdictKind.RECEIVING, f"worker {victim}"): lambda a, b: (
            factor * (1.5 if a == other else 1.0) if b == victim else 1.0  # not shared evenly
        ),
    }
    for cause, slow in faults.items():
        histories = [
            with_links(clean(workers, rng), links_of(workers, rng, slow)) for _ in range(4)
        ]
        assert [one.cause for one in judged(Judge(), histories)] == [cause]


@given(st.integers(3, 6), SEEDED, st.floats(2.5, 10.0), st.booleans())
def test_a_worker_that_is_slow_in_both_directions_is_the_only_one_named(
    workers: int, rng: random.Random, factor: float, is_even: bool
) -> None:
    """In its slower direction, or in both if they are alike, and also if it was well before."""
    victim = rng.randrange(workers)
    judge = Judge()

    def history(slow: Callable[[int, int], float], steps: int) -> list[list[Vitals]]:
        links = [links_of(workers, rng, slow) for _ in range(steps)]
        return [with_links(clean(workers, rng), one) for one in links]

    def slow(sender: int, receiver: int) -> float:
        if sender == victim:
            return factor
        return (factor if is_even else factor / 2) if receiver == victim else 1.0

    assert judged(judge, history(lambda *_: 1.0, rng.choice([0, 10]))) == []
    found = {one.cause for one in judged(judge, history(slow, 8), first=10)}
    named = {
        Cause(VerdictKind.SENDING, f"worker {victim}"),
        Cause(VerdictKind.RECEIVING, f"worker {victim}"),
    }
    assert found == named if is_even else found == {Cause(VerdictKind.SENDING, f"worker {victim}")}


@given(st.integers(3, 6), SEEDED, st.floats(2.5, 10.0), st.floats(2.0, 3.0), st.booleans())
def test_no_path_is_named_if_two_share_a_slow_link_unevenly(
    workers: int, rng: random.Random, factor: float, uneven: float, first: bool
) -> None:
    """The link of one worker, slow in both directions."""
    victim = rng.randrange(workers)
    judge = Judge()
    path = (victim, (victim + 1) % workers)
    path = path if first else path[::-1]
    links = [
        links_of(
            workers,
            rng,
            lambda *ends: (factor if victim in ends else 1.0) * (uneven if ends == path else 1.0),
        )
        for _ in range(8)
    ]
    found = {
        one.cause for one in judged(judge, [with_links(clean(workers, rng), one) for one in links])
    }
    assert found
    assert found <= {
        Cause(kind, f"worker {victim}") for kind in (VerdictKind.SENDING, VerdictKind.RECEIVING)
    }


@given(st.integers(4, 6), SEEDED, st.floats(2.5, 10.0), st.integers(0, 1))
def test_two_slow_workers_of_four_are_named_and_no_other(
    workers: int, rng: random.Random, factor: float, end: int
) -> None:
    victims = rng.sample(range(workers), 2)
    links = [
        links_of(workers, rng, lambda *path: factor if path[end] in victims else 1.0)
        for _ in range(8)
    ]
    found = judged(Judge(), [with_links(clean(workers, rng), one) for one in links])
    kind = (VerdictKind.SENDING, VerdictKind.RECEIVING)[end]
    assert {one.cause for one in found} == {Cause(kind, f"worker {one}") for one in victims}


def test_what_is_not_known_of_a_transfer_is_no_short_time() -> None:
    """A fragment is at times too small to measure; and a worker may be absent."""
    judge = Judge()
    rng = random.Random(0)
    for step in range(12):
        links = links_of(4, rng, lambda a, _: 4.0 if a == 1 else 1.0)
        if step % 2:
            links[1, 2] = 0.0
            links[1, 3] = 0.0
        said = with_links(clean(4, rng), links)
        seen = {f"worker {one}": Report(vitals) for one, vitals in enumerate(said)}
        seen["worker 0"] = Report(absent="stopped")
        judge.hear(Observation(seen, step, step * ROUND, CYCLE))
    causes = {Cause(VerdictKind.STOPPED, "worker 0"), Cause(VerdictKind.SENDING, "worker 1")}
    assert judge.verdicts.keys() == causes


@given(
    st.integers(2, 6),
    SEEDED,
    st.sampled_from([("upload", VerdictKind.SENDING), ("download", VerdictKind.RECEIVING)]),
    st.floats(2.0, 10.0),
)
def test_a_slow_link_to_the_store_is_named_by_its_direction(
    workers: int, rng: random.Random, fault: tuple[str, VerdictKind], factor: float
) -> None:
    """Transfers that share the link of the store at times take twice as long, and are no fault."""
    field, kind = fault
    victim = rng.randrange(workers)
    histories = list[list[Vitals]]()
    for number in range(12):
        said = list[Vitals]()
        for one in range(workers):
            shared = 1.0 if (number + one) % MEASURED else 2.0
            seconds = 0.8 * rng.uniform(0.95, 1.05) * shared
            sick = one == victim and number >= 6
            named: dict[str, Any] = {field: seconds * factor if sick else seconds}
            # Answers of an upload wait behind all downloads, requests at times behind an upload.
            waits = 2 * factor if field == "download" else factor if shared > 1 else 1
            named[OTHER_WAY[field]] = 0.8 * rng.uniform(0.95, 1.05) * (waits if sick else 1)
            said.append(Vitals(compute=0.5)._replace(**named))
        histories.append(said)
    judge = Judge()
    sick_from = 6
    assert judged(judge, histories[:sick_from]) == []
    found = [one.cause for one in judged(judge, histories[sick_from:], first=sick_from)]
    assert found == [Cause(kind, f"worker {victim}")]


def test_rounds_that_follow_each_other_fast_are_not_enough() -> None:
    """A burst of some seconds on a busy machine is no fault."""
    judge = Judge()
    slow = {"a": Report(Vitals(0.5)), "b": Report(Vitals(0.9))}
    times = [0.1 * number for number in range(49)]
    assert not any(judge.hear(Observation(slow, 1, now, CYCLE)) for now in times)
    [found] = judge.hear(Observation(slow, 1, 5.0, CYCLE))
    assert found.cause == Cause(VerdictKind.COMPUTE, "b")
    well = {"a": Report(Vitals(0.5)), "b": Report(Vitals(0.5))}
    assert not any(judge.hear(Observation(well, 2, 5.1 + now, CYCLE)) for now in times[:-1])
    [found] = judge.hear(Observation(well, 2, 10.1, CYCLE))
    assert found.over
    again = [now for now in range(11, 40) if judge.hear(Observation(slow, 3, now, CYCLE))]
    assert again == [21], "what comes back has to last twice as long"


def test_who_is_late_is_not_blamed_for_its_links() -> None:
    rng = random.Random(0)
    history = list[list[Vitals]]()
    for _ in range(4):
        slow = links_of(3, rng, lambda a, b: 3.0 if 1 in (a, b) else 1.0)
        said = with_links(clean(3, rng), slow)
        said[1] = said[1]._replace(compute=1.0)
        history.append(said)
    assert [one.cause for one in judged(Judge(), history)] == [
        Cause(VerdictKind.COMPUTE, "worker 1")
    ]


def test_of_two_workers_the_slow_direction_is_named() -> None:
    rng = random.Random(0)
    judge = Judge()
    slow = [
        with_links(clean(2, rng), links_of(2, rng, lambda a, _: 4.0 if a else 1.0))
        for _ in range(3)
    ]
    [found] = judged(judge, slow)
    assert found.cause == Cause(VerdictKind.LINK, "worker 1 -> worker 0")
    assert "cannot be told which side" in str(found)
    usual = [with_links(clean(2, rng), links_of(2, rng, lambda *_: 1.0)) for _ in range(10)]
    judge = Judge()
    judged(judge, usual)
    both = [with_links(clean(2, rng), links_of(2, rng, lambda *_: 4.0)) for _ in range(3)]
    [found] = judged(judge, both)
    assert found.cause == Cause(VerdictKind.LINK, "worker 0 - worker 1")


@given(st.integers(2, 5), st.floats(1.6, 5.0), SEEDED)
def test_if_everybody_is_slow_nobody_is_named(
    workers: int, factor: float, rng: random.Random
) -> None:
    judge = Judge()
    judged(judge, [clean(workers, rng) for _ in range(10)])
    slow = [
        [one._replace(compute=one.compute * factor) for one in clean(workers, rng)]
        for _ in range(5)
    ]
    assert [one.cause for one in judged(judge, slow, first=10)] == [
        Cause(VerdictKind.EVERYBODY, "all")
    ]


@given(st.integers(2, 4), st.lists(st.lists(st.booleans(), min_size=4, max_size=4), max_size=40))
def test_verdicts_begin_and_end_in_turns_and_never_flap(
    workers: int, history: list[list[bool]]
) -> None:
    """Whatever happens, a cause that comes and goes every other round makes one verdict at most
    every two rounds, and each one ends before it begins again."""
    judge = Judge()
    state = dict[Cause, tuple[bool, int]]()
    for step, sick in enumerate(history):
        said = [Vitals(compute=0.5 + one) for one in sick[:workers]]
        for verdict in judged(judge, [said], first=step):
            is_over, at = state.get(verdict.cause, (True, -IN_A_ROW))
            assert verdict.over != is_over
            assert step - at >= IN_A_ROW
            state[verdict.cause] = verdict.over, step
    assert {cause for cause, (over, _) in state.items() if not over} == judge.verdicts.keys()


def test_wrong_numbers_and_absence_are_named() -> None:
    said = [Vitals(0.5), Vitals(0.5)]
    [found] = judged(Judge(), [said, said], flags=NOT_FINITE)
    assert found.cause == Cause(VerdictKind.NUMBERS, "worker 0")
    judge = Judge()
    seen = {"a": Report(Vitals(0.5)), "b": Report(Vitals(9.0), absent="stopped")}
    assert judge.hear(Observation(seen, 1, 0.0, CYCLE)) == []
    [found] = judge.hear(Observation(seen, 2, 0.1, CYCLE))
    assert found.cause == Cause(VerdictKind.STOPPED, "b")
    assert str(found) == (
        "b has not taken part since step 1. Check that its processes and its machine are running."
    )


def test_while_training_waits_only_absence_counts_at_once() -> None:
    judge = Judge()
    slow = [[Vitals(0.5), Vitals(2.0)]] * 2
    [found] = judged(judge, slow)
    assert found.cause == Cause(VerdictKind.COMPUTE, "worker 1")
    waits = {"worker 0": Report(flags=NOT_FINITE), "worker 1": Report(absent="stopped")}
    [found] = judge.hear(Observation(waits, 3, 20.0))
    assert found.cause == Cause(VerdictKind.STOPPED, "worker 1")
    assert judge.hear(Observation({}, 3, 99.0)) == [], "nothing ends"
    well = [[Vitals(0.5), Vitals(0.5)]] * IN_A_ROW
    over = judged(judge, well, first=20)
    assert {verdict.cause.kind for verdict in over if verdict.over} == {
        VerdictKind.STOPPED,
        VerdictKind.COMPUTE,
    }


def test_the_numbers_of_who_is_absent_are_not_judged() -> None:
    gone = Report(flags=NOT_FINITE, absent="stopped")
    judge = Judge()
    for step in range(IN_A_ROW):
        judge.hear(Observation({"a": Report(), "b": gone}, step, step * ROUND, CYCLE))
    assert list(judge.verdicts) == [Cause(VerdictKind.STOPPED, "b")]


@pytest.mark.parametrize("kind", VerdictKind)
@pytest.mark.parametrize("culprit", ["worker 1", ALL_WORKERS])
def test_each_verdict_is_a_sentence_and_says_what_to_do(kind: VerdictKind, culprit: str) -> None:
    verdict = Verdict(Cause(kind, culprit), "0.2 s per step", since=7)
    subject = "all workers have" if culprit == ALL_WORKERS else "worker 1 has"
    subject = (
        f"the link {subject}" if kind is VerdictKind.LINK and culprit != ALL_WORKERS else subject
    )
    begins = f"{subject} {WORDS[kind].has} since step 7: 0.2 s per step. {WORDS[kind].remedy}"
    assert str(verdict) == begins
    assert str(verdict).endswith(".")
    ends = str(replace(verdict, over=True))
    assert re.fullmatch(r".* (is|are) back to normal \((it was|they were) .* from step 7\)", ends)


def test_sentences_of_verdicts() -> None:
    slow = [[Vitals(0.113), Vitals(0.203)]] * 3
    (found,) = judged(Judge(), slow, first=243)
    assert str(found) == (
        "worker 1 has computed slowly since step 243: 0.203 s per step (the other worker: 0.113 s)."
        " Check its clock speed, temperature and other processes, or lower its batch size."
    )
    assert str(replace(found, over=True)) == (
        "worker 1 is back to normal (it was slow from step 243)"
    )


# --- cores ----------------------------------------------------------------------------------------


def queued(vitals: Vitals, share: float) -> Vitals:
    """Return what a worker says of itself that waits for cores for this share of its steps."""
    longer = vitals._replace(compute=vitals.compute / (1 - share))
    return longer._replace(queued=share * longer.step)


@given(st.integers(2, 5), SEEDED, st.floats(0.5, 0.9), st.booleans())
def test_on_a_busy_machine_only_its_cores_are_named_and_once(
    workers: int, rng: random.Random, share: float, all_are_short: bool
) -> None:
    """Its steps and transfers are as uneven as other programs make them, and differ from before."""
    judge = Judge()
    calm = [
        with_links(clean(workers, rng), links_of(workers, rng, lambda *_: 1.0)) for _ in range(12)
    ]
    assert judged(judge, calm) == []
    short = range(workers) if all_are_short else [rng.randrange(workers)]
    busy = list[list[Vitals]]()
    for _ in range(12):
        links = links_of(
            workers, rng, lambda *ends: rng.uniform(2, 9) if set(ends) & set(short) else 1.0
        )
        said = with_links(clean(workers, rng), links)
        for one in short:
            said[one] = queued(said[one], share * rng.uniform(0.9, 1.1))
        busy.append(said)
    (found,) = judged(judge, busy, first=12)
    assert found.cause == Cause(
        VerdictKind.LOAD, ALL_WORKERS if all_are_short else f"worker {short[0]}"
    )
    assert "s per step were spent waiting for one" in found.evidence
    (over,) = judged(judge, calm, first=24)
    assert (over.cause, over.over) == (found.cause, True)


@given(SEEDED, st.floats(0.0, 0.9 * SHORT_OF_CORES))
def test_workers_that_share_their_cores_only_with_each_other_are_judged(
    rng: random.Random, share: float
) -> None:
    """As two that train on two cores, with links that slow one of them down."""
    for kind, factor in (VerdictKind.SENDING, 4.0), (VerdictKind.COMPUTE, 1.0):
        histories = list[list[Vitals]]()
        uplinks = {1: factor}
        for _ in range(6):
            links = links_of(3, rng, lambda sender, _: uplinks.get(sender, 1.0))  # noqa: B023
            said = [queued(one, share) for one in with_links(clean(3, rng), links)]
            if kind is VerdictKind.COMPUTE:
                said[1] = said[1]._replace(compute=2 * said[1].compute)
            histories.append(said)
        assert [one.cause for one in judged(Judge(), histories)] == [Cause(kind, "worker 1")]


def test_a_verdict_stands_while_it_cannot_be_judged() -> None:
    judge = Judge()
    sick = [Vitals(0.5), Vitals(1.0)]
    well = [Vitals(0.5), Vitals(0.5)]
    slow = Cause(VerdictKind.COMPUTE, "worker 1")
    busy = Cause(VerdictKind.LOAD, "worker 1")
    assert [one.cause for one in judged(judge, [sick] * 3)] == [slow]
    said = [well[0], queued(well[1], 0.6)]
    assert [one.cause for one in judged(judge, [said] * 4, first=3)] == [busy]
    over = judged(judge, [well] * 4, first=7)
    assert [(one.cause, one.over) for one in over] == [(busy, True), (slow, True)] or (
        [(one.cause, one.over) for one in over] == [(slow, True), (busy, True)]
    )


def test_the_loopback_is_no_link() -> None:
    slow = [with_links([Vitals(0.5)] * 2, {(0, 1): 4.0, (1, 0): 0.5})] * 4
    assert [one.cause.kind for one in judged(Judge(), slow)] == [VerdictKind.LINK]
    assert judged(Judge(has_links=False), slow) == []
