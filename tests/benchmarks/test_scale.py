"""Test the plan, the records and the table of `benchmarks.scale`, and the command itself."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import core, records, scale, scale_results
from benchmarks.scale import Run, Stage, runs_of
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.models import build_model
from torchtitan_diloco.models.interface import parameter_counts

STAGE = Stage(15_000_000, "adamw")
RUNS = runs_of(STAGE, (2, 4), (30,), (0, 1))
MADE_BY = records.Provenance("2026-11-27 12:00", "0123456789ab", "python -m x", "GPU, 8 GiB", "v")
PROBE = {"seconds": 30.0, "tokens": 1e6, "tokens_per_second": 1e5, "peak_tokens_per_second": 1e5}


def record_of(run: Run, loss: float, **other: Any) -> core.Record:
    """Return a record of a run that was validated after 5 and 10 million tokens."""
    made = {
        **run.names,
        "finished": True,
        "extra": "",
        "tokens_per_parameter": 20,
        "tokenizer": "bytes",
        "text": "abc",
        "parameters": 15_100_000,
        "bits_per_byte": 2.5,
        "curve": [[5_000_000, 2 * loss], [10_000_000, loss]],
        "loss": loss,
    }
    return records.stamped([made | other], MADE_BY)[0]


# --- the plan -------------------------------------------------------------------------------------


@given(
    seconds=st.floats(1, 1e4),
    speeds=st.lists(st.floats(1e4, 1e7), min_size=1, max_size=6),
    at_once=st.integers(1, 6),
    text_tokens=st.integers(10**6, 10**9),
)
def test_a_plan_fits_into_the_time_and_the_text(
    seconds: float, speeds: list[float], at_once: int, text_tokens: int
) -> None:
    probes = [PROBE | {"peak_tokens_per_second": speed} for speed in speeds]
    size = STAGE.size
    ratio = scale.plan_ratio(size, probes, seconds, at_once, text_tokens)
    starting = 20.0 * math.ceil(len(probes) / at_once)

    def fits(tokens: int) -> bool:
        taken = starting + sum(tokens / speed for speed in speeds)
        return taken <= seconds * (1 + 1e-9) and tokens <= 4 * text_tokens

    assert 0 <= ratio <= scale.FULL_RATIO
    assert ratio == 0 or fits(ratio * size)
    assert ratio == scale.FULL_RATIO or not fits((ratio + 1) * size)


def test_each_seed_has_its_control_first() -> None:
    assert len(set(RUNS)) == len(RUNS) == 6
    kinds = [(run.seed, run.workers, run.every) for run in RUNS]
    assert kinds == [(0, 1, 0), (0, 2, 30), (0, 4, 30), (1, 1, 0), (1, 2, 30), (1, 4, 30)]


def test_a_beginning_is_a_run_of_its_own_in_the_plan_and_in_the_table() -> None:
    control, without, with_one = runs_of(STAGE, (2,), (30,), (0,), (0.0, 0.1))
    text = {"data.tokenizer": "bytes"}
    lengths = [
        core.load(scale.settings_of(run, text, {}, 20.0)).diloco.beginning.length
        for run in (without, with_one)
    ]
    assert lengths == [0, 0.1]
    known = [record_of(control, 2.0), record_of(without, 2.04)]
    assert not scale.is_complete([control, without, with_one], known, {})
    lines = scale_results.table([*known, record_of(with_one, 2.02)]).splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [(row[3], row[7]) for row in rows] == [
        ("M=2, H=30", "+2.00"),
        ("M=2, H=30, beginning 0.1", "+1.00"),
    ]


def test_a_stage_is_complete_with_one_text_and_equal_tokens() -> None:
    known = [record_of(run, 2.0) for run in RUNS]
    assert scale.is_complete(RUNS, known, {})
    assert not scale.is_complete(RUNS, known[1:], {})
    for other in ({"finished": False}, {"text": "def"}, {"tokens_per_parameter": 5}):
        assert not scale.is_complete(RUNS, [known[0] | other, *known[1:]], {})
    other_stage = runs_of(Stage(STAGE.size, "muon"), (2, 4), (30,), (0, 1))
    assert not scale.is_complete(other_stage, known, {})


@pytest.mark.parametrize(("size", "workers"), list(product((1, 4, 15, 35, 100), (1, 2, 4, 8))))
def test_models_have_about_the_size_asked_for_and_workers_divide_their_batch(
    size: int, workers: int
) -> None:
    stage = Stage(size * 1_000_000, "muon")
    run = Run(stage, workers, 0 if workers == 1 else 30)
    tokenizer = "bytes" if stage.size < scale.BYTES_BELOW else str(scale.TOKENIZER)
    config = core.load(scale.settings_of(run, {"data.tokenizer": tokenizer}, {}, 20.0))
    sequences = config.training.global_batch_size
    assert sequences is not None
    assert sequences % (workers * config.training.batch_size) == 0
    rows = -(-build_tokenizer(tokenizer).vocab_size // 64) * 64
    counts = parameter_counts(build_model(config.model, rows, sequence_length=1))
    assert counts["total"] == pytest.approx(stage.size, rel=0.1)
    assert config.training.tokens_per_parameter == 20.0


def test_the_tokenizer_beside_the_benchmark_has_the_tokens_that_its_page_names() -> None:
    tokenizer = build_tokenizer(str(scale.TOKENIZER))
    assert tokenizer.vocab_size == 8192
    source = Path(__file__).read_text(encoding="utf-8")
    tokens = tokenizer.encode(source)
    assert tokenizer.decode(tokens.tolist()) == source
    assert len(source) / len(tokens) > 2.5, "it was made from source code"


# --- the results ----------------------------------------------------------------------------------


def test_seeds_are_compared_with_their_own_controls() -> None:
    control, two, four, other_control, other_two, _ = RUNS
    known = [
        record_of(control, 2.0),
        record_of(two, 2.02),
        record_of(four, 1.98),
        record_of(other_control, 4.0),
        record_of(other_two, 4.12),
    ]
    lines = scale_results.table(known).splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [[*row[3:6], row[7]] for row in rows] == [
        ["M=2, H=30", "2", "3.0000 (2.0000 ... 4.0000)", "+2.00 (+1.00 ... +3.00)"],
        ["M=4, H=30", "1", "2.0000", "-1.00"],
    ]
    of_another_text = [known[0] | {"text": "def"}, known[1]]
    assert scale_results.find_pairs(of_another_text) == []


def test_a_run_that_was_cut_is_compared_after_equal_tokens() -> None:
    control, two = RUNS[:2]
    cut = record_of(two, 2.02, finished=False, curve=[[5_000_000, 4.1]])
    (pair,) = scale_results.find_pairs([record_of(control, 2.0), cut])
    assert (pair.tokens, pair.losses, pair.is_whole) == (5_000_000, (4.0, 4.1), False)
    assert "5.0M (cut, of 20 a parameter)" in scale_results.table([record_of(control, 2.0), cut])


def test_pictures_have_the_points_of_the_records(tmp_path: Path) -> None:
    known = [record_of(run, 2.0 + number / 100) for number, run in enumerate(RUNS)]
    scale_results.draw_sizes(known, tmp_path / "sizes.svg")
    scale_results.draw_curves(known, tmp_path / "curves.svg")
    for name in ("sizes.svg", "curves.svg"):
        assert "</svg>" in (tmp_path / name).read_text()


# --- the command ----------------------------------------------------------------------------------


def test_text_has_each_file_once_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    for name, source in (("a", "x = 1\n" * 500), ("b", "x = 1\n" * 500), ("c", "y = 2\n" * 500)):
        (folder / f"{name}.py").write_text(source)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(folder))
    monkeypatch.setattr(scale, "standard_library", lambda _: [])
    text = scale.prepare_text(tmp_path, "", "bytes")
    assert len((tmp_path / "sources.jsonl").read_text().splitlines()) == 2
    (tmp_path / "sources.jsonl").unlink()
    assert scale.prepare_text(tmp_path, "", "bytes") == text
    assert scale.prepare_text(tmp_path / "other", text.settings["data.corpus"], "bytes") == text


@pytest.mark.usefixtures("forks")
def test_the_command_measures_records_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real trainers, of some steps, and an honest table of what one of them was cut in."""
    text = tmp_path / "text.jsonl"
    lines = (f"{number} quick brown foxes jump over the lazy dog\n" * 8 for number in range(600))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(scale, "FULL_RATIO", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out"
    words = f"--minutes 10 --out {out} --work {tmp_path / 'work'} --corpus {text} --sizes 0.04M"
    words += " --workers 2 --optimizers adamw --run.device cpu"
    monkeypatch.setattr("sys.argv", ["scale", *words.split()])
    scale.main()
    printed = capsys.readouterr().out
    (file,) = out.glob("scale-*.jsonl")
    control, streaming = [json.loads(line) for line in file.read_text().splitlines()]
    assert (control["every"], streaming["workers"], streaming["every"]) == (0, 2, 30)
    assert control["finished"]
    assert streaming["finished"]
    assert control["tokens"] == streaming["tokens"] >= control["parameters"]
    assert control["curve"][-1] == [control["tokens"], control["loss"]]
    assert str(tmp_path) not in file.read_text(), "no path of one machine"
    assert "--corpus" in control["command"]
    assert f"{streaming['loss']:.4f}" in printed
    assert {path.name for path in out.iterdir()} == {
        file.name,
        "scale.md",
        "sizes.svg",
        "curves.svg",
    }
    scale.main()
    assert "the records have it already" in capsys.readouterr().out
    file.unlink()
    scale.main()
    again = [json.loads(line)["loss"] for line in file.read_text().splitlines()]
    assert again == [control["loss"], streaming["loss"]], "what was trained is kept"
