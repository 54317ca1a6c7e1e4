"""The paper's model against its printed Table 4 (arXiv 2501.18512)."""

from torchtitan_diloco.planner.paper import (
    PAPER_METHODS,
    PAPER_MODELS,
    TARGETS,
    bandwidths,
    paper_table,
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
        for method in PAPER_METHODS
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
