"""Flavors of the decoder: the shapes in the papers' tables."""

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.decoder import Shape, resolve_shape


def _streaming(layers: int, heads: int, width: int) -> Shape:
    """Return a shape of the Streaming DiLoCo papers: heads of 64, feed-forward four times as
    wide."""
    return Shape(layers, width, heads, head_dim=64, feed_forward=4 * width)


FLAVORS: dict[str, Shape] = {
    "debug": Shape(layers=4, width=96, heads=3, head_dim=32, feed_forward=384),
    # Streaming DiLoCo (arXiv 2501.18512); 2.4b and 10b are of the scaling laws (2503.09799)
    "35m": _streaming(6, 8, 512),
    "100m": _streaming(9, 12, 768),
    "200m": _streaming(12, 16, 1024),
    "300m": _streaming(15, 20, 1280),
    "500m": _streaming(18, 24, 1536),
    "1b": _streaming(24, 32, 2048),
    "2.4b": _streaming(30, 40, 2560),
    "4b": _streaming(36, 48, 3072),
    "10b": _streaming(48, 64, 4096),
    # DiLoCo (2311.08105)
    "diloco-60m": Shape(layers=3, width=896, heads=16, head_dim=64, feed_forward=3584),
    "diloco-150m": Shape(layers=12, width=896, heads=16, head_dim=64, feed_forward=3584),
    "diloco-400m": Shape(layers=12, width=1536, heads=12, head_dim=128, feed_forward=6144),
}


def chinchilla_shape(model: Model) -> Shape:
    shape = resolve_shape(FLAVORS, model)
    if model.positions == "rotary" and shape.head_dim % 2:
        raise ValueError(
            f"model.head_dim = {shape.head_dim} is odd, but rotary positions rotate pairs of "
            'dimensions: make it even, or set model.positions = "learned"'
        )
    return shape
