"""The compute-utilisation model and Table 4 of Streaming DiLoCo's paper (arXiv 2501.18512).

A step is a chain of nodes: forward, backward to activations and backward to parameters of every
layer, each T / 3L long (the first layer needs no backward to activations). The exchange is spread
evenly over the layers; there is no embedding, no latency and no coding. A layer's reduction is
queued on one serial link when its backward to parameters ends in the step of the exchange, and the
layer's forward pass waits for it in the next step, or `delay` steps later. Real runs are predicted
by `prediction.py`, which is independent of this model.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.log import markdown_table

Array = npt.NDArray[np.float64]

SYNC_EVERY = 100
STEPS = 200
TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
GRID: Array = np.logspace(-1, 3, 50)
"""Gbit/s."""


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


STREAMING = PaperMethod("streaming", SYNC_EVERY, layers_per_fragment=3)
PAPER_METHODS = (
    PaperMethod("data parallel", 1),  # which exchanges everything after every step
    PaperMethod("DiLoCo", SYNC_EVERY),
    STREAMING,
    STREAMING._replace(name="streaming overlapped", delay=1),
    STREAMING._replace(name="streaming overlapped FP4", delay=1, bits=4.0),
)


def utilisation(model: PaperModel, method: PaperMethod, rates: Array) -> Array:
    """Return the share of the time that is compute, at each rate in bits per second."""
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
    return np.asarray(STEPS * (3 * model.layers - 1) * node / np.maximum(now, link_free))


def bandwidths(model: PaperModel, method: PaperMethod) -> list[float]:
    """Return Gbit/s for each target: the last grid point below it, rounded twice like theirs."""
    reached = utilisation(model, method, GRID * 1e9)
    found = [float(GRID[reached < target].max(initial=GRID[0])) for target in TARGETS]
    return [round(round(gbits, 2), 1) for gbits in found]


def paper_table() -> str:
    """Return the table in Markdown, in Gbit/s."""
    columns = ["model", "method", *(f"{100 * target:.0f} %" for target in TARGETS)]
    rows = [
        [model.name, method.name, *(f"{gbits:.1f}" for gbits in bandwidths(model, method))]
        for model in PAPER_MODELS
        for method in PAPER_METHODS
    ]
    return markdown_table(columns, rows)
