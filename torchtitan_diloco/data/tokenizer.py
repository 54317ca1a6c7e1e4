"""Text to tokens and back: bytes, an encoding of tiktoken, or a `tokenizer.json`.

Train one of these on the beginning of a corpus, as byte-level BPE like GPT-2's:

.venv/bin/torchtitan-diloco tokenizer --source stdlib --vocab-size 2048 --out outputs/own.json
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken

from torchtitan_diloco.base.registry import add_imports_option
from torchtitan_diloco.base.user import Parser, UserError, command_line, installed, paths_of_option
from torchtitan_diloco.data.text import TEXT_FIELD, open_source, sources_text, whole_number

END_OF_DOCUMENT = "<|endoftext|>"
ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|im_end|>")
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>")
FEWEST = 257
"""Smallest vocabulary that can be trained."""
LARGEST_VOCABULARY = 2**24
"""Largest vocabulary that can be trained: memory is reserved for it."""
USUAL = 32_000
"""Vocabulary that is trained by default."""

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
    begin_name: str | None = None
    file: Path | None = None
    """The `tokenizer.json`."""
    encode: Callable[[str], Ids]
    """Encodes text without adding tokens. Special tokens in it are ordinary text."""
    decode: Callable[[list[int]], str]
    """Bytes that are not UTF-8 become U+FFFD."""

    def text_bytes(self, ids: list[int]) -> int:
        """Return the bytes of the text of some tokens. The begin and end of a document have none.
        A character that is cut at either end may count a byte or two too many."""
        marks = self.end_of_document, self.begin_of_document
        return len(self.decode([token for token in ids if token not in marks]).encode())


def build_tokenizer(spec: str) -> Tokenizer:
    """Build `bytes`, a named encoding of tiktoken, or the tokenizer of a `tokenizer.json`."""
    if spec == "bytes":
        return _bytes()
    return _named_encoding(spec) if spec in tiktoken.list_encoding_names() else _from_file(spec)


def _fingerprint(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _join(tokens: Iterable[bytes | None]) -> str:
    unknown = "\N{REPLACEMENT CHARACTER}".encode()
    known = (unknown if token is None else token for token in tokens)
    return b"".join(known).decode(errors="replace")


def _bytes() -> Tokenizer:
    table = {256: END_OF_DOCUMENT.encode()} | {byte: bytes([byte]) for byte in range(256)}
    return Tokenizer(
        name="bytes",
        fingerprint=_fingerprint(b"bytes"),
        vocab_size=257,
        end_of_document=256,
        encode=lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint32),
        decode=lambda ids: _join(table.get(token) for token in ids),
    )


def _named_encoding(name: str) -> Tokenizer:
    try:
        encoding = tiktoken.get_encoding(name)  # downloads it once
        end = encoding.encode_single_token(END_OF_DOCUMENT)
    # A download that failed or is damaged, or a missing end-of-document token (KeyError).
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f'data.tokenizer = "{name}" cannot be loaded ({_last_cause(error)}): copy it from a '
            "machine with a network (docs/data-and-models.md#tokenizers), or use a tokenizer.json"
        ) from error

    def token(number: int) -> bytes | None:
        try:
            return encoding.decode_single_token_bytes(number)
        except KeyError:  # there are gaps between the special tokens
            return None

    return Tokenizer(
        name=name,
        fingerprint=_fingerprint(name.encode()),
        vocab_size=encoding.max_token_value + 1,
        end_of_document=end,
        encode=lambda text: encoding.encode_to_numpy(text, disallowed_special=()),
        decode=lambda ids: _join(map(token, ids)),
    )


def _last_cause(error: BaseException) -> str:
    """Describe the error at the end of a chain of errors, each of which was caused by the next."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {error}"


def _from_file(spec: str) -> Tokenizer:
    path = Path(spec).expanduser()
    if not path.is_file():
        names = ["bytes", *tiktoken.list_encoding_names()]
        raise UserError(
            f'data.tokenizer = "{spec}" is neither a file nor one of {", ".join(names)}: train a '
            "tokenizer.json (docs/data-and-models.md#tokenizers), or run "
            f"{installed('hf')} download OWNER/MODEL --local-dir {path.parent}"
        )
    import tokenizers

    try:
        content = path.read_bytes()
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises nothing more special
        raise UserError(
            f'data.tokenizer = "{spec}" is not a tokenizer.json ({error}): give one of Hugging '
            "Face, or train one (docs/data-and-models.md#tokenizers)"
        ) from error
    # A file may hold a limit of the length that its model was used with.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    end = _find_mark(spec, tokenizer, ENDS)
    if end is None:
        raise UserError(
            f'data.tokenizer = "{spec}" has no token that ends a document: add one of '
            f"{', '.join(ENDS)} to its special tokens"
        )
    begin = _find_mark(spec, tokenizer, BEGINS)
    # The threads of `prepare` share the work, and processes may be forked after it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def encode(text: str) -> Ids:
        # Unlike `encode`, this releases the GIL.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, np.uint32)

    return Tokenizer(
        name=spec,
        fingerprint=_fingerprint(content + f" {end} {begin}".encode()),
        vocab_size=max(vocabulary.values()) + 1,
        end_of_document=vocabulary[end],
        end_name=end,
        begin_of_document=None if begin is None else vocabulary[begin],
        begin_name=begin,
        file=path,
        encode=encode,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
    )


def _find_mark(spec: str, tokenizer: Any, names: Sequence[str]) -> str | None:
    """Return the token of a `tokenizer.json` that ends or begins a document, by its known names.

    Only special tokens count, unless none of the known ones is special: other added tokens may
    stand for text, such as the HTML tag `</s>`. If a text can contain the token, a document has no
    begin, and without an end, raise.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    is_special = {
        token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()
    }
    known = [name for name in names if name in vocabulary]
    marks = [name for name in known if is_special.get(name)] or known
    for name in marks:
        if vocabulary[name] not in tokenizer.encode(name, add_special_tokens=False).ids:
            return name
    if not marks or names is BEGINS:
        return None  # a document needs no begin
    others = ", ".join(name for name in names if name not in vocabulary)
    remedy = f"add one of {others} to its special tokens"
    if is_special.get(marks[0]) is False:
        remedy = f"mark it as special in the added_tokens of the file, or {remedy}"
    raise UserError(
        f'data.tokenizer = "{spec}" encodes the text "{marks[0]}" as its token that ends a '
        f"document: {remedy}"
    )


# --- the command ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog=command_line("tokenizer"), description="Train a tokenizer on a corpus.")
    add = parser.add_argument
    add("--source", required=True, type=paths_of_option, help=sources_text())
    add_imports_option(parser)
    add("--out", required=True, type=Path, help="tokenizer.json to write")
    add("--vocab-size", type=whole_number, default=USUAL, help=f"default {USUAL}")
    pieces = "number of pieces of at most 32,768 characters to read (default 1e6)"
    add("--pieces", type=whole_number, default=1_000_000, help=pieces)
    field = f"field of the text in JSON lines and datasets (default {TEXT_FIELD})"
    add("--text-field", default=TEXT_FIELD, metavar="NAME", help=field)
    options = parser.parse_args(arguments)
    try:
        if options.vocab_size < FEWEST:
            reason = f"give at least {FEWEST}, the bytes and {END_OF_DOCUMENT}"
            raise UserError(f"--vocab-size {options.vocab_size}: {reason}")
        if options.vocab_size > LARGEST_VOCABULARY:
            raise UserError(
                f"--vocab-size {options.vocab_size}: give at most {LARGEST_VOCABULARY:,}"
            )
        if options.out.is_file():
            raise UserError(f"--out {options.out} exists: give another path, or delete it")
        corpus = open_source(options.source, options.text_field)
        texts = (piece.text for piece in islice(corpus.pieces(), options.pieces))
        content, size = train_tokenizer(texts, options.vocab_size)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(content, encoding="utf-8")
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    except OSError as error:
        reason = f"cannot be written ({error.strerror}): give the path of a new file"
        parser.exit(2, f"error: --out {options.out} {reason}\n")
    print(f"wrote {options.out}: {size:,} tokens")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tuple[str, int]:
    """Return a tokenizer.json, and the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True), tokenizer.get_vocab_size()
