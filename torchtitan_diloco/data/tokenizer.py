"""Text to tokens and back: bytes, a `tokenizer.json`, or a named encoding of tiktoken."""

import difflib
import hashlib
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiktoken

from torchtitan_diloco.log import UserError, install_command, installed

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
    encode_text: Callable[[str], Ids]
    """Encode valid Unicode without adding tokens. Special tokens in it are ordinary text."""
    decode_ids: Callable[[list[int]], str]

    def encode(self, text: str) -> Ids:
        """Encode text. A lone surrogate becomes U+FFFD."""
        try:
            return self.encode_text(text)
        except (UnicodeEncodeError, TypeError):  # the latter from tokenizers
            valid = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self.encode_text(valid)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Decode ids. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_ids([int(token) for token in ids])


def build_tokenizer(spec: str) -> Tokenizer:
    """Build `bytes`, the tokenizer of a `.json` file, or a named tiktoken encoding."""
    if spec == "bytes":
        return _bytes()
    return _from_file(spec) if spec.endswith(".json") else _named_encoding(spec)


def _fingerprint(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _join(tokens: Sequence[bytes | None]) -> str:
    unknown = "\N{REPLACEMENT CHARACTER}".encode()
    return b"".join(unknown if one is None else one for one in tokens).decode(errors="replace")


def _bytes() -> Tokenizer:
    table = dict(enumerate([*(bytes([byte]) for byte in range(256)), END_OF_DOCUMENT.encode()]))
    return Tokenizer(
        name="bytes",
        fingerprint=_fingerprint(b"bytes"),
        vocab_size=257,
        end_of_document=256,
        encode_text=lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint32),
        decode_ids=lambda ids: _join([table.get(token) for token in ids]),
    )


def _from_file(spec: str) -> Tokenizer:
    path = Path(spec).expanduser()
    if not path.is_file():
        raise UserError(
            f'data.tokenizer = "{spec}" is not a file ({path.absolute()}). Train one as in '
            "docs/data-and-models.md#train-a-tokenizer, or download that of a model with\n    "
            + _download_command(path)
        )
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            f'data.tokenizer = "{spec}" needs the package tokenizers: '
            f"{install_command('tokenizer')}"
        ) from error
    try:
        content = path.read_bytes()
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises nothing more special
        raise UserError(
            f'data.tokenizer = "{spec}" is no tokenizer.json that the package tokenizers reads: '
            f"{error}"
        ) from error
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    end = next((name for name in ENDS if name in vocabulary), None)
    if end is None:
        raise UserError(
            f'data.tokenizer = "{spec}" has none of the tokens {", ".join(ENDS)} to end a '
            "document: add one of them to its special tokens"
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
        encode_text=encode,
        decode_ids=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
    )


def _download_command(path: Path) -> str:
    """Return the command that downloads the model with this `tokenizer.json`."""
    folder = path.parent
    owner = "meta-llama" if folder.name.startswith("Llama-") else "OWNER"
    command = [
        installed("hf"),
        "download",
        f"{owner}/{folder.name or 'MODEL'}",
        "--local-dir",
        str(folder),
    ]
    return shlex.join(command)


def _named_encoding(name: str) -> Tokenizer:
    known = tiktoken.list_encoding_names()
    if name not in known:
        nearest = difflib.get_close_matches(name, ["bytes", *known], n=1, cutoff=0.5)
        hint = f' Did you mean "{nearest[0]}"?' if nearest else ""
        raise UserError(
            f'data.tokenizer = "{name}" is not a tokenizer.{hint} Use "bytes", a path that ends in '
            f".json, or an encoding of tiktoken: {', '.join(sorted(known))}."
        )
    try:
        encoding = tiktoken.get_encoding(name)
        end = encoding.encode_single_token(END_OF_DOCUMENT)
    # A download that failed or is damaged, or a missing end-of-document token (KeyError).
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f'data.tokenizer = "{name}": tiktoken could not load this encoding with an '
            f"{END_OF_DOCUMENT} token ({type(error).__name__}: {error}). Copy it from a machine "
            "with a network (docs/data-and-models.md#tokenizers), or use a tokenizer.json"
        ) from error

    def token(number: int) -> bytes | None:
        try:
            return encoding.decode_single_token_bytes(number)
        except KeyError:  # named encodings have gaps between their special tokens
            return None

    return Tokenizer(
        name=name,
        fingerprint=_fingerprint(name.encode()),
        vocab_size=encoding.max_token_value + 1,
        end_of_document=end,
        encode_text=lambda text: encoding.encode_to_numpy(text, disallowed_special=()),
        decode_ids=lambda ids: _join([token(number) for number in ids]),
    )
