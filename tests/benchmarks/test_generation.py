"""The table of `benchmarks.generation`."""

import pytest

from benchmarks import core
from benchmarks.generation import WAYS, measure
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models import build_model
from torchtitan_diloco.models.parallelize import materialize


def test_both_ways_are_compared_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(Model(layers=1, width=8, heads=1, head_dim=8, feed_forward=8), 256, 8)
    materialize(model, core.CPU, seed=0)
    monkeypatch.setattr(core, "timed", lambda task, _: (task(), core.Seconds(2.0, 0.5))[1])
    rows = measure(model, prompts=2, length=4, rounds=3)
    assert [row[:2] for row in rows] == [["2", way] for way in WAYS]
    assert {tuple(row[2:]) for row in rows} == {("4.0", "1.0", "62.50", "1.0")}
