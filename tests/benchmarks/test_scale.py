"""Test the plan and the table of `benchmarks.scale` with costs and losses that are known."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import core, scale
from benchmarks.scale import RATIOS, Run, plan, runs_of
from torchtitan_diloco.models.decoder import Decoder

SIZES = 1_000_000, 4_000_000, 15_000_000
ROWS = [Run(*one) for one in product(SIZES, ("adamw", "muon"), (2, 4), (30, 100))]


def cost(run: Run, ratio: float) -> float:
    return 5 + ratio * run.size / 1e6


@given(seconds=st.floats(1, 1e4), jobs=st.integers(1, 8))
def test_a_plan_fits_and_begins_with_the_smallest(seconds: float, jobs: int) -> None:
    chosen, spent = plan(ROWS, cost, seconds, {}, jobs), 0.0
    assert list(chosen) == sorted(chosen)
    for size, ratio in chosen.items():
        assert ratio in RATIOS
        costs = [cost(run, ratio) for run in runs_of(size, ROWS)]
        spent += max(*costs, sum(costs) / jobs)
    assert spent <= seconds * (1 + 1e-9)


def test_each_row_comes_after_its_control() -> None:
    runs = runs_of(SIZES[0], ROWS)
    assert len(set(runs)) == len(runs) == 10
    for number, run in enumerate(runs):
        assert run.control in runs[: number + 1]


def test_with_time_for_all_nothing_is_cut_and_without_any_all_is() -> None:
    all_of_it = plan(ROWS, cost, 1e6, {})
    assert all_of_it == dict.fromkeys(SIZES, 20.0)
    results: dict[Run, core.Record] = {run: {} for size in SIZES for run in runs_of(size, ROWS)}
    assert scale.describe_cuts(ROWS, all_of_it, results) == []
    nothing = plan(ROWS, cost, 1.0, {})
    assert nothing == {}
    assert len(scale.describe_cuts(ROWS, nothing, {})) == len(SIZES)
    cuts = scale.describe_cuts(
        ROWS, {SIZES[0]: 5.0}, {run: results[run] for run in runs_of(SIZES[0], ROWS)}
    )
    assert cuts == ["1M: 5 tokens a parameter instead of 20", "4M: not begun", "15M: not begun"]


def test_a_begun_size_keeps_its_tokens_and_finished_runs_are_free() -> None:
    begun = {SIZES[0]: 5.0}
    assert plan(ROWS, cost, 1.0, begun) == begun, "cut, and continued"

    def left(run: Run, ratio: float) -> float:
        return 0.0 if run.size == SIZES[0] else cost(run, ratio)

    assert plan(ROWS, left, 1e6, begun) == {**dict.fromkeys(SIZES, 20.0), SIZES[0]: 5.0}


@pytest.mark.parametrize(("size", "workers"), list(product((1, 4, 15, 35, 100), (1, 2, 4, 8))))
def test_models_have_about_the_size_asked_for_and_workers_divide_their_batch(
    size: int, workers: int
) -> None:
    size *= 1_000_000
    run, text = Run(size, "muon", workers, 0 if workers == 1 else 30), {"data.tokenizer": "bytes"}
    config = core.load(scale.settings_of(run, text, {}, 20.0))
    sequences = config.training.global_batch_size
    assert sequences is not None
    assert sequences % (workers * config.training.batch_size) == 0
    with torch.device("meta"):
        counts = Decoder(config.model, 320, 1).parameter_counts()
    assert counts["total"] == pytest.approx(size, rel=0.1)
    assert config.training.tokens_per_parameter == 20.0


def test_a_run_takes_as_long_as_the_short_ones_say() -> None:
    control, row = ROWS[0].control, ROWS[0]
    probe = {"seconds": 12.0, "tokens": 1000, "tokens_per_second": 500.0}
    probes = {control: probe, row: probe | {"tokens_per_second": 250.0}}
    assert scale.seconds_of(control, 5, probes) == pytest.approx(10 + 5e6 / 500)
    assert scale.seconds_of(ROWS[3], 5, probes) == pytest.approx(8 + 5e6 / 250)
    assert scale.seconds_of(ROWS[-1], 5, probes) == float("inf"), "not measured"


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
    monkeypatch.setattr(scale, "standard_library", lambda _: [])
    text = scale.prepare_text(tmp_path, "")
    assert len((tmp_path / "sources.jsonl").read_text().splitlines()) == 2
    (tmp_path / "sources.jsonl").unlink()
    assert scale.prepare_text(tmp_path, "") == text
    assert scale.prepare_text(tmp_path / "other", text["data.corpus"]) == text
