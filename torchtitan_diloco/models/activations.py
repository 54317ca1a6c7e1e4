"""Estimate of the memory of activations, before a model is allocated."""

from torch import nn

from torchtitan_diloco.config.schema import ActivationCheckpoint
from torchtitan_diloco.models.decoder import Shape


def activation_bytes(
    model: nn.Module, tokens: int, element_bytes: int, checkpoint: ActivationCheckpoint
) -> int:
    """Return about how many bytes a forward pass keeps for the backward pass, without compilation.
    0 if the model is not the decoder of this package.

    `tokens`: of one micro-batch. `element_bytes`: of the dtype of matrix products.
    """
    shape = getattr(model, "shape", None)
    if not isinstance(shape, Shape):
        return 0
    blocks = sum(_elements_of_block(shape, index, checkpoint) for index in range(shape.layers))
    around = 3 * shape.width  # the last norm, and the gradient of what it returns
    return element_bytes * tokens * (blocks + around)


def _elements_of_block(shape: Shape, index: int, checkpoint: ActivationCheckpoint) -> int:
    """Return the elements that a block keeps for each token."""
    mode = checkpoint.mode
    width = shape.width
    queries = shape.heads * shape.head_dim
    keys = (shape.kv_heads or shape.heads) * shape.head_dim
    is_gated = shape.activation == "swiglu"
    is_recomputed = mode == "every_nth" and index % checkpoint.every == 0
    if mode == "full" or is_recomputed:
        return width
    if mode == "selective":
        inner = [shape.feed_forward] * (2 if is_gated else 1)
        products = [queries + 2 * keys, width, *inner, width]
        kept_sizes = [
            size for number, size in enumerate(products, start=1) if number % checkpoint.every
        ]
        return width + queries + sum(kept_sizes)
    # The inputs, factors and results of two norms; of the projections, rotations and attention; and
    # of the feed-forward layer.
    attention = 5 * queries + 4 * keys
    if not shape.qk_norm:
        attention -= 3 * (queries + keys) // 2
    return 6 * width + attention + (4 if is_gated else 2) * shape.feed_forward
