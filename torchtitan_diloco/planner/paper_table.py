"""The paper's table of bandwidths (arXiv 2501.18512, Table 4), for the paper's models and for any other."""

from collections.abc import Sequence

import numpy as np

from torchtitan_diloco.planner.paper_model import (
    Array,
    PaperMethod,
    PaperModel,
    paper_methods,
    utilisation,
)

TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
GRID: Array = np.logspace(-1, 3, 50)
"""Gbit/s, the paper's. Neighbours differ by a factor of 1.21: no cell is more exact than that."""
WIDE_GRID: Array = 10.0 ** (-1 + 4 * np.arange(-49, 98) / 49)
"""The same points and more on both sides, for models that are not the paper's."""

PAPER_MODELS = (
    PaperModel("1B, 24 layers, 0.1 s a step", layers=24, parameters=1e9, step_seconds=0.1),
    PaperModel("10B, 48 layers, 0.8 s a step", layers=48, parameters=10e9, step_seconds=0.8),
)


def bandwidths(
    model: PaperModel, method: PaperMethod, grid: Array = GRID
) -> tuple[float | None, ...]:
    """Gbit/s for each target: the last point of the grid that is still below it, which is what the paper prints. None where
    even the first point reaches the target."""
    reached = utilisation(model, method, grid * 1e9)
    below = [np.flatnonzero(reached < target) for target in TARGETS]
    return tuple(float(grid[points[-1]]) if points.size else None for points in below)


def as_printed(gbits: float) -> float:
    """The paper rounds twice."""
    return round(round(gbits, 2), 1)


def paper_table() -> str:
    """The paper's own, in Markdown, Gbit/s."""
    return _table(PAPER_MODELS, paper_methods(), GRID)


def table_like_the_papers(model: PaperModel, methods: Sequence[PaperMethod]) -> str:
    """The same of another model, with three digits."""
    return _table([model], methods, WIDE_GRID)


def _table(models: Sequence[PaperModel], methods: Sequence[PaperMethod], grid: Array) -> str:
    lines = [
        "| model | method | " + " | ".join(f"{100 * target:.0f} %" for target in TARGETS) + " |",
        "|---|---|" + "---|" * len(TARGETS),
    ]
    for model in models:
        for number, method in enumerate(methods):
            cells = [_cell(value, grid) for value in bandwidths(model, method, grid)]
            lines.append(
                f"| {'' if number else model.name} | {method.name} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


def _cell(gbits: float | None, grid: Array) -> str:
    if gbits is None:
        return f"<= {grid[0]:.3g}"
    if gbits >= grid[-1]:
        return f">= {grid[-1]:.3g}"
    return f"{as_printed(gbits):.1f}" if grid is GRID else f"{gbits:.3g}"
