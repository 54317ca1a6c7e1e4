"""Llama 3 (arXiv 2407.21783)."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.base import Head
from torchtitan_diloco.models.decoder import (
    Block,
    DecoderBase,
    FeedForward,
    Rotary,
    rotary_table,
    rotate,
)
from torchtitan_diloco.models.llama import hugging_face
from torchtitan_diloco.models.llama.flavors import (
    HIGH,
    LOW,
    NORM_EPSILON,
    SHORT_LENGTH,
    LlamaShape,
    llama_shape,
)


def rotary_frequencies(shape: LlamaShape, device: torch.device) -> Tensor:
    """Return the rotary frequencies with the bits of transformers, fp32 [head_dim / 2].

    Scaling divides the low ones, keeps the high ones, and interpolates those between.
    """
    dims = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
    plain = 1 / shape.rotary_base ** (dims / shape.head_dim)
    if shape.rotary_scaling == 1:
        return plain
    turns = SHORT_LENGTH / (2 * math.pi / plain)
    kept = ((turns - LOW) / (HIGH - LOW)).clamp(0, 1)
    return (1 - kept) * plain / shape.rotary_scaling + kept * plain


class Attention(nn.Module):
    """Causal self-attention; several heads of queries share one of keys and values."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (  # each [batch, heads, length, head_dim]
            linear(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


def build_norm(shape: LlamaShape) -> nn.Module:
    return nn.RMSNorm(shape.width, eps=NORM_EPSILON)


def build_block(shape: LlamaShape) -> Block:
    feed_forward = FeedForward(shape, gated=True)
    return Block(build_norm(shape), Attention(shape), build_norm(shape), feed_forward)


class Llama(DecoderBase):
    shape: LlamaShape

    def __init__(self, config: Model, vocab_size: int, sequence_length: int) -> None:
        super().__init__(config, vocab_size, sequence_length)
        self.shape = shape = llama_shape(config)
        self.embedding = nn.Embedding(vocab_size, shape.width)
        self.blocks = nn.ModuleList(build_block(shape) for _ in range(shape.layers))
        self.norm = build_norm(shape)
        if not shape.tied_head:
            self.head = nn.Linear(shape.width, vocab_size, bias=False)

    def forward(self, tokens: Tensor, head: Head = F.linear) -> Any:
        x = self.embedding(tokens)
        rotary = rotary_table(tokens.shape[1], rotary_frequencies(self.shape, tokens.device))
        for block in self.blocks:
            x = block(x, rotary)
        output = self.embedding if self.head is None else self.head
        return head(self.norm(x), output.weight)

    def to_transformers(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = hugging_face.config_of(self.shape, self.vocab_size, self.sequence_length)
        with torch.device("meta"):
            converted = LlamaForCausalLM(LlamaConfig(**config))
        names = self.transformers_names()
        state = {names[name]: value for name, value in self.state_dict().items()}
        converted.load_state_dict(state, strict=not self.shape.tied_head, assign=True)
        converted.tie_weights()
        return converted

    def transformers_names(self) -> dict[str, str]:
        return {name: hugging_face.name_of(name) for name, _ in self.named_parameters()}

    def differing_settings(self, config: Mapping[str, Any], /) -> dict[str, Any]:
        mine, there = asdict(self.shape), hugging_face.settings_of(config)
        mine["vocab_size"] = self.vocab_size
        return {key: value for key, value in there.items() if value != mine[key]}
