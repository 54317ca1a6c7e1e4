"""Llama in the package transformers: names of parameters, and config.json."""

from collections.abc import Mapping
from typing import Any

from torchtitan_diloco.models.llama.flavors import (
    HIGH,
    LOW,
    NORM_EPSILON,
    SHORT_LENGTH,
    LlamaShape,
)

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


def name_of(parameter: str) -> str:
    return ".".join(MODULES.get(part, part) for part in parameter.split("."))


def config_of(shape: LlamaShape, vocab_size: int, length: int) -> dict[str, Any]:
    """Return the content of config.json. `length`: longest text of the training."""
    scaling = None
    if shape.rotary_scaling > 1:
        scaling = SCALING | {"factor": shape.rotary_scaling}
        length = max(length, SCALED_LENGTH)
    return FIXED | {
        "vocab_size": vocab_size,
        "max_position_embeddings": length,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.feed_forward,
        "rope_theta": shape.rotary_base,
        "rope_scaling": scaling,
        "tie_word_embeddings": shape.tied_head,
    }


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of [model] for a config.json. What it leaves out has the default of
    transformers."""
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
