"""Text to tokens and back: bytes, or a `tokenizer.json`."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.log import UserError, installed

END_OF_DOCUMENT = "<|endoftext|>"
ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|im_end|>")
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>")

Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    name: str
    """Value of `data.tokenizer`."""
    fingerprint: str
    """Equal for tokenizers that give the same ids for every text."""
    vocab_size: int
    """Ids are 0 ... vocab_size - 1, including special tokens."""
    end_of_document: int
    end_name: str = END_OF_DOCUMENT
    begin_of_document: int | None = None
    """Token that may precede a document, as in Llama 3."""
    file: Path | None = None
    """The `tokenizer.json`."""
    encode: Callable[[str], Ids]
    """Encodes text without adding tokens. Special tokens in it are ordinary text."""
    decode: Callable[[list[int]], str]
    """Bytes that are not UTF-8 become U+FFFD."""


def build_tokenizer(spec: str) -> Tokenizer:
    """Build `bytes`, or the tokenizer of a `tokenizer.json`."""
    return _bytes() if spec == "bytes" else _from_file(spec)


def _fingerprint(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _bytes() -> Tokenizer:
    unknown = "\N{REPLACEMENT CHARACTER}".encode()

    def decode(ids: list[int]) -> str:
        table = {256: END_OF_DOCUMENT.encode()} | {byte: bytes([byte]) for byte in range(256)}
        return b"".join(table.get(token, unknown) for token in ids).decode(errors="replace")

    return Tokenizer(
        name="bytes",
        fingerprint=_fingerprint(b"bytes"),
        vocab_size=257,
        end_of_document=256,
        encode=lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint32),
        decode=decode,
    )


def _from_file(spec: str) -> Tokenizer:
    path = Path(spec).expanduser()
    if not path.is_file():
        raise UserError(
            f'data.tokenizer = "{spec}" is neither "bytes" nor a file: train a tokenizer.json '
            f"(docs/data-and-models.md#tokenizers), or run {installed('hf')} download OWNER/MODEL "
            f"--local-dir {path.parent}"
        )
    import tokenizers

    try:
        content = path.read_bytes()
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises nothing more special
        raise UserError(f'data.tokenizer = "{spec}" is no tokenizer.json: {error}') from error
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    end = next((name for name in ENDS if name in vocabulary), None)
    if end is None:
        raise UserError(
            f'data.tokenizer = "{spec}" has no token that ends a document: add one of '
            f"{', '.join(ENDS)} to its special tokens"
        )
    # A file may hold a limit of the length that its model was used with.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    # The threads of `prepare` share the work, and processes may be forked after it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def encode(text: str) -> Ids:
        # Unlike `encode`, this releases the GIL.
        (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(found.ids, np.uint32)

    return Tokenizer(
        name=spec,
        fingerprint=_fingerprint(content),
        vocab_size=max(vocabulary.values()) + 1,
        end_of_document=vocabulary[end],
        end_name=end,
        begin_of_document=next((vocabulary[one] for one in BEGINS if one in vocabulary), None),
        file=path,
        encode=encode,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
    )
