"""Replay recorded runs: the judge names what was injected and where, and nothing else.

    .venv/bin/python -m benchmarks.diagnosis --repeats 1 --record tests/diagnosis/histories

has recorded them: trainers in network namespaces, with a fault at one of them. The first line of a
file is about the fault. The others are what the judge was told, 12 rounds before the fault and up
to 40 after it.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from torchtitan_diloco.diagnosis.kinds import Verdict
from torchtitan_diloco.diagnosis.verdicts import IN_A_ROW, SETTLED, Judge, Observation
from torchtitan_diloco.diloco.vitals import Report, VerdictKind, Vitals

HISTORIES = sorted(Path(__file__).parent.glob("histories/*.jsonl"))
MOST_SECONDS = 16.0
"""From a fault to its verdict."""
Named = tuple[str, str] | None


class Replay(NamedTuple):
    about: dict[str, Any]
    verdicts: list[tuple[Verdict, int, float]]
    """With the rounds and seconds since the fault began."""

    @property
    def expected(self) -> Named:
        wanted = self.about["expected"]
        return (wanted[0], wanted[1]) if wanted else None

    @property
    def named(self) -> Counter[Named]:
        said = [one.cause for one, _, _ in self.verdicts if not one.over]
        return Counter((str(kind), culprit.replace("worker-", "worker ")) for kind, culprit in said)


def replay(path: Path) -> Replay:
    about, *lines = map(json.loads, path.read_text().splitlines())
    judge = Judge()
    found = list[tuple[Verdict, int, float]]()
    began = 0.0
    rounds = 0
    for line in lines:
        step = line["step"]
        now = line["now"]
        size = len(Vitals._fields)
        seen = {
            name: Report(Vitals._make([*one[: size - 1], tuple(one[size - 1])]), *one[size:])
            for name, one in line["seen"].items()
        }
        if step >= about["begin"]:
            began = began or now
            rounds = rounds + 1
        changed = judge.hear(Observation(seen, step, now, line.get("cycle")))
        found += [(one, rounds, now - began if began else -1.0) for one in changed]
    return Replay(about, found)


def test_all_recorded_faults_are_named_and_nothing_else() -> None:
    """The confusion matrix of (class, culprit), injected against named, is a diagonal."""
    matrix = Counter[tuple[Named, Named]]()
    right = Counter[tuple[Named, Named]]()
    for path in HISTORIES:
        found = replay(path)
        right[found.expected, found.expected] += 1
        matrix.update((found.expected, one) for one in found.named or [None])
    assert matrix == right
    kinds = {named[0] for named, _ in matrix if named}
    assert len(kinds) >= 10, "of each class that the judge sees, there is one"
    assert (None, None) in matrix


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_a_verdict_comes_in_time(path: Path) -> None:
    found = replay(path)
    for verdict, rounds, seconds in found.verdicts[:1]:
        # Before the judge was told.
        waited = verdict.cause.kind in (VerdictKind.STOPPED, VerdictKind.HUNG, VerdictKind.STUCK)
        assert rounds >= (1 if waited else IN_A_ROW), "no verdict before the fault"
        settled = 0.0 if waited else SETTLED.get(verdict.cause.kind, 0.0)
        assert settled <= seconds + 0.5 <= MOST_SECONDS + 0.5
    assert sum(one.stat().st_size for one in HISTORIES) < 160_000
