"""Text to tokens and back: bytes, a file of ranks, or a named encoding of tiktoken."""

import base64
import difflib
import functools
import hashlib
import itertools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken

from torchtitan_diloco.utils import command_line, install_command, installed, logger

END_OF_DOCUMENT = "<|endoftext|>"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|im_end|>")
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>")
GPT2_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel
)

# GPT-4's split of text into words, digits (at most three), punctuation and white space. It is used
# for all rank files, and has no possessive quantifiers, which regex engines read differently.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# There are no merges, so 16 bytes at a time only affect the speed (3x that of one at a time).
_BYTES_PATTERN = r"[\s\S]{1,16}"


class Tokenizer:
    """A tiktoken encoding with a fingerprint and an end-of-document token."""

    def __init__(
        self, spec: str, encoding: tiktoken.Encoding, *, pattern: str, end: str = END_OF_DOCUMENT
    ) -> None:
        self._encoding = encoding
        self.end_name = end
        self._pattern = pattern
        self.name = spec
        self.vocab_size = encoding.max_token_value + 1
        """Ids are 0 ... vocab_size - 1, including special tokens."""
        self.end_of_document = encoding.encode_single_token(end)
        begin = next((name for name in BEGINS if name in encoding.special_tokens_set), None)
        self.begin_of_document = None if begin is None else encoding.encode_single_token(begin)
        """Token that may precede a document, as in Llama 3."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give the same ids for every text."""
        digest = hashlib.sha256(self._pattern.encode())
        for token in range(self.vocab_size):
            try:
                value = self._encoding.decode_single_token_bytes(token)
            except KeyError:  # named encodings have gaps between their special tokens
                continue
            digest.update(b"%d:%d:" % (token, len(value)) + value)
        return digest.hexdigest()[:16]

    @property
    def split_pattern(self) -> str:
        """Regular expression that splits text. Bytes are merged only within a match."""
        return self._encoding._pat_str  # tiktoken has no public name for it

    def ranks(self) -> dict[bytes, int]:
        """Return the id of every ordinary token. Merges with lower ids come first."""
        encoding = self._encoding
        return {
            token: encoding.encode_single_token(token) for token in encoding.token_byte_values()
        }

    def special_tokens(self) -> dict[str, int]:
        """Return the id of every special token, including the end of a document."""
        names = sorted(self._encoding.special_tokens_set)
        return {name: self._encoding.encode_single_token(name) for name in names}

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Encode text. Special tokens are ordinary text; a lone surrogate becomes U+FFFD."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            valid = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._encoding.encode_to_numpy(valid, disallowed_special=())

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Decode ids. Bytes that are not UTF-8 become U+FFFD."""
        return self._encoding.decode([int(token) for token in ids])

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of ids, which may start or end inside a character, or U+FFFD if an id is
        a gap of a named encoding."""
        try:
            return self._encoding.decode_bytes(list(ids))
        except KeyError:
            return "\N{REPLACEMENT CHARACTER}".encode()


def build_tokenizer(spec: str, source: str = "TEXT") -> Tokenizer:
    """Build `bytes`, the tokenizer of a `.tiktoken` or `.json` file, or a named tiktoken encoding.

    `source`: text to train a missing rank file on, for the error.
    """
    end = END_OF_DOCUMENT
    if spec == "bytes":
        ranks, pattern = {bytes([byte]): byte for byte in range(256)}, _BYTES_PATTERN
        special = {end: len(ranks)}
    elif spec.endswith((".tiktoken", ".json")):
        path, learned = Path(spec).expanduser(), spec.endswith(".tiktoken")
        if not path.is_file():
            command = _train_command(source, spec) if learned else _download_command(path)
            raise ValueError(
                f'data.tokenizer = "{spec}" is not a file ({path.absolute()}). Get it with\n    '
                + command
            )
        if learned:
            ranks, pattern = read_ranks(path), SPLIT_PATTERN
            special = {end: len(ranks)}
        else:
            ranks, special, end, pattern = read_tokenizer_json(path)
    else:
        return _named_encoding(spec)
    encoding = tiktoken.Encoding(
        spec, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    return Tokenizer(spec, encoding, pattern=pattern, end=end)


def _train_command(source: str, out: str) -> str:
    options = ["--source", source, "--vocab-size", "32000", "--out", out]
    return f"{command_line('train-tokenizer')} {shlex.join(options)}"


def _download_command(path: Path) -> str:
    """Return the command that downloads the model with this `tokenizer.json`, and what it needs."""
    folder = path.parent
    owner = "meta-llama" if folder.name.startswith("Llama-") else "OWNER"
    command = [installed("hf"), "download", f"{owner}/{folder.name}", "--local-dir", str(folder)]
    return f"{shlex.join(command)}\nwhich needs\n    {install_command('export')}"


def _named_encoding(name: str) -> Tokenizer:
    known = tiktoken.list_encoding_names()
    if name not in known:
        nearest = difflib.get_close_matches(name, ["bytes", *known], n=1, cutoff=0.5)
        hint = f' Did you mean "{nearest[0]}"?' if nearest else ""
        raise ValueError(
            f'data.tokenizer = "{name}" is not a tokenizer.{hint} Use "bytes", a path that ends in '
            f".tiktoken or .json, or an encoding of tiktoken: {', '.join(sorted(known))}."
        )
    try:
        encoding = tiktoken.get_encoding(name)
        return Tokenizer(name, encoding, pattern=name)  # the name implies the pattern
    # A download that failed or is damaged, or a missing end-of-document token (KeyError).
    except (OSError, ValueError, KeyError) as error:
        fetch = f"import tiktoken; tiktoken.get_encoding({name!r})"
        raise ValueError(
            f'data.tokenizer = "{name}": tiktoken could not load this encoding with an '
            f"{END_OF_DOCUMENT} token ({type(error).__name__}: {error}). On a machine with a "
            f"network, with TIKTOKEN_CACHE_DIR set to a folder that you set here too, run\n    "
            f"{shlex.join([sys.executable, '-c', fetch])}\nor learn a tokenizer, offline, with"
            f"\n    {_train_command('TEXT', 'OWN.tiktoken')}"
        ) from error


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a `.tiktoken` file. Each line has a token in base64 and its rank 0, 1, 2, ...

    tiktoken's own reader caches by path, so it would miss a change of the file.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines()):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            if int(rank) != number or not token or token in ranks:
                raise ValueError(f"rank {number} and a new token should follow")
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number + 1}: {line[:80]!r} is not a token in base64, a space and "
                f"its rank: {error}"
            ) from error
        ranks[token] = number
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"{path} has no token for {len(missing)} of the 256 bytes (the first is "
            f"{missing[0]:#04x}), so it cannot encode every text. Is the file complete?"
        )
    return ranks


def format_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """Return the content of a `.tiktoken` file."""
    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in by_rank)


# --- tokenizer.json of Hugging Face ---------------------------------------------------------------


def byte_characters() -> list[str]:
    """Return the character that byte-level BPE writes for each byte: that of Latin-1 if visible,
    else the next one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = itertools.count(0x100)
    return [chr(byte if byte in visible else next(substitutes)) for byte in range(256)]


def read_tokenizer_json(path: Path) -> tuple[dict[bytes, int], dict[str, int], str, str]:
    """Return the ranks, the special tokens, the one that ends a document, and the pattern.

    tiktoken merges in the order of ids, so the merges must have the same order.
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
    except OSError as error:
        raise _refusal(path, str(error.strerror)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
    if plain := [str(one["content"]) for one in added if not one.get("special", True)]:
        logger.warning(
            f"{path}: {len(plain)} added tokens are not special, such as {plain[0]!r}; text with "
            "them is encoded without them, unlike in transformers"
        )
    return ranks, special, end, pattern


def _pattern(step: dict[str, Any]) -> str:
    """Return the pattern that splits text, or "" if there is any other step."""
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
        f"`{command_line('train-tokenizer')}`"
    )
