"""A decoder in transformers: as a plain Qwen3 or Llama, with config.json and names of parameters.

What else reads such folders, as vLLM and llama.cpp, reads these.
"""

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.models.decoder import HIGH, LOW, SHORT_LENGTH, settings_of_shape, shape_of

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
"""Found only in folders of transformers."""
TOKENIZER_NAME = "tokenizer.json"
KEYS = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "feed_forward": "intermediate_size",
    "tied_head": "tie_word_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}
SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": LOW,
    "high_freq_factor": HIGH,
    "original_max_position_embeddings": SHORT_LENGTH,
}
SCALED_LENGTH = 131_072
"""Length of Llama 3.1 and 3.2."""
MODULES = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "out": "o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}


class SpecialToken(NamedTuple):
    """A token that begins or ends a document."""

    name: str
    number: int


def save_hugging_face(
    folder: Path,
    model: nn.Module,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    *,
    sequence_length: int,
    begins_documents: bool = False,
) -> None:
    """Write what `from_pretrained(folder)` loads.

    `sequence_length`: of training. `begins_documents`: as in `Manifest`.
    """
    # Training ends every document with this token, so it also precedes the next document.
    end = SpecialToken(tokenizer.end_name, tokenizer.end_of_document)
    begin = None
    if begins_documents and tokenizer.begin_of_document is not None:
        assert tokenizer.begin_name is not None
        begin = SpecialToken(tokenizer.begin_name, tokenizer.begin_of_document)
    special = {
        "bos_token_id": (begin or end).number,
        "eos_token_id": end.number,
        "pad_token_id": end.number,
    }
    config = transformers_config(model, sequence_length)
    rows = config["vocab_size"]
    assert tokenizer.vocab_size <= rows
    config |= special | {"torch_dtype": str(dtype).removeprefix("torch.")}
    # Nothing has trained the rows of the embedding that have no token.
    generation: dict[str, Any] = {**special}
    if unused := list(range(tokenizer.vocab_size, rows)):
        generation["suppress_tokens"] = unused
    files = {CONFIG_NAME: config, "generation_config.json": generation}
    weights: dict[str, Tensor] = {}
    for name, parts in transformers_names(model).items():
        values = model.get_parameter(name).detach().to(dtype).split(list(parts.values()))
        weights |= dict(zip(parts, values, strict=True))
    if tokenizer.file is not None:
        write_tokenizer(folder / TOKENIZER_NAME, tokenizer.file, begin)
    elif tokenizer.name == "bytes":
        files[TOKENIZER_NAME] = _byte_tokenizer(tokenizer)
    else:
        logger.warning(
            f'the export has no {TOKENIZER_NAME}, as "{tokenizer.name}" is an encoding of '
            "tiktoken: put one with the same ids there"
        )
    length = config["max_position_embeddings"]
    files["tokenizer_config.json"] = _tokenizer_config(begin or end, end, length)
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    save_file(weights, folder / WEIGHTS_NAME, {"format": "pt"})


def transformers_config(model: nn.Module, length: int) -> dict[str, Any]:
    """Return the config.json. Versions and programs read different names of the rotary settings."""
    shape = shape_of(model)
    if shape.activation != "swiglu":
        raise UserError(
            f"--format hf: the model ({shape}) has no form in transformers: use --format "
            'safetensors, or train with model.activation = "swiglu"'
        )
    values = settings_of_model(model)
    family = "qwen3" if shape.qk_norm else "llama"
    scaling: dict[str, Any] = {"rope_type": "default"}
    if shape.rotary_scaling > 1:
        scaling = SCALING | {"factor": shape.rotary_scaling}
        length = max(length, SCALED_LENGTH)
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        **{their_key: values[our_key] for our_key, their_key in KEYS.items()},
        **FIXED,
        "max_position_embeddings": length,
        "rope_theta": shape.rotary_base,
        "rope_scaling": scaling if shape.rotary_scaling > 1 else None,
        "rope_parameters": scaling | {"rope_theta": shape.rotary_base},
    }


def write_tokenizer(path: Path, file: Path, begin: SpecialToken | None) -> None:
    """Write a tokenizer.json that adds to a text what precedes a document in training: the begin
    token, or nothing. It is a copy of `file` if that does so."""
    from tokenizers import Tokenizer as TokenizerFile

    tokenizer = TokenizerFile.from_file(str(file))
    tokenizer.no_padding()
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    expected = plain if begin is None else [begin.number, *plain]
    if tokenizer.encode("a").ids == expected:
        shutil.copyfile(file, path)
        return
    content = json.loads(file.read_text(encoding="utf-8"))
    content["post_processor"] = None if begin is None else _begin_processor(begin)
    text = json.dumps(content, ensure_ascii=False)
    path.write_text(text, encoding="utf-8")
    added = "no token" if begin is None else begin.name
    logger.info(f"{path} adds {added} before a text, as in training, unlike {file}")


def _begin_processor(begin: SpecialToken) -> dict[str, Any]:
    def after_begin(sequence: str, number: int) -> list[dict[str, Any]]:
        return [
            {"SpecialToken": {"id": begin.name, "type_id": number}},
            {"Sequence": {"id": sequence, "type_id": number}},
        ]

    token = {"id": begin.name, "ids": [begin.number], "tokens": [begin.name]}
    return {
        "type": "TemplateProcessing",
        "single": after_begin("A", 0),
        "pair": [*after_begin("A", 0), *after_begin("B", 1)],
        "special_tokens": {begin.name: token},
    }


def _tokenizer_config(begin: SpecialToken, end: SpecialToken, length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin.name,
        "eos_token": end.name,
        "pad_token": end.name,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": length,
        "padding_side": "left",  # where `generate` needs it
        "clean_up_tokenization_spaces": False,
        # Special tokens in a text are ordinary text, as in training. Call the tokenizer with
        # split_special_tokens=False to parse them.
        "split_special_tokens": True,
    }


def _byte_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a byte-level BPE without merges. It writes a byte as its character of Latin-1 if that
    is visible, else as the next one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    characters = [chr(byte if byte in visible else next(others)) for byte in range(256)]
    end = {"id": tokenizer.end_of_document, "content": tokenizer.end_name, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    step["use_regex"] = False
    vocabulary = {character: byte for byte, character in enumerate(characters)}
    return {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": step,
        "decoder": step,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


# --- names and settings ---------------------------------------------------------------------------


def transformers_names(model: nn.Module) -> dict[str, dict[str, int]]:
    """Map each parameter to its parts in files of transformers: their names and numbers of rows."""
    shape = shape_of(model)
    names = {}
    kv_rows = (shape.kv_heads or shape.heads) * shape.head_dim
    rows_of = {"q_proj": shape.heads * shape.head_dim, "k_proj": kv_rows, "v_proj": kv_rows}
    for name, parameter in model.named_parameters():
        their_name = ".".join(MODULES.get(part, part) for part in name.split("."))
        names[name] = {their_name: parameter.shape[0]}
        if ".qkv." in their_name:
            names[name] = {their_name.replace("qkv", part): rows for part, rows in rows_of.items()}
    return names


def settings_of_model(model: nn.Module) -> dict[str, Any]:
    """Return the settings of [model], with all that follow from the flavor."""
    rows = model.get_parameter("embedding.weight").shape[0]
    return settings_of_shape(shape_of(model)) | {"vocab_size": rows}


def differing_settings(model: nn.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of [model] that differ in a config.json, with their values there."""
    saved = settings_of_config(config)
    of_model = settings_of_model(model)
    return {key: value for key, value in saved.items() if value != of_model[key]}


def settings_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of [model] for a config.json, with the defaults of transformers."""
    family = config["model_type"]
    if family not in ("llama", "qwen3"):
        raise UserError(f'model_type = "{family}" is neither "llama" nor "qwen3"')
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    supported = FIXED if kind == "default" else FIXED | SCALING
    their_settings = {**FIXED, **config, **rope, "rope_type": kind}
    differing = [
        f"{key} = {their_settings.get(key)}"
        for key, value in supported.items()
        if their_settings.get(key) != value
    ]
    if differing:
        raise UserError(f"its {', '.join(differing)} cannot be set here")
    heads = config["num_attention_heads"]
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": config["hidden_size"] // heads,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    given = defaults | {key: value for key, value in config.items() if value is not None}
    return {setting: given[key] for setting, key in KEYS.items()} | {
        "activation": "swiglu",
        "qk_norm": family == "qwen3",
        "rotary_base": their_settings.get("rope_theta", 10_000.0),
        "rotary_scaling": rope.get("factor", 1.0),
    }
