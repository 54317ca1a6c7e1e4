"""The paper's model against its printed Table 4 (arXiv 2501.18512).

The rules of the model were found with the rows of 1B and 10B. The rows of 100B, and those of
Llama 405B and DeepSeek-V3 in Table 6 of arXiv 2503.09799, which uses the same simulator, were not
known then.
"""

import re
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest

from tests.conftest import REPOSITORY
from torchtitan_diloco.planner import paper
from torchtitan_diloco.planner.paper import (
    GRID,
    PAPER_METHODS,
    PAPER_MODELS,
    STREAMING,
    TARGETS,
    paper_table,
    utilization,
)

bandwidths = cache(paper.bandwidths)
MODELS = {model.name: model for model in PAPER_MODELS}
METHODS = {method.name: method for method in PAPER_METHODS}
Cell = tuple[str, str, float]
"""Model, method and utilization."""

FITTED = {
    ("1B", "data parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "DiLoCo"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "streaming overlapped"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "streaming overlapped FP4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "DiLoCo"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "streaming overlapped"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "streaming overlapped FP4"): (0.4, 0.9, 1.4, 1.4, 1.7),
}
OTHERS = {
    ("100B", "data parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "DiLoCo"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "streaming overlapped"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "streaming overlapped FP4"): (0.5, 0.9, 1.1, 1.1, 1.4),
    ("Llama 405B", "data parallel"): (126.5, 222.3, 268.3, 323.8, 323.8),
    ("DeepSeek-V3", "data parallel"): (323.8, 569.0, 686.6, 686.6, 1000.0),
}


def differences(printed: Mapping[tuple[str, str], tuple[float, ...]]) -> dict[Cell, float]:
    """Return the printed cells that differ, with what the model finds."""
    return {
        (model, method, target): found
        for (model, method), row in printed.items()
        for target, wanted, found in zip(
            TARGETS, row, bandwidths(MODELS[model], METHODS[method]), strict=True
        )
        if found != wanted
    }


def test_every_cell_of_the_papers_table() -> None:
    """Exact but for two cells in each half, which are the next point of the grid."""
    assert differences(FITTED) == {
        ("1B", "streaming overlapped FP4", 0.5): 0.3,
        ("10B", "streaming overlapped", 0.5): 1.4,
    }
    assert differences(OTHERS) == {
        ("100B", "streaming", 0.99): 23.3,
        ("100B", "streaming overlapped", 0.5): 2.0,
    }


def test_the_documentation_counts_the_exact_cells() -> None:
    counts = []
    for printed in (FITTED, OTHERS):
        cells = len(printed) * len(TARGETS)
        counts.append(f"{cells - len(differences(printed))} of {cells}")
    text = (REPOSITORY / "docs/report-and-plan.md").read_text()
    section = text.partition("### The paper's table")[2].partition("\n## ")[0]
    assert re.findall(r"\d+ of \d+", section.replace("\n", " ")) == counts
    shown = [line for line in section.splitlines() if line.startswith("| ")]
    printed_lines = paper_table().splitlines()
    assert shown, "the page shows a part of the table"
    assert all(line in printed_lines for line in shown)


@pytest.mark.parametrize(
    ("model", "sync_every", "printed"),
    [
        ("10B", 50, (3.0, 11.0, 23.3, 41.0, 126.5)),
        ("10B", 100, (1.4, 6.2, 13.3, 23.3, 86.8)),
        ("Llama 405B", 10, (19.3, 72.0, 126.5, 184.2, 268.3)),
        ("Llama 405B", 50, (3.6, 13.3, 28.1, 59.6, 184.2)),
        ("Llama 405B", 100, (2.0, 7.5, 16.0, 33.9, 126.5)),
        ("DeepSeek-V3", 10, (49.4, 152.6, 268.3, 390.7, 686.6)),
        ("DeepSeek-V3", 50, (7.5, 33.9, 72.0, 126.5, 390.7)),
        ("DeepSeek-V3", 100, (4.3, 16.0, 41.0, 72.0, 268.3)),
    ],
)
def test_the_other_papers_diloco_is_at_most_two_points_of_the_grid_lower(
    model: str, sync_every: int, printed: tuple[float, ...]
) -> None:
    """At 10B it also contradicts Table 4."""
    method = METHODS["DiLoCo"]._replace(sync_every=sync_every)
    found = bandwidths(MODELS[model], method)
    points = np.log(np.divide(found, printed)) / np.log(GRID[1] / GRID[0])
    assert set(points.round()) <= {0, 1, 2}
    assert sync_every != 10 or not points.any()


def test_more_bandwidth_fewer_bits_and_overlap_never_cost_utilization() -> None:
    model = MODELS["1B"]
    rates = GRID * 1e9
    for method in PAPER_METHODS:
        reached = utilization(model, method, rates)
        assert ((reached > 0) & (reached <= 1)).all()
        assert (np.diff(reached) >= 0).all()
        halved = method._replace(bits=method.bits / 2)
        assert utilization(model, halved, rates) == pytest.approx(
            utilization(model, method, 2 * rates)
        )
    overlapped = STREAMING._replace(delay=1)
    gained = utilization(model, overlapped, rates) - utilization(model, STREAMING, rates)
    assert (gained >= 0).all()
