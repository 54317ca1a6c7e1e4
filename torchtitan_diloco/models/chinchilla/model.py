"""A Chinchilla-style decoder."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.base import Head
from torchtitan_diloco.models.chinchilla.flavors import chinchilla_shape
from torchtitan_diloco.models.decoder import (
    Block,
    DecoderBase,
    FeedForward,
    Rotary,
    Shape,
    rotary_table,
    rotate,
)

ROTARY_BASE = 10_000.0


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


def build_block(shape: Shape, config: Model) -> Block:
    return Block(
        build_norm(config.norm, shape.width),
        Attention(shape, config),
        build_norm(config.norm, shape.width),
        FeedForward(shape, gated=config.activation == "swiglu"),
    )


class Decoder(DecoderBase):
    """Decoder with tied embeddings."""

    def __init__(self, config: Model, vocab_size: int, sequence_length: int) -> None:
        super().__init__(config, vocab_size, sequence_length)
        self.shape = shape = chinchilla_shape(config)
        self.rotary_base = config.rotary_base or ROTARY_BASE
        self.embedding = nn.Embedding(vocab_size, shape.width)
        if config.positions == "learned":
            self.positions = nn.Embedding(sequence_length, shape.width)
        self.blocks = nn.ModuleList(build_block(shape, config) for _ in range(shape.layers))
        self.norm = build_norm(config.norm, shape.width)

    def forward(self, tokens: Tensor, head: Head = F.linear) -> Any:
        x = self.embedding(tokens)
        rotary = None
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        else:
            head_dim, device = self.shape.head_dim, tokens.device
            exponents = -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
            rotary = rotary_table(tokens.shape[1], self.rotary_base**exponents)
        for block in self.blocks:
            x = block(x, rotary)
        return head(self.norm(x), self.embedding.weight)

    def to_transformers(self) -> Any:
        """Return the model in the code that is saved beside it: transformers does not know it."""
        from torchtitan_diloco.models.chinchilla import modeling_chinchilla as remote_code

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
