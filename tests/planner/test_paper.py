"""The paper's model against its printed Table 4 (arXiv 2501.18512)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.planner.paper import (
    GRID,
    PAPER_MODELS,
    TARGETS,
    PaperModel,
    bandwidths,
    paper_methods,
    paper_table,
    utilisation,
)

PRINTED = {
    "1B, 24 layers, 0.1 s a step": {
        "data parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
        "streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
        "streaming overlapped": (1.4, 4.3, 6.2, 9.1, 11.0),
        "streaming overlapped FP4": (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    "10B, 48 layers, 0.8 s a step": {
        "data parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
        "DiLoCo": (1.7, 7.5, 16.0, 33.9, 104.8),
        "streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
        "streaming overlapped": (1.7, 3.6, 5.2, 6.2, 7.5),
        "streaming overlapped FP4": (0.4, 0.9, 1.4, 1.4, 1.7),
    },
}


def test_every_cell_of_the_papers_table() -> None:
    """Exact but for two cells, which are the next point of the grid."""
    off = [
        (model.name, method.name, target, ours, printed)
        for model in PAPER_MODELS
        for method in paper_methods()
        for target, printed, ours in zip(
            TARGETS, PRINTED[model.name][method.name], bandwidths(model, method), strict=True
        )
        if ours != printed
    ]
    ten = "10B, 48 layers, 0.8 s a step"
    assert off == [
        ("1B, 24 layers, 0.1 s a step", "streaming overlapped FP4", 0.5, 0.3, 0.4),
        (ten, "streaming overlapped", 0.5, 1.4, 1.7),
    ]
    assert f"| {ten} | streaming overlapped     | 1.4   | 3.6   |" in paper_table()


@given(st.integers(1, 12), st.integers(2, 120), st.floats(1e6, 1e11), st.floats(0.01, 10.0))
def test_bandwidth_overlap_and_fewer_bits_never_hurt(
    layers: int, sync_every: int, parameters: float, seconds: float
) -> None:
    model = PaperModel("any", layers, parameters, seconds)
    rates = np.array([*(GRID[::7] * 1e9), 1e30])
    found = [utilisation(model, method, rates) for method in paper_methods(sync_every)]
    for reached in found:
        assert (np.diff(reached) >= 0).all()
        assert 0 < reached[0] <= reached[-1] == pytest.approx(1.0)
    _, _, streaming, overlapped, four_bits = found
    assert (overlapped >= streaming - 1e-9).all()
    assert (four_bits >= overlapped - 1e-9).all()
