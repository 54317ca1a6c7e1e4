"""Chinchilla-style decoder, in the shapes of the papers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.base import DecoderBase, Rotary, Shape, resolve_shape, rotate

ROTARY_BASE = 10_000.0


def _streaming(layers: int, heads: int, width: int) -> Shape:
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


def build_norm(kind: str, width: int) -> nn.Module:
    if kind == "rmsnorm":
        return nn.RMSNorm(width, eps=1e-6)
    return nn.LayerNorm(width, eps=1e-6, bias=False)


class Attention(nn.Module):
    """Causal self-attention, with normalized queries and keys if `qk_norm` is set."""

    def __init__(self, shape: Shape, config: Model) -> None:
        super().__init__()
        self.heads, self.head_dim = shape.heads, shape.head_dim
        inner = shape.heads * shape.head_dim
        self.qkv = nn.Linear(shape.width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, shape.width, bias=False)
        self.q_norm = build_norm(config.norm, shape.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = build_norm(config.norm, shape.head_dim) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, length, head_dim]
        q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Decoder(DecoderBase):
    """Decoder with tied embeddings."""

    def __init__(self, config: Model, vocab_size: int, sequence_length: int) -> None:
        shape, learned = resolve_shape(FLAVORS, config), config.positions == "learned"
        if shape.head_dim % 2 and not learned:
            raise ValueError(
                f"model.head_dim = {shape.head_dim} is odd, but rotary positions rotate pairs of "
                'dimensions: make it even, or set model.positions = "learned"'
            )
        super().__init__(
            config,
            vocab_size,
            sequence_length,
            shape,
            gated=config.activation == "swiglu",
            learned_positions=learned,
        )
        self.rotary_base = config.rotary_base or ROTARY_BASE

    def build_norm(self) -> nn.Module:
        return build_norm(self.config.norm, self.shape.width)

    def build_attention(self) -> Attention:
        return Attention(self.shape, self.config)

    def rotary_frequencies(self, device: torch.device) -> Tensor:
        head_dim = self.shape.head_dim
        exponents = -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        frequencies: Tensor = self.rotary_base**exponents
        return frequencies

    def to_transformers(self) -> Any:
        """Convert to the model of modeling_chinchilla.py, which is saved with the weights."""
        from torchtitan_diloco.models import modeling_chinchilla as remote_code

        shape, config = self.shape, self.config
        remote_config = remote_code.ChinchillaConfig(
            vocab_size=self.vocab_size,
            max_position_embeddings=self.sequence_length,
            num_hidden_layers=shape.layers,
            hidden_size=shape.width,
            num_attention_heads=shape.heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.feed_forward,
            norm=config.norm,
            qk_norm=config.qk_norm,
            positions=config.positions,
            rotary_base=self.rotary_base,
            activation=config.activation,
        )
        with torch.device("meta"):
            converted = remote_code.ChinchillaForCausalLM(remote_config)
        # The parameters have the same names there. Only lm_head, which is tied, is not among ours.
        converted.load_state_dict(self.state_dict(), strict=False, assign=True)
        converted.tie_weights()
        # `save_pretrained` then copies the source of the model.
        remote_code.ChinchillaConfig.register_for_auto_class()
        remote_code.ChinchillaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
        return converted
