"""The interface of a model family, and the parts that decoders share."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_diloco.config.schema import Model

Head = Callable[[Tensor, Tensor], Any]
"""Called with the last hidden states [batch, length, width] and the output matrix [vocabulary,
width]."""


class LanguageModel(nn.Module, ABC):
    """Decoder for a single device. parallelize.py applies parallelism."""

    shape: object
    """Dimensions, for the log."""
    blocks: nn.ModuleList
    """Equal units of sharding, activation checkpointing, compilation and fragments."""

    def __init__(self, config: Model, vocab_size: int, sequence_length: int) -> None:
        super().__init__()
        self.config, self.vocab_size, self.sequence_length = config, vocab_size, sequence_length

    @abstractmethod
    def forward(self, tokens: Tensor, head: Head = F.linear) -> Any:
        """Return `head(hidden, output_matrix)` of tokens [batch, length], by default the logits."""

    @abstractmethod
    def initial_std(self, name: str, parameter: Tensor) -> float:
        """Return the standard deviation of the initial values of a matrix. Vectors start at 1."""

    @abstractmethod
    def parameter_counts(self) -> dict[str, int]:
        """Return the number of parameters: "total", and "embedding" for those in embeddings."""

    @abstractmethod
    def flops_per_token(self, length: int) -> int:
        """Return the FLOPs of a token's forward and backward pass, counted as in PaLM: 6 per weight
        in a matrix product and 12 x layers x heads x head_dim x length for attention."""

    def to_transformers(self) -> Any:
        """Convert to a model of transformers with the same parameters."""
        raise ValueError(
            f'--format hf: model.name = "{self.config.name}" has no form in transformers: use '
            "--format safetensors"
        )

    def transformers_names(self) -> dict[str, str]:
        """Map the name of each parameter to its name in files of transformers."""
        return {name: name for name, _ in self.named_parameters()}

    def differing_settings(self, _config: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the settings of [model] that differ in a config.json of this family, with their
        values there."""
        return {}

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize each parameter from the seed and its name only, so that the order of the
        parameters and their sharding do not matter."""
        for name, parameter in self.named_parameters():
            value = torch.ones(parameter.shape, device=parameter.device)
            if parameter.dim() > 1:
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator(parameter.device)
                generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                value.normal_(0.0, self.initial_std(name, parameter), generator=generator)
            copy_shard(parameter, value)


def copy_shard(parameter: Tensor, value: Tensor) -> None:
    """Copy this rank's shard of a value that all ranks have in full, without communication."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    parameter.copy_(value)


# --- decoders -------------------------------------------------------------------------------------

EMBEDDING_STD = 0.02

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder."""

    layers: int
    width: int
    heads: int
    head_dim: int
    feed_forward: int

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x {self.width}, {self.heads} heads of {self.head_dim}, "
            f"feed-forward {self.feed_forward}"
        )


AnyShape = TypeVar("AnyShape", bound=Shape)


def resolve_shape(flavors: Mapping[str, AnyShape], model: Model) -> AnyShape:
    """Return the shape of the flavor, with the dimensions that the config overrides."""
    flavor = flavors[model.flavor]
    chosen = {field.name: getattr(model, field.name) for field in fields(flavor)}
    return replace(flavor, **{key: value for key, value in chosen.items() if value is not None})


def rotary_table(length: int, frequencies: Tensor) -> Rotary:
    """Return the cosines and sines of the angles of all positions, fp32 [length, head_dim]."""
    positions = torch.arange(length, device=frequencies.device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each pair (i, i + head_dim/2) of x [batch, heads, length, head_dim] by its angle."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class FeedForward(nn.Module):
    """Two matrices with GELU, or three with SwiGLU."""

    def __init__(self, shape: Shape, *, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.feed_forward, bias=False) if gated else None
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
    """Attention and feed-forward layer with pre-norms and residual connections."""

    def __init__(
        self, build_norm: Callable[[], nn.Module], attention: nn.Module, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = build_norm(), attention
        self.feed_forward_norm, self.feed_forward = build_norm(), feed_forward

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class DecoderBase(LanguageModel):
    """Embedding, blocks, norm and head. Families add their norms and attention."""

    shape: Shape

    def __init__(
        self,
        config: Model,
        vocab_size: int,
        sequence_length: int,
        shape: Shape,
        *,
        gated: bool = True,
        learned_positions: bool = False,
        tied_head: bool = True,
    ) -> None:
        super().__init__(config, vocab_size, sequence_length)
        self.shape = shape
        self.embedding = nn.Embedding(vocab_size, shape.width)
        self.positions = nn.Embedding(sequence_length, shape.width) if learned_positions else None
        self.blocks = nn.ModuleList(
            Block(self.build_norm, self.build_attention(), FeedForward(shape, gated=gated))
            for _ in range(shape.layers)
        )
        self.norm = self.build_norm()
        self.head = None if tied_head else nn.Linear(shape.width, vocab_size, bias=False)

    @abstractmethod
    def build_norm(self) -> nn.Module:
        """Build a norm of the residual stream."""

    @abstractmethod
    def build_attention(self) -> nn.Module:
        """Build a layer with forward(x [batch, length, width], rotary)."""

    @abstractmethod
    def rotary_frequencies(self, device: torch.device) -> Tensor:
        """Return the rotation per position of each pair of dimensions, fp32 [head_dim / 2]."""

    def forward(self, tokens: Tensor, head: Head = F.linear) -> Any:
        x, rotary = self.embedding(tokens), None
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        else:
            rotary = rotary_table(tokens.shape[1], self.rotary_frequencies(tokens.device))
        for block in self.blocks:
            x = block(x, rotary)
        output = self.embedding if self.head is None else self.head
        return head(self.norm(x), output.weight)

    def initial_std(self, name: str, parameter: Tensor) -> float:
        if name.startswith(("embedding", "positions", "head")):
            return EMBEDDING_STD
        std = 1 / math.sqrt(parameter.shape[1])
        adds_to_residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
        return std / math.sqrt(2 * self.shape.layers) if adds_to_residual else std

    def parameter_counts(self) -> dict[str, int]:
        total = sum(parameter.numel() for parameter in self.parameters())
        embedding = sum(map(_size, (self.embedding, self.positions, self.head)))
        return {"total": total, "embedding": embedding}

    def flops_per_token(self, length: int) -> int:
        weights = self.parameter_counts()["total"] - _size(self.positions)
        if self.head is not None:
            weights -= _size(self.embedding)
        shape = self.shape
        return 6 * weights + 12 * shape.layers * shape.heads * shape.head_dim * length


def _size(module: nn.Embedding | nn.Linear | None) -> int:
    return 0 if module is None else module.weight.numel()
