"""A Chinchilla-style decoder."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.base import Head, LanguageModel
from torchtitan_diloco.models.chinchilla.flavors import Shape, resolve_shape

Rotary = tuple[Tensor, Tensor]

EMBEDDING_STD = 0.02


def build_norm(kind: str, width: int) -> nn.Module:
    if kind == "rmsnorm":
        return nn.RMSNorm(width, eps=1e-6)
    return nn.LayerNorm(width, eps=1e-6, bias=False)


def rotary_table(length: int, head_dim: int, base: float, device: torch.device) -> Rotary:
    """Return the cosine and sine of every position's angles, fp32 [length, head_dim]."""
    exponents = -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, base**exponents).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each pair (i, i + head_dim/2) of x [batch, heads, length, head_dim] by its angle."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


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


class FeedForward(nn.Module):
    """Two matrices with GELU between them, or three with SwiGLU."""

    def __init__(self, shape: Shape, config: Model) -> None:
        super().__init__()
        self.gate: nn.Linear | None = None
        if config.activation == "swiglu":
            self.gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            inner = F.gelu(self.up(x), approximate="tanh")
        else:
            inner = F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(inner)
        return out


class Block(nn.Module):
    """Attention and feed-forward layer, each with a norm before it and added to its input."""

    def __init__(self, shape: Shape, config: Model) -> None:
        super().__init__()
        self.attention_norm = build_norm(config.norm, shape.width)
        self.attention = Attention(shape, config)
        self.feed_forward_norm = build_norm(config.norm, shape.width)
        self.feed_forward = FeedForward(shape, config)

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Decoder(LanguageModel):
    """Decoder with tied embeddings."""

    def __init__(self, config: Model, vocab_size: int, sequence_length: int) -> None:
        super().__init__(config, vocab_size, sequence_length)
        self.shape: Shape = resolve_shape(config)
        self.embedding = nn.Embedding(vocab_size, self.shape.width)
        self.positions: nn.Embedding | None = None
        if config.positions == "learned":
            self.positions = nn.Embedding(sequence_length, self.shape.width)
        self.blocks = nn.ModuleList(Block(self.shape, config) for _ in range(self.shape.layers))
        self.norm = build_norm(config.norm, self.shape.width)

    def forward(self, tokens: Tensor, head: Head = F.linear) -> Any:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        rotary = None
        if self.positions is None:
            length, head_dim = tokens.shape[1], self.shape.head_dim
            rotary = rotary_table(length, head_dim, self.config.rotary_base, tokens.device)
        for block in self.blocks:
            x = block(x, rotary)
        return head(self.norm(x), self.embedding.weight)

    def initial_std(self, name: str, parameter: Tensor) -> float:
        if name.startswith(("embedding", "positions")):
            return EMBEDDING_STD
        std = 1 / math.sqrt(parameter.shape[1])
        adds_to_residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
        return std / math.sqrt(2 * self.shape.layers) if adds_to_residual else std

    def parameter_counts(self) -> dict[str, int]:
        total = sum(parameter.numel() for parameter in self.parameters())  # the tied matrix once
        embedding = self.embedding.weight.numel() + self._position_parameters()
        return {"total": total, "embedding": embedding}

    def flops_per_token(self, length: int) -> int:
        weights = self.parameter_counts()["total"] - self._position_parameters()
        shape = self.shape
        return 6 * weights + 12 * shape.layers * shape.heads * shape.head_dim * length

    def _position_parameters(self) -> int:
        return 0 if self.positions is None else self.positions.weight.numel()
