"""Measure a small syncer."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import syncer


def test_the_table_shows_a_syncer_and_what_a_larger_one_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syncer, "IDLE_SECONDS", 0.5)
    options = Namespace(
        millions=0.1,
        to=1.0,
        fragments=2,
        codec="fp4_e3m0",
        islands=[2],
        cycles=1,
        threads=1,
        folder=tmp_path,
    )
    here, larger = syncer.measure_all(options)
    assert len(here) == len(larger) == len(syncer.HEADER.split(" | "))
    assert float(larger[4]) > float(here[4]) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_row_extrapolates_times_but_not_bytes_a_parameter() -> None:
    cycles = [syncer.Cycle(cpu=0.5, seconds=0.25, private=2 * 10**6, mapped=24 * 10**6)]
    assert syncer.row(10**6, 4, 0.02, cycles, to=10**7) == [
        *("10,000,000", "4", "5.00", "2.0", "2.50", "2.5 %", "2.0", "24.0", "1")
    ]
