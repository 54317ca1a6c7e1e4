"""The model of compute utilisation of Streaming DiLoCo's paper (arXiv 2501.18512, section 3 and Table 4), as it is there.

A step is a chain of nodes: forward, backward to the activations and backward to the parameters of every layer, each T / 3L
long (the first layer needs no backward to the activations). What is exchanged is spread evenly over the layers; there is no
embedding, no latency, no coding, and the number of workers does not matter. A layer's reduction is queued on one serial link
when its backward to the parameters in the step of the exchange has ended, and the layer's forward pass waits for it: in the
next step, or `delay` steps later. Utilisation is the time of compute / the time until compute and link are done.

`prediction.py` is the model for real runs. This one is for comparison with the paper, and the two are never mixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

STEPS = 200
BF16_BITS, FP4_BITS = 16.0, 4.0


@dataclass(frozen=True)
class PaperModel:
    name: str
    layers: int
    parameters: float
    step_seconds: float


@dataclass(frozen=True)
class PaperMethod:
    name: str
    sync_every: int
    bits: float
    """On the wire, a parameter."""
    delay: int = 0
    layers_per_fragment: int = 0
    """Strided; 0: the whole model at once."""

    def fragments(self, layers: int) -> int:
        return -(-layers // self.layers_per_fragment) if self.layers_per_fragment else 1

    def offset(self, fragment: int, fragments: int) -> int:
        """The paper's cadence leaves one more turn free, that of the embedding, which its model does not send."""
        return fragment * (self.sync_every // (fragments + 1)) if self.layers_per_fragment else 0


def paper_methods(sync_every: int = 100) -> tuple[PaperMethod, ...]:
    """The rows of the paper's table. Data parallelism is the exchange of everything after every step."""
    streaming = PaperMethod("streaming", sync_every, BF16_BITS, layers_per_fragment=3)
    return (
        PaperMethod("data parallel", 1, BF16_BITS),
        PaperMethod("DiLoCo", sync_every, BF16_BITS),
        streaming,
        replace(streaming, name="streaming overlapped", delay=1),
        replace(streaming, name="streaming overlapped FP4", delay=1, bits=FP4_BITS),
    )


def utilisation(
    model: PaperModel, method: PaperMethod, bits_per_second: Sequence[float] | Array
) -> Array:
    """Of each of the bandwidths: share of the time in which the accelerator computes."""
    link_rates = np.asarray(bits_per_second, dtype=np.float64)
    node = model.step_seconds / (3 * model.layers)
    reduction = model.parameters * method.bits / model.layers / link_rates
    fragments = method.fragments(model.layers)
    offsets = [method.offset(fragment, fragments) for fragment in range(fragments)]

    now, link_free = np.zeros_like(link_rates), np.zeros_like(link_rates)
    arrivals: dict[
        tuple[int, int], Array
    ] = {}  # (step, layer) whose forward pass waits -> when the reduction is there
    for step in range(1, STEPS + 1):
        for layer in range(model.layers):
            if (step, layer) in arrivals:
                now = np.maximum(now, arrivals.pop((step, layer)))
            now = now + node
        for layer in reversed(range(model.layers)):
            now = now + (node if layer == 0 else 2 * node)
            if (step - offsets[layer % fragments]) % method.sync_every == 0:
                link_free = np.maximum(link_free, now) + reduction
                arrivals[step + 1 + method.delay, layer] = link_free
    computing = STEPS * (3 * model.layers - 1) * node
    return np.asarray(computing / np.maximum(now, link_free))
