"""Links and steps as a run has met them, from its summary record to the planner; and a probe, which is such a run."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_trainer import streaming, words
from torchtitan_diloco.components.metrics import MetricsWriter
from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.plan import main
from torchtitan_diloco.planner.conditions import Conditions, Links
from torchtitan_diloco.planner.observed import conditions_from, conditions_of_run

RATE = st.floats(1e3, 1e12)


@given(
    up=st.tuples(RATE, RATE),
    down=st.tuples(RATE, RATE),
    step=st.floats(1e-3, 1e3),
    coding=st.one_of(RATE, st.just(math.inf)),
)
def test_conditions_survive_the_way_through_a_record(
    up: tuple[float, float], down: tuple[float, float], step: float, coding: float
) -> None:
    links = Links(up, down, latency_seconds=0.01)
    known = Conditions(
        links,
        (step, 2 * step),
        0.1,
        coding_bytes_per_second=coding,
        outer_bytes_per_second=math.inf,
        codec="int8",
    )
    record = json.loads(json.dumps(asdict(known)).replace("Infinity", '"inf"'))
    assert conditions_from(record) == known


def test_a_run_of_before_codecs_were_told_has_met_no_speed_of_coding() -> None:
    record = asdict(
        Conditions(
            Links((1e8, 1e8), (1e8, 1e8)), (1.0, 1.0), coding_bytes_per_second=1e8, codec="int8"
        )
    )
    assert conditions_from(record).coding_bytes_per_second == 1e8
    del record["codec"]
    assert conditions_from(record).coding_bytes_per_second == math.inf


def test_the_last_summary_of_a_run_is_taken(tmp_path: Path) -> None:
    links = Links((1e8, 1e8), (1e8, 1e8))
    with MetricsWriter(tmp_path, Metrics(tensorboard=False)) as writer:
        for seconds in (1.0, 2.0):
            writer.write_summary(
                {"step": 10, "observed": asdict(Conditions(links, (seconds, seconds)))}
            )
    assert conditions_of_run(tmp_path).step_seconds == (2.0, 2.0)
    assert conditions_of_run(tmp_path / "metrics.jsonl").coding_bytes_per_second == math.inf


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (None, "no metrics.jsonl"),
        (['{"step": 1}', '{"kind": "summ'], "has not ended"),
        (
            ['{"kind": "summary", "step": 1, "observed": {}}', '{"step": 2}', "[1, 2]"],
            "has not ended",
        ),
        (['{"kind": "summary", "step": 1, "observed": {"links": 3}}'], "cannot be read"),
        (['{"kind": "summary", "step": 1, "observed": null}'], "has met no links"),
    ],
)
def test_a_run_that_cannot_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str] | None, told: str
) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert main(["--config", "debug", "--run", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err


def test_a_run_of_other_workers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsWriter(tmp_path, Metrics(tensorboard=False)) as writer:
        writer.write_summary(
            {"step": 1, "observed": asdict(Conditions(Links((1e8,) * 3, (1e8,) * 3), (1.0,) * 3))}
        )
    assert main(["--config", "debug", "--run", str(tmp_path)]) == 2
    assert "that run had 3 workers, and diloco.workers = 2" in capsys.readouterr().err


def test_a_probe_measures_between_the_real_workers(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = streaming(text)
    del settings["run.folder"]
    assert main(["--config", "debug", "--probe", *words(settings)]) == 0
    told = capsys.readouterr()
    assert "of compute (measured)" in told.out
    assert "recommended" in told.out
    assert "probing links and steps" in told.err


def test_a_probe_that_fails_says_why(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = streaming(text, training__sequence_length=1_000_000)
    del settings["run.folder"]
    assert main(["--config", "debug", "--probe", *words(settings)]) == 2
    assert "training.sequence_length" in capsys.readouterr().err
