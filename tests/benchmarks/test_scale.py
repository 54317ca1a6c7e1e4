"""Test the plan and the table of `benchmarks.scale` with costs and losses that are known."""

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import core, scale
from benchmarks.scale import RATIOS, Run, plan

SIZES = 1_000_000, 4_000_000, 15_000_000
ROWS = [Run(*one) for one in product(SIZES, ("adamw", "muon"), (2, 4), (30, 100))]


def cost(run: Run, ratio: float) -> float:
    return 5 + ratio * run.size / 1e6


@given(seconds=st.floats(1, 1e4), jobs=st.integers(1, 8))
def test_a_plan_fits_and_each_row_has_its_control(seconds: float, jobs: int) -> None:
    chosen = plan(ROWS, cost, seconds, {}, jobs)
    total = sum(cost(run, ratio) for ratio, runs in chosen.values() for run in runs)
    assert total / jobs <= seconds * (1 + 1e-9)
    assert list(chosen) == sorted(chosen)
    for size, (ratio, runs) in chosen.items():
        assert ratio in RATIOS
        assert len(set(runs)) == len(runs)
        rows = [run for run in runs if run.every]
        assert rows == [row for row in ROWS if row.size == size][: len(rows)] != []
        for number, run in enumerate(runs):
            assert run.control in runs[: number + 1]
            assert cost(run, ratio) <= seconds


def test_with_time_for_all_nothing_is_cut_and_without_any_all_is() -> None:
    all_of_it = plan(ROWS, cost, 1e6, {})
    assert [ratio for ratio, _ in all_of_it.values()] == [20.0] * len(SIZES)
    runs = [run for _, runs in all_of_it.values() for run in runs]
    assert set(runs) == {*ROWS, *(row.control for row in ROWS)}
    results: dict[Run, core.Record] = {run: {} for run in runs}
    assert scale.describe_cuts(ROWS, all_of_it, results) == []
    nothing = plan(ROWS, cost, 1.0, {})
    assert nothing == {}
    assert len(scale.describe_cuts(ROWS, nothing, {})) == len(ROWS)


def test_a_begun_size_keeps_its_tokens_and_finished_runs_are_free() -> None:
    rows = [row for row in ROWS if row.size == SIZES[0]]

    def left(run: Run, ratio: float) -> float:
        return 0.0 if run in (rows[0], rows[0].control) else cost(run, ratio)

    (chosen,) = plan(rows, left, 1.0, {SIZES[0]: 5.0}).values()
    assert chosen == (5.0, [rows[0].control, rows[0]])
    assert plan(rows, left, 1e6, {SIZES[0]: 5.0})[SIZES[0]][0] == 5.0


@pytest.mark.parametrize(("size", "rows"), list(product((1, 4, 15, 35, 100), (320, 8192))))
def test_models_have_about_the_size_asked_for_and_workers_divide_their_batch(
    size: int, rows: int
) -> None:
    size *= 1_000_000
    assert scale.count_parameters(size, rows) == pytest.approx(size, rel=0.1)
    text = core.Text("stdlib", "bytes")
    for workers, optimizer in product((1, 2, 4, 8), scale.OPTIMIZERS):
        run = Run(size, optimizer, workers, 0 if workers == 1 else 30)
        config = core.load(scale.settings_of(run, text, {}, 20.0))
        sequences = config.training.global_batch_size
        assert sequences is not None
        assert sequences % (workers * config.training.batch_size) == 0
        tokens = config.training.steps * sequences * config.training.sequence_length
        assert tokens == pytest.approx(20 * scale.count_parameters(size, 320), rel=0.001)


def test_a_run_takes_as_long_as_the_short_ones_say() -> None:
    control, row = ROWS[0].control, ROWS[0]
    probe = {"seconds": 12.0, "tokens": 1000, "tokens_per_second": 500.0}
    probes = {control: probe, row: probe | {"tokens_per_second": 250.0}}
    assert scale.seconds_of(control, 5000, probes) == pytest.approx(10 + 5000 / 500)
    assert scale.seconds_of(ROWS[3], 5000, probes) == pytest.approx(8 + 5000 / 250)
    assert scale.seconds_of(ROWS[-1], 5000, probes) == float("inf"), "not measured"


def test_results_are_of_rows_with_a_control(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, numbers = ROWS[:3], {"parameters": 1.1e6, "tokens": 2e7, "bits_per_byte": 2.5}
    results = {rows[0].control: {"loss": 2.0} | numbers, rows[0]: {"loss": 2.02} | numbers}
    scale.write_results(tmp_path, "title", rows, results, ["1M: cut"])
    table = (tmp_path / "table.md").read_text()
    cells = [cell.strip() for cell in table.splitlines()[4].split("|")[1:-1]]
    known = ["1.10M", "20.0M", "2", "30", "adamw", "2.0000", "2.0200", "+1.00", "2.5000"]
    assert cells == known
    assert table.strip().endswith("- 1M: cut")
    assert table in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line.get("gap_percent") for line in lines] == [None, pytest.approx(1.0)]
    picture = (tmp_path / "gap.svg").read_text()
    assert picture.startswith("<?xml")
    assert "</svg>" in picture


def test_text_has_each_file_once_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    for name, source in (("a", "x = 1\n" * 500), ("b", "x = 1\n" * 500), ("c", "y = 2\n" * 500)):
        (folder / f"{name}.py").write_text(source)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(folder))
    monkeypatch.setattr(core, "standard_library", lambda _: [])
    text = core.prepare_text(tmp_path, "", 300)
    assert len((tmp_path / "sources.jsonl").read_text().splitlines()) == 2
    assert text.rows == 320
    (tmp_path / "sources.jsonl").unlink()
    assert core.prepare_text(tmp_path, "", 300) == text
    assert core.prepare_text(tmp_path / "other", text.corpus, 0) == text
