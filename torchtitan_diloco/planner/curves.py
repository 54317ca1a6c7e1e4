"""Utilisation over bandwidth, as a picture."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from torchtitan_diloco.diloco.config import DiLoCoConfig as DiLoCo, Fragments, Quantization
from torchtitan_diloco.pictures.files import write_picture
from torchtitan_diloco.pictures.line_chart import Series, line_chart
from torchtitan_diloco.planner.choice import Plan
from torchtitan_diloco.planner.scenario import Scenario

POINTS = 49
LEAST_SHOWN, MOST_SHOWN = 0.02, 0.995
"""Utilisation of the first curve to rise and of the last: the picture goes from the one to the other."""


def write_curves(path: Path, name: str, scenario: Scenario, plan: Plan) -> None:
    settings = _settings(plan)
    rates = _range(scenario, list(settings.values()))
    series = [
        Series(
            label,
            [
                (rate / 1e9, 100 * share)
                for rate, share in zip(rates, scenario.curve(diloco, rates), strict=True)
            ],
        )
        for label, diloco in settings.items()
    ]
    scene = line_chart(
        series,
        title=f"{name}: compute utilisation",
        x_label="bandwidth of a worker, Gbit/s",
        y_label="% of the time computing (extended model)",
        x_log=True,
        y_range=(0.0, 100.0),
    )
    write_picture(scene, path)


def _settings(plan: Plan) -> dict[str, DiLoCo]:
    present = plan.present.diloco
    whole = Fragments(layers_per_fragment=0)
    diloco = replace(
        present, method="streaming", fragments=whole, overlap=replace(present.overlap, delay=0)
    )
    found = {
        "data parallel": plan.data_parallel.diloco,
        "DiLoCo": replace(diloco, quantization=_bf16()),
    }
    if present.method == "streaming":
        found["present"] = present
    if plan.best is not plan.present:
        found["recommended"] = plan.best.diloco
    return found


def _bf16() -> Quantization:
    return Quantization(codec="bf16")


def _range(scenario: Scenario, settings: Sequence[DiLoCo]) -> list[float]:
    """Bits a second in whole powers of ten, from where all curves lie at the bottom to where all have reached their top."""
    grid = [10.0**exponent for exponent in range(4, 15)]
    curves = [scenario.curve(diloco, grid) for diloco in settings]
    low = max(
        (i for i in range(len(grid)) if all(curve[i] <= LEAST_SHOWN for curve in curves)), default=0
    )
    tops = [
        min(i for i, share in enumerate(curve) if share >= MOST_SHOWN * curve[-1])
        for curve in curves
    ]
    return [float(rate) for rate in np.geomspace(grid[low], grid[max(tops)], POINTS)]
