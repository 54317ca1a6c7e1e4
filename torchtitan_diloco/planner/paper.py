"""The compute-utilization model of Streaming DiLoCo's paper (arXiv 2501.18512), and its Table 4.

A step is a chain of nodes: the forward pass, the backward pass to activations and the backward pass
to parameters of every layer. Each takes T / 3L, and the first layer has no backward pass to
activations. The parameters are spread evenly over the layers; there is no embedding, no latency and
no coding. The reduction of a layer is queued on one serial link when its backward pass to
parameters ends in the step of the exchange, and the forward pass of this layer waits for it in the
next step, or `delay` steps later. `prediction` predicts real runs, and shares nothing with this
model.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.base.formatting import markdown_table

Array = npt.NDArray[np.float64]

SYNC_EVERY = 100
STEPS = 200
TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
GRID: Array = np.logspace(-1, 3, 50)
"""Bandwidths in Gbit/s."""


class PaperModel(NamedTuple):
    name: str
    layers: int
    parameters: float
    step_seconds: float
    """Compute of one step."""


class PaperMethod(NamedTuple):
    name: str
    sync_every: int
    bits: float = 16.0
    """Bits per parameter on the wire."""
    delay: int = 0
    layers_per_fragment: int = 0
    """Layers of a strided fragment, or 0 for the whole model."""


PAPER_MODELS = (
    PaperModel("1B", layers=24, parameters=1e9, step_seconds=0.1),
    PaperModel("10B", layers=48, parameters=10e9, step_seconds=0.8),
    PaperModel("100B", layers=108, parameters=100e9, step_seconds=4.9),
    PaperModel("Llama 405B", layers=126, parameters=405e9, step_seconds=26.9),
    PaperModel("DeepSeek-V3", layers=61, parameters=671e9, step_seconds=20.1),
)
STREAMING = PaperMethod("streaming", SYNC_EVERY, layers_per_fragment=3)
PAPER_METHODS = (
    PaperMethod("data parallel", sync_every=1),
    PaperMethod("DiLoCo", SYNC_EVERY),
    STREAMING,
    STREAMING._replace(name="streaming overlapped", delay=1),
    STREAMING._replace(name="streaming overlapped FP4", delay=1, bits=4.0),
)


def utilization(model: PaperModel, method: PaperMethod, rates: Array) -> Array:
    """Return the share of the time that is compute, at each rate in bits per second."""
    node = model.step_seconds / (3 * model.layers)
    reduction = model.parameters * method.bits / model.layers / rates
    layers_per_fragment = method.layers_per_fragment or model.layers
    fragments = -(-model.layers // layers_per_fragment)
    # One turn is free: that of the embedding, which the paper's model does not send.
    turn = method.sync_every // (fragments + 1) if method.layers_per_fragment else 0

    now = np.zeros_like(rates)
    link_free = np.zeros_like(rates)
    arrivals: dict[tuple[int, int], Array] = {}
    """(step, layer) whose forward pass waits -> when the reduction has arrived."""
    for step in range(1, STEPS + 1):
        for layer in range(model.layers):
            if (step, layer) in arrivals:
                now = np.maximum(now, arrivals.pop((step, layer)))
            now = now + node
        for layer in reversed(range(model.layers)):
            now = now + (node if layer == 0 else 2 * node)
            # Fragments are strided, and take their turns one after the other.
            fragment = layer % fragments
            if (step - fragment * turn) % method.sync_every == 0:
                link_free = np.maximum(link_free, now) + reduction
                arrivals[step + 1 + method.delay, layer] = link_free
    computed = STEPS * (3 * model.layers - 1) * node
    return np.asarray(computed / np.maximum(now, link_free))


def bandwidths(model: PaperModel, method: PaperMethod) -> list[float]:
    """Return the Gbit/s for each target as the paper prints them: the last point of the grid that
    is still below the target, rounded to two digits and then to one."""
    reached = utilization(model, method, GRID * 1e9)
    last_below = [float(GRID[reached < target].max(initial=GRID[0])) for target in TARGETS]
    return [round(round(gbits, 2), 1) for gbits in last_below]


def paper_table() -> str:
    """Return the table in Markdown. A "+" follows where the grid ends below the target."""
    shares = [f"{100 * target:.0f} %" for target in TARGETS]
    rows = []
    for model in PAPER_MODELS:
        for method in PAPER_METHODS:
            cells = [
                f"{gbits:.1f}" + ("+" if gbits == GRID[-1] else "")
                for gbits in bandwidths(model, method)
            ]
            step = f"{model.step_seconds:g} s"
            rows.append([model.name, str(model.layers), step, method.name, *cells])
    return markdown_table(["model", "layers", "step", "method", *shares], rows)
