"""Benchmarks read what a run says."""

from dataclasses import replace

import pytest

from benchmarks.diagnosis import verdicts_in
from torchtitan_diloco.diagnosis.kinds import Cause, Verdict
from torchtitan_diloco.diloco.vitals import ALL_WORKERS, VerdictKind


@pytest.mark.parametrize("kind", VerdictKind)
@pytest.mark.parametrize("culprit", ["worker 1", "worker 2 -> worker 0", ALL_WORKERS])
def test_verdicts_are_read_from_a_log(kind: VerdictKind, culprit: str) -> None:
    begun = Verdict(Cause(kind, culprit), "0.2 s per step", since=7)
    over = replace(begun, over=True)
    log = f"step 7/9  loss 1.0\n[rank 0] warning: {begun}\n{over}\n{begun}\n"
    assert verdicts_in(log) == [(kind, culprit)]
    assert verdicts_in(f"{over}\n") == []


def test_an_island_with_other_bits_is_read_from_its_log() -> None:
    line = "island worker-2: fragment 0: its copy has wrong bits, and is downloaded again"
    assert verdicts_in(f"step 7/9  loss 1.0\n{line}\n") == [("wrong numbers", "worker 2")]
