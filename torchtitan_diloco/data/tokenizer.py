"""Text to tokens and back: bytes, a `.tiktoken` rank file, or an encoding that tiktoken knows by name."""

import base64
import binascii
import difflib
import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiktoken

END_OF_DOCUMENT = "<|endoftext|>"

# GPT-4's split of text into words, digits (at most three), punctuation and white space. Every rank file is used with
# it, and `train_tokenizer` learns with it. It has no possessive quantifiers: regex engines read those differently.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# 16 bytes at a time: no rank joins two bytes, so the split only sets the speed (3x that of one character at a time).
_BYTES_PATTERN = r"[\s\S]{1,16}"


class Tokenizer:
    """A tiktoken encoding and what the rest of the code must know of it."""

    def __init__(self, spec: str, encoding: tiktoken.Encoding, *, pattern: str) -> None:
        self._spec = spec
        self._encoding = encoding
        self._pattern = pattern
        self.name = spec
        self.vocab_size = encoding.max_token_value + 1
        """Ids are 0 ... vocab_size - 1, the end-of-document token and any other special token included."""
        self.end_of_document = encoding.encode_single_token(END_OF_DOCUMENT)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for two tokenizers exactly if they turn every text into the same ids."""
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
        """The regular expression that cuts a text into pieces. Bytes are merged within a piece only."""
        return self._encoding._pat_str  # tiktoken has no public name for it

    def ranks(self) -> dict[bytes, int]:
        """Id of every ordinary token; the lowest one that two neighbours make is merged first."""
        return {
            token: self._encoding.encode_single_token(token)
            for token in self._encoding.token_byte_values()
        }

    def special_tokens(self) -> dict[str, int]:
        """Id of every special token, the end-of-document token among them."""
        return {
            token: self._encoding.encode_single_token(token)
            for token in sorted(self._encoding.special_tokens_set)
        }

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """The ids of a text. What looks like a special token is ordinary text; a lone surrogate, which no UTF-8 can
        hold, becomes U+FFFD."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            valid = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._encoding.encode_to_numpy(valid, disallowed_special=())

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """The text of ids. Bytes that are not UTF-8, such as a character cut in two, become U+FFFD."""
        return self._encoding.decode([int(token) for token in ids])

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of ids, which may begin and end within a character. An id that stands for nothing, as the gaps in named
        encodings do, becomes a U+FFFD."""
        try:
            return self._encoding.decode_bytes(list(ids))
        except KeyError:
            return "\N{REPLACEMENT CHARACTER}".encode()

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size}, fingerprint={self.fingerprint})"

    def __reduce__(self) -> tuple[object, ...]:
        return build_tokenizer, (
            self._spec,
        )  # another process builds it again: smaller than the ranks


def build_tokenizer(spec: str) -> Tokenizer:
    """`bytes`, a path to a `.tiktoken` rank file, or the name of a tiktoken encoding."""
    if spec == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
        return _from_ranks(spec, ranks, _BYTES_PATTERN)
    if spec.endswith(".tiktoken"):
        return _from_ranks(spec, read_ranks(Path(spec).expanduser()), SPLIT_PATTERN)
    return _from_name(spec)


def _from_ranks(spec: str, ranks: Mapping[bytes, int], pattern: str) -> Tokenizer:
    encoding = tiktoken.Encoding(
        spec,
        pat_str=pattern,
        mergeable_ranks=dict(ranks),
        special_tokens={END_OF_DOCUMENT: len(ranks)},
    )
    return Tokenizer(spec, encoding, pattern=pattern)


def _from_name(name: str) -> Tokenizer:
    known = tiktoken.list_encoding_names()
    if name not in known:
        nearest = difflib.get_close_matches(name, ["bytes", *known], n=1, cutoff=0.5)
        hint = f' Did you mean "{nearest[0]}"?' if nearest else ""
        raise ValueError(
            f'data.tokenizer = "{name}" is not a tokenizer.{hint} It is "bytes", a path that ends in .tiktoken, or one '
            f"of tiktoken's encodings: {', '.join(sorted(known))}."
        )
    try:
        encoding = tiktoken.get_encoding(name)
    except (
        OSError,
        ValueError,
    ) as error:  # a failed download is an OSError, a damaged one a ValueError
        raise ValueError(
            f'data.tokenizer = "{name}": tiktoken could not fetch the ranks of this encoding, which it does not ship '
            f"({type(error).__name__}: {error}). Either run `{sys.executable} -c 'import tiktoken; "
            f'tiktoken.get_encoding("{name}")\'` on a machine with a network, with TIKTOKEN_CACHE_DIR set to a folder '
            f"that this machine sees, and set it here too; or learn a tokenizer of your own, offline, with "
            f"`{sys.executable} -m torchtitan_diloco.data.train_tokenizer`."
        ) from error
    if END_OF_DOCUMENT not in encoding.special_tokens_set:
        raise ValueError(
            f'data.tokenizer = "{name}" has no {END_OF_DOCUMENT} token to end a document with. Choose another one of '
            f"{', '.join(sorted(known))}."
        )
    return Tokenizer(
        name, encoding, pattern=name
    )  # the name stands for the pattern that belongs to it


def read_ranks(path: Path) -> dict[bytes, int]:
    """The ranks of a `.tiktoken` file: a line per token, its bytes in base64 and its rank 0, 1, 2, ..."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError as error:
        raise ValueError(
            f'data.tokenizer = "{path}" does not exist. Learn it with `{sys.executable} -m '
            f"torchtitan_diloco.data.train_tokenizer --source TEXT --vocab-size 32000 --out {path}`."
        ) from error
    except OSError as error:
        raise ValueError(f'data.tokenizer = "{path}" cannot be read: {error}') from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"{path}, line {number}: {line[:80]!r} is not a token in base64, a space and its rank"
            ) from error
        if rank != len(ranks):
            raise ValueError(f"{path}, line {number}: rank {rank} where {len(ranks)} should follow")
        if not token or token in ranks:
            raise ValueError(
                f"{path}, line {number}: token {token!r} is {'there twice' if token else 'empty'}"
            )
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"{path} has no token for {len(missing)} of the 256 bytes (the first is {missing[0]:#04x}), so it cannot "
            f"encode every text. Is the file complete?"
        )
    return ranks


def format_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """The content of a `.tiktoken` file."""
    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in by_rank)
