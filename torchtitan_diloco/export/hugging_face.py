"""Export for transformers: weights, configuration, tokenizer, and the source of our own family."""

import json
import random
import re
from pathlib import Path
from typing import Any

import torch

from torchtitan_diloco.data.tokenizer import Tokenizer, byte_characters
from torchtitan_diloco.data.train_tokenizer import byte_level_bpe
from torchtitan_diloco.export.weights import CONFIG_NAME, new_folder
from torchtitan_diloco.models import LanguageModel
from torchtitan_diloco.utils import install_command


def save_hugging_face(
    folder: Path, model: LanguageModel, tokenizer: Tokenizer, dtype: torch.dtype
) -> None:
    """Write a folder that `from_pretrained(folder, trust_remote_code=True)` loads."""
    assert tokenizer.vocab_size <= model.vocab_size
    try:
        from transformers import GenerationConfig, PreTrainedTokenizerFast
    except ImportError as error:
        command = install_command("export")
        raise ValueError(f"--format hf needs the package transformers: {command}") from error
    converted = model.to_transformers().to(dtype)
    # Special tokens in a text are ordinary text, as in training. Call the tokenizer with
    # split_special_tokens=False to parse them. One difference remains: a lone surrogate, which
    # becomes U+FFFD in training, is an error in transformers.
    converted_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=convert_tokenizer(tokenizer),
        # Training ends every document with this token, so it also precedes the next document.
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.end_name),
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",  # where `generate` needs it
        model_max_length=converted.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    special = dict.fromkeys(ids, tokenizer.end_of_document)
    converted.config.update(special)
    # Nothing has trained the rows of the embedding that have no token.
    unused = list(range(tokenizer.vocab_size, model.vocab_size))
    converted.generation_config = GenerationConfig(**special, suppress_tokens=unused or None)
    with new_folder(folder) as incomplete:
        converted_tokenizer.save_pretrained(incomplete)
        converted.save_pretrained(incomplete, max_shard_size="5GB")
        _add_older_rotary_keys(incomplete / CONFIG_NAME)


def _add_older_rotary_keys(config_file: Path) -> None:
    """Repeat `rope_parameters` under the names that transformers 4 and other programs read."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if rope := config.get("rope_parameters"):
        config["rope_theta"] = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
        config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def convert_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return the `tokenizers.Tokenizer` that gives the same ids for every text."""
    ranks, special = tokenizer.ranks(), tokenizer.special_tokens()
    characters = byte_characters()
    text = {token: "".join(characters[byte] for byte in token) for token in ranks}
    vocabulary = {text[token]: rank for token, rank in ranks.items()}
    if sorted(special.values()) != list(range(len(ranks), len(ranks) + len(special))):
        vocabulary |= special  # else they get the next free ids; named encodings have gaps there
    # Every pair of tokens that makes a token, in the order of the ranks.
    merges = [
        (text[token[:cut]], text[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    # The regex engine of `tokenizers` reads `{1,3}+` as a repetition of `{1,3}`, and `$` as the end
    # of any line. In all patterns of tiktoken the former ends an alternative, where possessive or
    # not is the same.
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", tokenizer.split_pattern)
    pattern = re.sub(r"(?<!\\)\$", r"\\z", pattern)
    converted = byte_level_bpe(pattern, vocab=vocabulary, merges=merges, ignore_merges=True)
    converted.add_special_tokens(sorted(special, key=special.__getitem__))
    converted.encode_special_tokens = True
    check_same_ids(tokenizer, converted)
    return converted


def check_same_ids(tokenizer: Tokenizer, converted: Any) -> None:
    """Compare the ids of random texts, as the regex engines have different Unicode tables."""
    draw, tokens = random.Random(0), list(tokenizer.ranks())
    common = [*" \n\r\t'", "a", "S", "1", "\u00a0", "'ll", "!"]
    texts = [*tokenizer.special_tokens()]
    for _ in range(100):
        texts.append(b"".join(draw.choices(tokens, k=40)).decode(errors="replace"))
        letters = chr(draw.randrange(0xD800)), chr(draw.randrange(0xE000, 0x110000))
        texts.append("".join(draw.choices([*letters, *common], k=40)))
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        other_ids = converted.encode(text, add_special_tokens=False).ids
        if ids != other_ids:
            raise ValueError(
                f"{tokenizer.name} cannot be exported: for {text!r} it gives the ids {ids}, its "
                f"conversion {other_ids}. Learn the rank file with "
                "torchtitan_diloco.data.train_tokenizer, or update the package tokenizers"
            )
