"""Links and steps as a run measured them, and the probe."""

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.components.records import Conditions, Summary, to_line
from torchtitan_diloco.plan import main
from torchtitan_diloco.planner.probe import conditions_of_run

OF_THREE = Summary(1, observed=Conditions(1e8, (1.0,) * 3))
RATE = st.floats(1e3, 1e12)


def write_summaries(folder: Path, *summaries: Conditions) -> Path:
    lines = [to_line(Summary(1, observed=one)) for one in summaries]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


@given(RATE, st.floats(1e-3, 1e3), st.one_of(RATE, st.just(math.inf)))
def test_conditions_survive_the_way_through_a_record(
    tmp_path_factory: pytest.TempPathFactory, rate: float, step: float, coding: float
) -> None:
    known = Conditions(rate, (step, 2 * step), 0.01, 0.1, coding, math.inf, codec="int8")
    folder = write_summaries(tmp_path_factory.mktemp("run"), Conditions(1e8, (1.0, 1.0)), known)
    assert conditions_of_run(folder) == known, "the last one"
    assert conditions_of_run(folder / "metrics.jsonl") == known


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (None, "no metrics.jsonl"),
        ([to_line(OF_THREE)], "that run had 3 workers, and diloco.workers = 2"),
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


def test_a_probe_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[-2:] == ["--diloco.overlap.delay", "3"], "the last one counts"
        return subprocess.CompletedProcess(command, 2, "begun\nerror: no room\n")

    monkeypatch.setattr(subprocess, "run", fail)
    assert main(["--config", "debug", "--diloco.overlap.delay", "5", "--probe"]) == 2
    assert "exit code 2:\n  begun\n  error: no room" in capsys.readouterr().err
