"""Llama 3 (arXiv 2407.21783), and its conversion to and from transformers."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.base import DecoderBase, Rotary, Shape, resolve_shape, rotate

NORM_EPSILON = 1e-5
SHORT_LENGTH, LOW, HIGH = 8192, 1.0, 4.0
"""Rotary scaling: the original length, and the numbers of turns within it below and above which a
frequency is low and high."""


@dataclass(frozen=True)
class LlamaShape(Shape):
    """Dimensions and other properties of a Llama, named like the settings."""

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


class Attention(nn.Module):
    """Causal grouped-query attention: `kv_heads` heads of keys and values."""

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


class Llama(DecoderBase):
    shape: LlamaShape

    def __init__(self, config: Model, vocab_size: int, sequence_length: int) -> None:
        shape = resolve_shape(FLAVORS, config)
        if shape.heads % shape.kv_heads:
            raise ValueError(
                f"model.kv_heads = {shape.kv_heads} does not divide model.heads = {shape.heads}: "
                "each head of keys and values is for the same number of heads of queries"
            )
        if shape.head_dim % 2:
            raise ValueError(
                f"model.head_dim = {shape.head_dim} is odd, but rotary positions rotate pairs of "
                "dimensions: make it even"
            )
        super().__init__(config, vocab_size, sequence_length, shape, tied_head=shape.tied_head)

    def build_norm(self) -> nn.Module:
        return nn.RMSNorm(self.shape.width, eps=NORM_EPSILON)

    def build_attention(self) -> Attention:
        return Attention(self.shape)

    def rotary_frequencies(self, device: torch.device) -> Tensor:
        """Return the same frequencies as transformers, to the bit.

        Scaling divides low frequencies, keeps high ones, and interpolates between.
        """
        shape = self.shape
        dims = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
        plain = 1 / shape.rotary_base ** (dims / shape.head_dim)
        if shape.rotary_scaling == 1:
            return plain
        turns = SHORT_LENGTH / (2 * math.pi / plain)
        kept = ((turns - LOW) / (HIGH - LOW)).clamp(0, 1)
        return (1 - kept) * plain / shape.rotary_scaling + kept * plain

    def to_transformers(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape, length, scaling = self.shape, self.sequence_length, None
        if shape.rotary_scaling > 1:
            scaling = SCALING | {"factor": shape.rotary_scaling}
            length = max(length, SCALED_LENGTH)
        config = LlamaConfig(
            **FIXED,
            vocab_size=self.vocab_size,
            max_position_embeddings=length,
            num_hidden_layers=shape.layers,
            hidden_size=shape.width,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.feed_forward,
            rope_theta=shape.rotary_base,
            rope_scaling=scaling,
            tie_word_embeddings=shape.tied_head,
        )
        with torch.device("meta"):
            converted = LlamaForCausalLM(config)
        names = self.transformers_names()
        state = {names[name]: value for name, value in self.state_dict().items()}
        converted.load_state_dict(state, strict=not shape.tied_head, assign=True)
        converted.tie_weights()
        return converted

    def transformers_names(self) -> dict[str, str]:
        return {
            name: ".".join(MODULES.get(part, part) for part in name.split("."))
            for name, _ in self.named_parameters()
        }

    def differing_settings(self, config: Mapping[str, Any], /) -> dict[str, Any]:
        mine, there = asdict(self.shape), settings_of(config)
        mine["vocab_size"] = self.vocab_size
        return {key: value for key, value in there.items() if value != mine[key]}


# --- transformers: names of parameters, and config.json -------------------------------------------

MODULES = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "out": "o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
SCALED_LENGTH = 131_072
"""Length of Llama 3.1 and 3.2."""
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": NORM_EPSILON,
}
SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": LOW,
    "high_freq_factor": HIGH,
    "original_max_position_embeddings": SHORT_LENGTH,
}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of [model] for a config.json, with the defaults of transformers."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    known = {**FIXED, **(SCALING if kind != "default" else {})}
    found = {**FIXED, "rms_norm_eps": 1e-6, **config, **rope, "rope_type": kind}
    unknown = [f"{key} = {found.get(key)}" for key in known if found.get(key) != known[key]]
    if unknown:
        raise ValueError(f"its {', '.join(unknown)} is none of Llama 3 and cannot be set here")
    heads = config["num_attention_heads"]
    return {
        "vocab_size": config["vocab_size"],
        "layers": config["num_hidden_layers"],
        "width": config["hidden_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "feed_forward": config["intermediate_size"],
        "rotary_base": found.get("rope_theta", 10_000.0),
        "rotary_scaling": rope.get("factor", 1.0),
        "tied_head": config.get("tie_word_embeddings", False),
    }
