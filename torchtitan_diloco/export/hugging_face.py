"""Export as a plain Qwen3 or Llama, for transformers and what else reads its folders."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.export.weights import CONFIG_NAME, WEIGHTS_NAME, new_folder
from torchtitan_diloco.log import logger
from torchtitan_diloco.models import LanguageModel
from torchtitan_diloco.models.hugging_face import transformers_config, transformers_names

TOKENIZER_NAME = "tokenizer.json"


def save_hugging_face(
    folder: Path, model: LanguageModel, tokenizer: Tokenizer, dtype: torch.dtype
) -> None:
    """Write a folder that `from_pretrained(folder)` loads."""
    assert tokenizer.vocab_size <= model.vocab_size
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    # Training ends every document with this token, so it also precedes the next document.
    special = dict.fromkeys(ids, tokenizer.end_of_document)
    config = transformers_config(model)
    config |= special | {"torch_dtype": str(dtype).removeprefix("torch.")}
    # Nothing has trained the rows of the embedding that have no token.
    unused = list(range(tokenizer.vocab_size, model.vocab_size))
    files = {
        CONFIG_NAME: config,
        "generation_config.json": special | ({"suppress_tokens": unused} if unused else {}),
    }
    weights: dict[str, Tensor] = {}
    for name, parts in transformers_names(model).items():
        values = model.get_parameter(name).detach().to(dtype).split(list(parts.values()))
        weights |= dict(zip(parts, values, strict=True))
    with new_folder(folder) as incomplete:
        if tokenizer.file is not None:
            shutil.copyfile(tokenizer.file, incomplete / TOKENIZER_NAME)
        elif tokenizer.name == "bytes":
            files[TOKENIZER_NAME] = _byte_tokenizer(tokenizer)
        else:
            logger.warning(
                f'{folder} has no tokenizer, as "{tokenizer.name}" is an encoding of tiktoken: put '
                "a tokenizer.json with the same ids there"
            )
        if tokenizer.file is not None or tokenizer.name == "bytes":
            length = config["max_position_embeddings"]
            files["tokenizer_config.json"] = _tokenizer_config(tokenizer, length)
        for name, content in files.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (incomplete / name).write_text(text, encoding="utf-8")
        save_file(weights, incomplete / WEIGHTS_NAME, {"format": "pt"})


def _tokenizer_config(tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.end_name),
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
