"""A folder that `transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` loads.

transformers does not know our decoder, so the folder carries its source along (remote_code/). The weights keep their
names; the embedding is stored once and is the head too. All rows of the embedding are kept, those that fill it up beyond
the tokenizer's vocabulary included; as nothing trains them, `generate` is told never to choose them.
"""

import importlib.resources
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_diloco import __version__
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.data.files import write_whole
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.export.dense import check_holds_no_weights, save_safetensors
from torchtitan_diloco.export.fast_tokenizer import write_tokenizer
from torchtitan_diloco.models.chinchilla.flavors import resolve_shape
from torchtitan_diloco.models.chinchilla.model import Decoder

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
CONFIGURATION_SOURCE = "configuration_chinchilla"
MODELING_SOURCE = "modeling_chinchilla"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def save_hugging_face(
    folder: Path,
    tensors: dict[str, Tensor],
    model: Model,
    *,
    vocab_size: int,
    sequence_length: int,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
) -> None:
    """Writes the tensors of a Decoder(model, vocab_size, sequence_length), in `dtype`, with all that goes with them."""
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype = {dtype} is none to export in; give one of {', '.join(map(str, DTYPES))}"
        )
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"vocab_size = {vocab_size} is below the vocabulary of {tokenizer.name}, {tokenizer.vocab_size}: give the "
            "tokenizer and the size that the model was trained with"
        )
    check_tensors(tensors, model, vocab_size, sequence_length)
    check_holds_no_weights(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, tokenizer, sequence_length)
    source = importlib.resources.files("torchtitan_diloco.export") / "remote_code"
    for name in (CONFIGURATION_SOURCE, MODELING_SOURCE):
        write_whole(folder / f"{name}.py", (source / f"{name}.py").read_bytes())
    _write_json(folder / GENERATION_CONFIG_NAME, generation_config(vocab_size, tokenizer))
    _write_json(
        folder / CONFIG_NAME, model_config(model, vocab_size, sequence_length, tokenizer, dtype)
    )
    # The weights come last: a folder that has them is complete.
    metadata = {"producer": f"torchtitan_diloco {__version__}"}
    save_safetensors(
        folder, {name: tensor.to(dtype) for name, tensor in tensors.items()}, metadata=metadata
    )


def check_tensors(
    tensors: dict[str, Tensor], model: Model, vocab_size: int, sequence_length: int
) -> None:
    with torch.device("meta"):
        expected = {
            name: value.shape
            for name, value in Decoder(model, vocab_size, sequence_length).state_dict().items()
        }
    given = {name: value.shape for name, value in tensors.items()}
    if given == expected:
        return
    wrong = [f"{name} is missing" for name in expected if name not in given]
    wrong += [f"{name} is not part of the model" for name in given if name not in expected]
    wrong += [
        f"{name} is {tuple(shape)} instead of {tuple(expected[name])}"
        for name, shape in given.items()
        if name in expected and shape != expected[name]
    ]
    raise ValueError(
        f"the tensors are not those of this model ({'; '.join(wrong[:3])}{'; ...' if len(wrong) > 3 else ''}): give the "
        "model section, vocab_size and sequence_length of the run that trained them"
    )


def model_config(
    model: Model, vocab_size: int, sequence_length: int, tokenizer: Tokenizer, dtype: torch.dtype
) -> dict[str, Any]:
    shape = resolve_shape(model)
    return {
        "architectures": ["ChinchillaForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{CONFIGURATION_SOURCE}.ChinchillaConfig",
            "AutoModelForCausalLM": f"{MODELING_SOURCE}.ChinchillaForCausalLM",
        },
        "model_type": "chinchilla",
        "vocab_size": vocab_size,
        "max_position_embeddings": sequence_length,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.feed_forward,
        "norm": model.norm,
        "qk_norm": model.qk_norm,
        "positions": model.positions,
        "rotary_base": model.rotary_base,
        "activation": model.activation,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.end_of_document,
        "eos_token_id": tokenizer.end_of_document,
        "pad_token_id": tokenizer.end_of_document,
        "torch_dtype": str(dtype).removeprefix(
            "torch."
        ),  # the key that old and new versions of transformers read
    }


def generation_config(vocab_size: int, tokenizer: Tokenizer) -> dict[str, Any]:
    config: dict[str, Any] = dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.end_of_document
    )
    if vocab_size > tokenizer.vocab_size:
        config["suppress_tokens"] = list(range(tokenizer.vocab_size, vocab_size))
    return config


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())
