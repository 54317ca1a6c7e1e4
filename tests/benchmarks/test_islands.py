"""Measure islands in a folder for some seconds, and read what islands and store have shown."""

import json
from pathlib import Path

import pytest

from benchmarks import core
from benchmarks.islands import HOST_FAULTS, ISLAND_FAULTS, STORM, run_of, strike, summarize_store
from benchmarks.islands_run import IslandsRun
from benchmarks.workers import Job

STEP = 0.02
SMALL = {"validation.sequences": "8", "diloco.sync_every": "10", "diloco.overlap.delay": "5"}


def write(path: Path, records: list[core.Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def steps(count: int, **changes: float) -> list[core.Record]:
    """Return the notes of an island that takes a step in a second."""
    usual = {"seconds": 1.0, "exposed": 0.01, "rounds": 3, "parts": 0, "up": 0}
    return [{"time": number, "step": number, **usual, **changes} for number in range(count)]


@pytest.fixture
def run(tmp_path: Path) -> IslandsRun:
    """A run that was not started."""
    return IslandsRun(tmp_path, 2, Job({}), "folder")


def test_an_island_is_killed_and_the_run_ends_with_equal_bits(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with run_of(folder, 2, seconds=2, settings=SMALL, store="folder", step=STEP) as run:
        run.start_all(2, 20)
        strike(run, "killed", 1)
        audit = run.finish()
        assert audit["problems"] == []
        assert audit["merged_tokens"] >= 2 / STEP * 2 * 64
        assert set(run.seen([0], 0)) == {"longest stall, steps", "idle, %"}
        assert run.losses(audit, run.living) == {"steps lost": 0, "problems": 0}
        assert run.decisions()[-1]["versions"] > 0
        assert run.objects()[-1]["all"] > 0
        with run.notes(0).open("a") as notes:
            notes.write(json.dumps({"shared": ["another"]}) + "\n")
        assert run.finish()["problems"] == ["island 0 has other shared parameters than the store"]


def test_the_longest_stall_is_a_multiple_of_the_usual_step(run: IslandsRun) -> None:
    write(run.notes(0), [*steps(5), {"time": 5, "step": 5, "seconds": 3.0, "exposed": 2.0}])
    assert run.seen([0], since=0)["longest stall, steps"] == 2.0
    assert run.seen([0], since=0, until=4)["longest stall, steps"] == 0.01
    assert run.seen([0], since=0, but_last=1)["longest stall, steps"] == 0.01, "not the end"


def test_the_next_round_is_the_first_version_that_all_have_read(run: IslandsRun) -> None:
    for worker, later in enumerate((6, 8)):
        notes = steps(10)
        for note in notes[later:]:
            note["rounds"] = 4
        write(run.notes(worker), notes)
    assert run.next_round([0, 1], since=4.5) == 3.5


def test_traffic_is_counted_in_own_parts_over_whole_cycles(run: IslandsRun) -> None:
    notes = steps(25)
    for note in notes:
        cycles = note["step"] // 10
        note |= {"parts": 1000 * cycles, "up": 1100 * cycles}
        note |= {"down": 2200 * cycles, "versions": 2000 * cycles}
    write(run.notes(0), notes)
    assert run.traffic([0], 10) == {
        "up, parts": 1.1,
        "down, parts": 2.2,
        "versions down, parts": 2.0,
    }
    with pytest.raises(SystemExit, match="no whole cycle"):
        run.traffic([0], 10, until=5)


def test_objects_and_decisions_are_shown_by_quarter(run: IslandsRun) -> None:
    records = [{"time": second, "all": 10 + second, "bytes": 100} for second in range(9)]
    write(run.folder / "objects.jsonl", records)
    write(run.folder / "decisions.jsonl", records)
    found = summarize_store(run)
    assert [found[f"objects, quarter {number}"] for number in (1, 2, 3, 4)] == [12, 14, 16, 18]
    assert found["decision, bytes, quarter 4"] == 100


def test_a_storm_strikes_islands_the_syncer_and_the_store() -> None:
    assert set(STORM) & set(ISLAND_FAULTS)
    assert set(HOST_FAULTS) <= set(STORM)
