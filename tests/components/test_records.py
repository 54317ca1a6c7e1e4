"""Records of rounds, and the file of records."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_diloco.components.records import (
    RoundRecord,
    drop_records_after,
    from_record,
    round_record,
    to_line,
)
from torchtitan_diloco.diloco.fragments import Fragment, Part
from torchtitan_diloco.diloco.round import Round, Traffic
from torchtitan_diloco.diloco.vitals import OUTLIER

BYTES = 10**6


def measured_round(**changes: Any) -> Round:
    """A round as a rank of worker 1 of two sees it, which arrives a second after the other."""
    traffic = Traffic(BYTES, 2 * BYTES, 0.01, 0.02, 0.1, header_sent=1, encoded=1.5, received=3)
    traffic.heard, traffic.link_bytes, traffic.link_until = {0: 1.0}, {0: BYTES}, {0: 3.0}
    traffic.dot = 3.0
    found = Round(0, 7, 5, BYTES, weight=8.0, participants=2, flags=OUTLIER, traffic=traffic)
    found.applied_step, found.due, found.taken, found.begun = 6, 0.0, 0.1, 1.0
    found.ready, found.asked, found.fetched, found.applied = 4.0, 3.0, 4.0, 4.5
    found.delta_square, found.mean_square = 9.0, 4.0
    found.drift = torch.tensor(2.0)
    return replace(found, **changes)


def written(found: Round) -> dict[str, Any]:
    """Return what the record of a round has on its line. Unknown values: tests/test_run_records."""
    fragment = Fragment(0, "blocks", (Part("weight", nn.Parameter(torch.zeros(2 * BYTES))),))
    record = round_record(found, fragment, clock=1000.0)
    line: dict[str, Any] = json.loads(to_line(record))
    again = from_record(RoundRecord, line)
    assert json.loads(to_line(again)) == line, "what is written is read again"
    return line


def test_the_record_of_a_round() -> None:
    found = written(measured_round())
    assert (found["kind"], found["step"], found["fragment_name"]) == ("round", 6, "blocks")
    assert (found["parameters"], found["values"]) == (2 * BYTES, BYTES)
    assert found["left_out"] == ["outlier"]
    assert (found["outer_gradient_norm"], found["drift_norm"]) == (3.0, 2.0)
    assert found["cosine_to_mean"] == pytest.approx(3 / 6)
    assert (found["at_seconds"]["due"], found["at_seconds"]["applied"]) == (1000.0, 1004.5)
    assert found["heard_after_seconds"] == {"0": 0.0}
    assert found["received_bits_per_second_from"] == {"0": 8 * BYTES / 2}
    record = from_record(RoundRecord, found)
    assert (record.waited_seconds, record.seconds("begun", "ready")) == (1.0, 3.0)


def test_small_messages_are_no_measure_of_a_link() -> None:
    for size, rates in ((16_383, {}), (16_384, {"0": 8 * 16_384})):
        link = Traffic(header_sent=1.0, heard={0: 2.0}, link_until={0: 3.0}, link_bytes={0: size})
        found = written(measured_round(traffic=link))
        assert found["received_bits_per_second_from"] == rates


def test_a_resume_drops_what_it_repeats_and_what_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', "{damaged", "[1]", '{"kind": "round", "step": 2}', '{"step": null}']
    path.write_bytes("\n".join(lines).encode() + b'\n"\xff"\n{"step": 3}\n{"ste')
    assert drop_records_after(path, 2) == [{"step": 1}]
    assert path.read_text() == '{"step": 1}\n{"kind": "round", "step": 2}\n'
    assert "4 lines" in caplog.text
