"""The decoder: pre-norm, rotary positions, causal attention, and the options of its flavor."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.cache import BlockCache, KeyValueCache
from torchtitan_diloco.models.interface import STD, Head, parameter_counts

SHORT_LENGTH = 8192
"""Original length of the texts, for rotary scaling."""
LOW = 1.0
"""Turns within the original length below which a rotary frequency is low."""
HIGH = 4.0
"""Turns above which it is high."""

Rotary = tuple[Tensor, Tensor]
Mask = BlockMask | Tensor | None
"""What each token attends to. None: itself and all tokens before it."""


@dataclass(frozen=True)
class Shape:
    """Dimensions and options of a decoder, named like the settings that override them."""

    layers: int
    width: int
    heads: int
    head_dim: int
    feed_forward: int
    kv_heads: int = 0
    """0: as many as `heads`."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    qk_norm: bool = True
    tied_head: bool = True
    norm_epsilon: float = 1e-6
    rotary_base: float = 10_000.0
    rotary_scaling: float = 1.0

    def __str__(self) -> str:
        grouped = f" ({self.kv_heads} of keys and values)" if self.kv_heads else ""
        return (
            f"{self.layers} layers x {self.width}, {self.heads} heads of {self.head_dim}{grouped}, "
            f"{self.activation} {self.feed_forward}"
        )


SIZES = {
    "35m": (6, 512, 8),
    "100m": (9, 768, 12),
    "200m": (12, 1024, 16),
    "300m": (15, 1280, 20),
    "500m": (18, 1536, 24),
    "1b": (24, 2048, 32),
    "2.4b": (30, 2560, 40),
    "4b": (36, 3072, 48),
    "10b": (48, 4096, 64),
}
"""Layers, width and heads of Streaming DiLoCo (arXiv 2501.18512); 2.4b and 10b are of the scaling
laws (2503.09799)."""
LLAMA: dict[str, Any] = {"kv_heads": 8, "qk_norm": False, "norm_epsilon": 1e-5}
LLAMA |= {"rotary_base": 500_000.0}

SHAPES: dict[str, Shape] = {
    "debug": Shape(layers=4, width=96, heads=3, head_dim=32, feed_forward=256),
    # The three matrices of SwiGLU have as many parameters as the papers' two, rounded up.
    **{
        name: Shape(layers, width, heads, head_dim=64, feed_forward=-(-width // 48) * 128)
        for name, (layers, width, heads) in SIZES.items()
    },
    **{
        f"paper-{name}": Shape(
            layers, width, heads, head_dim=64, feed_forward=4 * width, activation="gelu"
        )
        for name, (layers, width, heads) in SIZES.items()
    },
    # A table: layers, width, heads, head_dim, feed_forward.
    # DiLoCo (2311.08105)
    "diloco-60m": Shape(3, 896, 16, 64, 3584, activation="gelu"),
    "diloco-150m": Shape(12, 896, 16, 64, 3584, activation="gelu"),
    "diloco-400m": Shape(12, 1536, 12, 128, 6144, activation="gelu"),
    # Llama 3.2 and 3.1, as published
    "llama-1b": Shape(16, 2048, 32, 64, 8192, rotary_scaling=32.0, **LLAMA),
    "llama-3b": Shape(28, 3072, 24, 128, 8192, rotary_scaling=32.0, **LLAMA),
    "llama-8b": Shape(32, 4096, 32, 128, 14336, rotary_scaling=8.0, tied_head=False, **LLAMA),
}
"""Shape of each flavor."""


def resolve_shape(model: Model) -> Shape:
    """Return the shape of the flavor, with the dimensions and options that the config overrides."""
    flavor = SHAPES[model.flavor]
    settings = {field.name: getattr(model, field.name) for field in fields(flavor)}
    chosen = {name: value for name, value in settings.items() if value is not None}
    shape = replace(flavor, **chosen)
    if shape.head_dim % 2:
        raise UserError(f"model.head_dim = {shape.head_dim} is odd: make it even")
    if shape.kv_heads and shape.heads % shape.kv_heads:
        heads = f"model.heads = {shape.heads}"
        raise UserError(f"model.kv_heads = {shape.kv_heads} does not divide {heads}: change one")
    return shape


def settings_of_shape(shape: Shape) -> dict[str, Any]:
    """Return the settings of [model] that give this shape with any flavor."""
    return asdict(shape) | {"kv_heads": shape.kv_heads or shape.heads}


def rotary_frequencies(shape: Shape, device: torch.device) -> Tensor:
    """Return the rotation per position of each pair of dimensions, fp32 [head_dim / 2].

    Scaling divides low frequencies, keeps high ones, and interpolates between.
    """
    exponents = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    plain: Tensor = 1 / shape.rotary_base**exponents  # as in transformers, to the bit
    if shape.rotary_scaling == 1:
        return plain
    turns = SHORT_LENGTH / (2 * math.pi / plain)
    kept_share = ((turns - LOW) / (HIGH - LOW)).clamp(0, 1)
    return (1 - kept_share) * plain / shape.rotary_scaling + kept_share * plain


def rotary_table(positions: Tensor, frequencies: Tensor) -> Rotary:
    """Return the cosines and sines of the angles of positions [..., length], fp32 [..., length,
    head_dim]."""
    angles = positions.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each pair (i, i + head_dim/2) of x [batch, heads, length, head_dim] by its angle."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def document_mask(tokens: Tensor, end_of_document: int, *, blocks: bool) -> BlockMask | Tensor:
    """Return what each token attends to: itself and the earlier tokens of its document.

    `blocks`: for flex_attention. Otherwise as booleans [batch, 1, length, length].
    """
    batch, length = tokens.shape
    ends = (tokens == end_of_document).int()
    documents = ends.cumsum(dim=1) - ends  # an end belongs to the document that it ends

    def attends(row: Tensor, _head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (documents[row, key] == documents[row, query])

    if blocks:
        return create_block_mask(
            attends, B=batch, H=None, Q_LEN=length, KV_LEN=length, device=tokens.device
        )
    # Shapes that broadcast to [batch, 1, length, length].
    rows = torch.arange(batch, device=tokens.device).view(-1, 1, 1, 1)
    places = torch.arange(length, device=tokens.device)
    return attends(rows, None, query=places.view(-1, 1), key=places)


@cache
def compiled_flex_attention() -> Any:
    """Return flex_attention with a kernel of its own. Without one, it keeps all scores."""
    return torch.compile(flex_attention)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Return attention [batch, heads, length, head_dim]. k and v may have fewer heads than q."""
    grouped = q.shape[1] != k.shape[1]
    mixed: Tensor
    if isinstance(mask, BlockMask):
        # A kernel that is compiled with a block for CPUs is wrong for mixed layouts (torch 2.13).
        q, k, v = (part.contiguous() for part in (q, k, v))
        compiling = torch.compiler.is_compiling()  # a block, and flex_attention with it
        attention = flex_attention if compiling else compiled_flex_attention()
        mixed = attention(q, k, v, block_mask=mask, enable_gqa=grouped)
    else:
        causal = mask is None
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
    return mixed


class Attention(nn.Module):
    """Causal attention, with `kv_heads` heads of keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        kv_heads = shape.kv_heads or shape.heads
        self.heads = [shape.heads, kv_heads, kv_heads]
        self.qkv = nn.Linear(shape.width, sum(self.heads) * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if shape.qk_norm:
            self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_epsilon)
            self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_epsilon)

    def forward(
        self, x: Tensor, rotary: Rotary, mask: Mask, cache: BlockCache | None = None
    ) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)  # each [batch, heads, length, head_dim]
        q = rotate(self.q_norm(q), rotary)
        k = rotate(self.k_norm(k), rotary)
        if cache is not None:
            k, v = cache.append(k, v)
        mixed = attend(q, k, v, mask)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """Two matrices with GELU, or three with SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        inner = shape.feed_forward
        is_gated = shape.activation == "swiglu"
        self.gate = nn.Linear(width, inner, bias=False) if is_gated else None
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            inner = F.gelu(self.up(x), approximate="tanh")
        else:
            inner = F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(inner)
        return out


class Block(nn.Module):
    """Attention and feed-forward layer with pre-norms and residual connections."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.feed_forward = FeedForward(shape)

    def forward(
        self, x: Tensor, rotary: Rotary, mask: Mask, cache: BlockCache | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, mask, cache)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, norm and head. There are no biases and no buffers."""

    end_of_document: int | None = None

    def __init__(self, shape: Shape, vocab_size: int) -> None:
        super().__init__()
        self.shape = shape
        # nn.Embedding(...) would import torch._dynamo (0.6 s) to draw values that are not used.
        values = torch.empty(vocab_size, shape.width)
        self.embedding = nn.Embedding.from_pretrained(values, freeze=False)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.head = None if shape.tied_head else nn.Linear(shape.width, vocab_size, bias=False)

    def forward(
        self, tokens: Tensor, head: Head = F.linear, cache: KeyValueCache | None = None
    ) -> Any:
        x = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask: Mask = None
        end = self.end_of_document
        if cache is not None:
            assert end is None, "a cache does not separate documents"
            positions, mask = cache.extend(tokens)
        elif end is not None:
            mask = document_mask(tokens, end, blocks=tokens.is_cuda)
        rotary = rotary_table(positions, rotary_frequencies(self.shape, tokens.device))
        for number, block in enumerate(self.blocks):
            x = block(x, rotary, mask, None if cache is None else cache.blocks[number])
        output = self.embedding if self.head is None else self.head
        return head(self.norm(x), output.weight)

    def new_cache(self, lengths: Sequence[int], new_tokens: int) -> KeyValueCache:
        return KeyValueCache(len(self.blocks), lengths, new_tokens)

    def extra_repr(self) -> str:
        return str(self.shape)

    def initial_std(self, name: str, parameter: Tensor) -> float:
        if name.startswith(("embedding", "head")):
            return STD
        std = 1 / math.sqrt(parameter.shape[1])
        if name.endswith(("attention.out.weight", "feed_forward.down.weight")):
            # Two layers of each block are added up in the residual stream.
            return std / math.sqrt(2 * self.shape.layers)
        return std

    def flops_per_token(self, length: int) -> int:
        shape = self.shape
        weights = parameter_counts(self)["total"]
        if not shape.tied_head:
            weights -= self.embedding.weight.numel()  # a lookup
        return 6 * weights + 12 * shape.layers * shape.heads * shape.head_dim * length


def build_decoder(config: Model, vocab_size: int, _sequence_length: int) -> Decoder:
    """Build the decoder of a flavor. Any number of tokens fits, as positions are rotary."""
    return Decoder(resolve_shape(config), vocab_size)


def shape_of(model: nn.Module) -> Shape:
    """Return the shape of a decoder. Raise a UserError for another model."""
    shape = getattr(model, "shape", None)
    if not isinstance(shape, Shape):
        raise UserError(
            f"{type(model).__name__} is not the decoder that other programs know: export it with "
            "--format safetensors, and start from such an export"
        )
    return shape
