"""Links and steps as a run measured them, and the probe."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_trainer import streaming, words
from torchtitan_diloco.plan import main
from torchtitan_diloco.planner.observed import conditions_from, conditions_of_run
from torchtitan_diloco.planner.prediction import Conditions

RATE = st.floats(1e3, 1e12)


def as_json(conditions: Conditions) -> str:
    return json.dumps(asdict(conditions)).replace("Infinity", '"inf"')


def write_summaries(folder: Path, *summaries: Conditions) -> None:
    lines = [f'{{"kind": "summary", "step": 1, "observed": {as_json(one)}}}' for one in summaries]
    (folder / "metrics.jsonl").write_text("\n".join(lines))


@given(RATE, st.floats(1e-3, 1e3), st.one_of(RATE, st.just(math.inf)))
def test_conditions_survive_the_way_through_a_record(
    rate: float, step: float, coding: float
) -> None:
    known = Conditions(rate, (step, 2 * step), 0.01, 0.1, coding, math.inf, codec="int8")
    assert conditions_from(json.loads(as_json(known))) == known


def test_the_last_summary_of_a_run_is_taken(tmp_path: Path) -> None:
    write_summaries(tmp_path, *(Conditions(1e8, (seconds, seconds)) for seconds in (1.0, 2.0)))
    assert conditions_of_run(tmp_path).step_seconds == (2.0, 2.0)
    assert conditions_of_run(tmp_path / "metrics.jsonl").coding_bytes_per_second == math.inf


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (None, "no metrics.jsonl"),
        (['{"step": 1}', '{"kind": "summ'], "has not ended"),
        (['{"kind": "summary", "step": 1, "observed": {"jitter": "x"}}'], "cannot be read"),
        (['{"kind": "summary", "step": 1, "observed": null}'], "measured no links"),
    ],
)
def test_runs_without_conditions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str] | None, told: str
) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert main(["--config", "debug", "--run", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err


def test_given_values_override_measured_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_summaries(tmp_path, Conditions(1e8, (1.0, 1.0), latency_seconds=0.01))
    run = ["--config", "debug", "--run", str(tmp_path)]
    for flags, expected in (
        ([], "100 Mbit/s for the slowest worker, latency 10 ms"),
        (["--latency", "50ms"], "100 Mbit/s for the slowest worker, latency 50 ms"),
        (["--bandwidth", "2Mbit"], "2 Mbit/s for the slowest worker, latency 10 ms"),
    ):
        assert main([*run, *flags]) == 0
        assert expected in capsys.readouterr().out


def test_a_run_of_other_workers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_summaries(tmp_path, Conditions(1e8, (1.0,) * 3))
    assert main(["--config", "debug", "--run", str(tmp_path)]) == 2
    assert "that run had 3 workers, and diloco.workers = 2" in capsys.readouterr().err


def test_a_probe_that_fails_says_why(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = streaming(text, training__sequence_length=1_000_000)
    del settings["run.folder"]
    assert main(["--config", "debug", "--probe", *words(settings)]) == 2
    assert "training.sequence_length" in capsys.readouterr().err
