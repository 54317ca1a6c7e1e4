"""Reads a Hugging Face `tokenizer.json` of byte-level BPE, as of GPT-2 and Llama 3."""

import itertools
import json
from pathlib import Path
from typing import Any

GPT2_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel
)
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|im_end|>")


def byte_characters() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte: itself where Latin-1
    has a visible one, else the next one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = itertools.count(0x100)
    return [chr(byte if byte in visible else next(substitutes)) for byte in range(256)]


def read_tokenizer_json(path: Path) -> tuple[dict[bytes, int], dict[str, int], str, str]:
    """Return the ranks, the special tokens, the one that ends a document, and the pattern.

    tiktoken merges by the id of the result, so the merges have to be in the order of the ids.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        model, added = content["model"], content.get("added_tokens") or []
        special = {str(one["content"]): int(one["id"]) for one in added}
        pattern = _pattern(content.get("pre_tokenizer") or {})
        normalizer = content.get("normalizer")
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        ranks = {
            bytes(byte_of[character] for character in token): int(number)
            for token, number in model["vocab"].items()
            if token not in special
        }
        merges = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
        made = [model["vocab"]["".join(pair)] for pair in merges]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refusal(path, f"{type(error).__name__}: {error}") from error
    end = next((name for name in ENDS if name in special), "")
    if model.get("type", "BPE") != "BPE" or not pattern or made != sorted(made) or not merges:
        raise _refusal(path, "it has another model, or merges in another order than its ids")
    if absent := 256 - sum(len(token) == 1 for token in ranks):
        raise _refusal(path, f"it has no token for {absent} of the 256 bytes")
    if normalizer:
        raise _refusal(path, f"it changes text by {normalizer.get('type')} before it is encoded")
    if not end:
        raise _refusal(path, f"it has none of the tokens {', '.join(ENDS)} to end a document")
    return ranks, special, end, pattern


def _pattern(step: dict[str, Any]) -> str:
    """Return the pattern that splits text, or nothing if there is any other step."""
    steps = step.get("pretokenizers", [step])
    kinds, first, last = [one.get("type") for one in steps], steps[0], steps[-1]
    splits = last.get("use_regex", True)  # by GPT-2's pattern
    if last.get("add_prefix_space"):
        return ""
    if kinds == ["Split", "ByteLevel"] and first["behavior"] == "Isolated" and not splits:
        return "" if first.get("invert") else str(first["pattern"]["Regex"])
    return GPT2_PATTERN if kinds == ["ByteLevel"] and splits else ""


def _refusal(path: Path, reason: str) -> ValueError:
    return ValueError(
        f'data.tokenizer = "{path}" is no tokenizer.json of byte-level BPE that can be read here '
        f"({reason}): take another tokenizer, or learn one with "
        "torchtitan_diloco.data.train_tokenizer"
    )
