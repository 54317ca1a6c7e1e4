"""Flavors of Llama 3: two small ones, and shapes as published."""

from dataclasses import dataclass

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.decoder import Shape, resolve_shape

NORM_EPSILON = 1e-5
SHORT_LENGTH, LOW, HIGH = 8192, 1.0, 4.0
"""Rotary scaling: length before it, and the numbers of turns within it below and above which a
frequency is low and high."""


@dataclass(frozen=True)
class LlamaShape(Shape):
    """Dimensions of a Llama, and what else tells one from another. Fields are named as settings."""

    kv_heads: int
    tied_head: bool = True
    rotary_scaling: float = 1.0
    rotary_base: float = 500_000.0

    def __str__(self) -> str:
        return f"{super().__str__()}, KV heads: {self.kv_heads}"


FLAVORS: dict[str, LlamaShape] = {
    "debug": LlamaShape(4, 96, 3, 32, 256, kv_heads=1, tied_head=False),
    "15m": LlamaShape(6, 288, 6, 48, 768, kv_heads=2),
    "100m": LlamaShape(12, 768, 12, 64, 2048, kv_heads=4),
    "1b": LlamaShape(16, 2048, 32, 64, 8192, kv_heads=8, rotary_scaling=32.0),
    "3b": LlamaShape(28, 3072, 24, 128, 8192, kv_heads=8, rotary_scaling=32.0),
    "8b": LlamaShape(32, 4096, 32, 128, 14336, kv_heads=8, rotary_scaling=8.0, tied_head=False),
}


def llama_shape(model: Model) -> LlamaShape:
    shape = resolve_shape(FLAVORS, model)
    if shape.heads % shape.kv_heads:
        raise ValueError(
            f"model.kv_heads = {shape.kv_heads} does not divide model.heads = {shape.heads}: each "
            "head of keys and values is for the same number of heads of queries"
        )
    if shape.head_dim % 2:
        raise ValueError(
            f"model.head_dim = {shape.head_dim} is odd, but rotary positions rotate pairs of "
            "dimensions: make it even"
        )
    return shape
