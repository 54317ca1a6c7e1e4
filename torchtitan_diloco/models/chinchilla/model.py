"""A Chinchilla-style decoder on one device. Whatever is parallel about it is applied from outside (parallelize.py)."""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.chinchilla.flavors import Shape, resolve_shape

Rotary = tuple[Tensor, Tensor]
Head = Callable[[Tensor, Tensor], Any]
"""What is made of the last hidden states [batch, length, width] and the output matrix [vocabulary, width]."""

EMBEDDING_STD = 0.02


def build_norm(kind: str, width: int) -> nn.Module:
    return (
        nn.RMSNorm(width, eps=1e-6)
        if kind == "rmsnorm"
        else nn.LayerNorm(width, eps=1e-6, bias=False)
    )


def rotary_table(length: int, head_dim: int, base: float, device: torch.device) -> Rotary:
    """Cosine and sine of every position's angles, [length, head_dim], in fp32."""
    frequencies = base ** (
        -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    )
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turns each pair (i, i + head_dim/2) of x [batch, heads, length, head_dim] by its position's angle."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
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


class GeluFeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class SwigluFeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape, config: Model) -> None:
        super().__init__()
        self.attention_norm = build_norm(config.norm, shape.width)
        self.attention = Attention(shape, config)
        self.feed_forward_norm = build_norm(config.norm, shape.width)
        self.feed_forward = (
            GeluFeedForward(shape) if config.activation == "gelu" else SwigluFeedForward(shape)
        )

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Decoder(nn.Module):
    """Tokens [batch, length] -> logits, or whatever `head` makes of the last hidden states and the tied embedding."""

    def __init__(self, config: Model, vocab_size: int, sequence_length: int) -> None:
        super().__init__()
        self.config, self.shape = config, resolve_shape(config)
        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        self.embedding = nn.Embedding(vocab_size, self.shape.width)
        self.positions = (
            nn.Embedding(sequence_length, self.shape.width)
            if config.positions == "learned"
            else None
        )
        self.blocks = nn.ModuleList(Block(self.shape, config) for _ in range(self.shape.layers))
        self.norm = build_norm(config.norm, self.shape.width)
        self._rotary: Rotary | None = None

    def forward(self, tokens: Tensor, head: Head = F.linear) -> Any:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        rotary = self._rotary_for(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        return head(self.norm(x), self.embedding.weight)

    def _rotary_for(self, tokens: Tensor) -> Rotary | None:
        """The table of angles, kept from one forward pass to the next."""
        if self.config.positions != "rotary":
            return None
        length = tokens.shape[1]
        if (
            self._rotary is None
            or self._rotary[0].shape[0] < length
            or self._rotary[0].device != tokens.device
        ):
            with torch.inference_mode(False):
                self._rotary = rotary_table(
                    length, self.shape.head_dim, self.config.rotary_base, tokens.device
                )
        cos, sin = self._rotary
        return cos[:length], sin[:length]

    @torch.no_grad()
    def init_weights(
        self, seed: int, write: Callable[[Tensor, Tensor], Any] = Tensor.copy_
    ) -> None:
        """Initial values, a function of the seed and the parameter's name alone: not of the order of the parameters
        and not of how they are sharded. `write(parameter, value)` stores a value."""
        for name, parameter in self.named_parameters():
            device = parameter.device
            if parameter.dim() == 1:
                write(parameter, torch.ones(parameter.shape, device=device))
            else:
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator(device).manual_seed(
                    int.from_bytes(digest[:8], "little") >> 1
                )
                value = torch.empty(parameter.shape, device=device)
                write(
                    parameter,
                    value.normal_(0.0, self._init_std(name, parameter), generator=generator),
                )

    def _init_std(self, name: str, parameter: Tensor) -> float:
        if name.startswith(("embedding", "positions")):
            return EMBEDDING_STD
        std = 1 / math.sqrt(parameter.shape[1])
        adds_to_residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
        return std / math.sqrt(2 * self.shape.layers) if adds_to_residual else std

    def parameter_counts(self) -> dict[str, int]:
        """Parameters in all, and those of the embeddings (the tied output matrix is counted once)."""
        total = sum(parameter.numel() for parameter in self.parameters())
        return {
            "total": total,
            "embedding": self.embedding.weight.numel() + self._position_parameters(),
        }

    def flops_per_token(self, length: int) -> int:
        """Floating-point operations of one token's forward and backward pass: 6 a weight in a matrix product, and
        12 x layers x heads x head_dim x length for attention, as PaLM counts (the causal mask saves nothing)."""
        weights = (
            sum(parameter.numel() for parameter in self.parameters()) - self._position_parameters()
        )
        shape = self.shape
        return 6 * weights + 12 * shape.layers * shape.heads * shape.head_dim * length

    def _position_parameters(self) -> int:
        return 0 if self.positions is None else self.positions.weight.numel()
