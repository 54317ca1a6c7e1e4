"""The compute-utilisation model and Table 4 of Streaming DiLoCo's paper (arXiv 2501.18512).

A step is a chain of nodes: forward, backward to activations and backward to parameters of every
layer, each T / 3L long (the first layer needs no backward to activations). The exchange is spread
evenly over the layers; there is no embedding, no latency and no coding. A layer's reduction is
queued on one serial link when its backward to parameters ends in the step of the exchange, and the
layer's forward pass waits for it in the next step, or `delay` steps later.

`prediction.py` is the model for real runs, and independent of this one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.utils import markdown_table

Array = npt.NDArray[np.float64]

STEPS = 200
TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
GRID: Array = 10.0 ** (-1 + 4 * np.arange(-49, 98) / 49)
"""Gbit/s: the 50 points of the paper's table, and as many below and above for other models."""


class PaperModel(NamedTuple):
    name: str
    layers: int
    parameters: float
    step_seconds: float


class PaperMethod(NamedTuple):
    name: str
    sync_every: int
    bits: float = 16.0
    """Bits per parameter on the wire."""
    delay: int = 0
    layers_per_fragment: int = 0
    """Layers of a strided fragment, or 0 for the whole model."""


PAPER_MODELS = (
    PaperModel("1B, 24 layers, 0.1 s a step", layers=24, parameters=1e9, step_seconds=0.1),
    PaperModel("10B, 48 layers, 0.8 s a step", layers=48, parameters=10e9, step_seconds=0.8),
)


def paper_methods(sync_every: int = 100) -> tuple[PaperMethod, ...]:
    """Return the rows of the table. Data parallelism exchanges everything after every step."""
    streaming = PaperMethod("streaming", sync_every, layers_per_fragment=3)
    return (
        PaperMethod("data parallel", 1),
        PaperMethod("DiLoCo", sync_every),
        streaming,
        streaming._replace(name="streaming overlapped", delay=1),
        streaming._replace(name="streaming overlapped FP4", delay=1, bits=4.0),
    )


def utilisation(
    model: PaperModel, method: PaperMethod, bits_per_second: Sequence[float] | Array
) -> Array:
    """Return the share of the time that is compute, at each bandwidth."""
    rates = np.asarray(bits_per_second, dtype=np.float64)
    node = model.step_seconds / (3 * model.layers)
    reduction = model.parameters * method.bits / model.layers / rates
    per_fragment = method.layers_per_fragment or model.layers
    fragments = -(-model.layers // per_fragment)
    # One turn is free: that of the embedding, which the paper's model does not send.
    turn = method.sync_every // (fragments + 1) if method.layers_per_fragment else 0

    now, link_free = np.zeros_like(rates), np.zeros_like(rates)
    arrivals: dict[tuple[int, int], Array] = {}  # (step, layer) that waits -> arrival
    for step in range(1, STEPS + 1):
        for layer in range(model.layers):
            if (step, layer) in arrivals:
                now = np.maximum(now, arrivals.pop((step, layer)))
            now = now + node
        for layer in reversed(range(model.layers)):
            now = now + (node if layer == 0 else 2 * node)
            if (step - layer % fragments * turn) % method.sync_every == 0:
                link_free = np.maximum(link_free, now) + reduction
                arrivals[step + 1 + method.delay, layer] = link_free
    computing = STEPS * (3 * model.layers - 1) * node
    return np.asarray(computing / np.maximum(now, link_free))


def bandwidths(model: PaperModel, method: PaperMethod) -> list[float]:
    """Return Gbit/s for each target: the last grid point below it, as in the paper.

    If the first point reaches the target, return the first point.
    """
    reached = utilisation(model, method, GRID * 1e9)
    return [float(GRID[reached < target].max(initial=GRID[0])) for target in TARGETS]


def as_printed(gbits: float) -> float:
    """Round twice, as the paper does."""
    return round(round(gbits, 2), 1)


def paper_table(models: Sequence[PaperModel] = PAPER_MODELS, sync_every: int = 100) -> str:
    """Return the table in Markdown, in Gbit/s, with three digits for other models."""

    def cell(gbits: float) -> str:
        side = "<= " if gbits <= GRID[0] else ">= " if gbits >= GRID[-1] else ""
        return f"{as_printed(gbits):.1f}" if models is PAPER_MODELS else f"{side}{gbits:.3g}"

    columns = ["model", "method", *(f"{100 * target:.0f} %" for target in TARGETS)]
    rows = []
    for model in models:
        for number, method in enumerate(paper_methods(sync_every)):
            cells = map(cell, bandwidths(model, method))
            rows.append(["" if number else model.name, method.name, *cells])
    return markdown_table(columns, rows)
