"""Open the token shards of the `[data]` section, and tokenise text into shards.

.venv/bin/torchtitan-diloco prepare --source stdlib --tokenizer bytes --out corpora/stdlib

The same text and settings give the same bytes, for any number of threads. After a kill, the same
command continues after the finished shards.
"""

import argparse
import glob
import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.config.schema import WORKER_FIELD, Data
from torchtitan_diloco.data.clusters import write_clusters
from torchtitan_diloco.data.shards import (
    FORMAT_VERSION,
    INDEX_NAME,
    SPLITS,
    STARTED_NAME,
    ShardWriter,
    Split,
    TokenShards,
    only_writer,
    read_index,
    read_or_begin_index,
    what_is_missing,
)
from torchtitan_diloco.data.text import (
    HUGGING_FACE_PREFIX,
    PIECE_CHARACTERS,
    SOURCES,
    STDLIB,
    TEXT_FIELD,
    Corpus,
    Dataset,
    Piece,
    is_held_out,
    open_corpus,
    text_kind,
    whole_number,
)
from torchtitan_diloco.data.tokenizer import BEGINS, Tokenizer, build_tokenizer
from torchtitan_diloco.hardware import available_cores
from torchtitan_diloco.log import Parser, UserError, command_line

DEFAULT_SHARD_TOKENS = 2**28  # half a gigabyte at two bytes a token
_PIECES_AHEAD = 128  # for each thread; bounds memory

Tokenised = tuple[int, Split, npt.NDArray[np.uint32], bool]
"""Number of a piece, its split, its tokens, and whether a document of the split ends with it."""


def open_corpora(
    data: Data, tokenizer: Tokenizer, split: Split, worker: int
) -> dict[str, TokenShards]:
    """Open the tokens of one split of all corpora of a worker, by their names in the settings.

    With a validation corpus, that one is the only one to validate on.
    """
    if split == "validation" and data.validation_corpus:
        return {data.validation_corpus: open_split(data, tokenizer, split, worker=worker)}
    return {
        name: open_split(data, tokenizer, split, name=name, worker=worker) for name in data.corpora
    }


def open_split(
    data: Data, tokenizer: Tokenizer, split: Split, *, name: str = "", worker: int = 0
) -> TokenShards:
    """Open the tokens of one split of a corpus, by default of the first of the run."""
    name = name or data.corpora[0]
    own = data.validation_corpus
    if split == "train" or not own:
        # With a corpus of its own for validation, all of this text is for training.
        fraction = 0.0 if own else data.validation_fraction
        folder = _folder(data, corpus_key(data), name, worker, tokenizer, fraction)
        return TokenShards(folder, split, tokenizer)
    is_trained_on = own in data.corpora
    if is_trained_on and not _is_shard_folder(own_name(own, worker)):
        raise UserError(
            f'data.validation_corpus = "{own}" is {corpus_key(data)}, which is trained on: leave '
            "it empty to hold out data.validation_fraction of it"
        )
    folder = _folder(data, "data.validation_corpus", own, worker, tokenizer, fraction=0.0)
    # Validate on the held-out split of the folder, or on all of it if that split is empty.
    held_out = read_index(folder / INDEX_NAME).splits["validation"].tokens
    return TokenShards(folder, "validation" if held_out or is_trained_on else "train", tokenizer)


def corpus_key(data: Data) -> str:
    """Return the setting that names the corpora to train on."""
    if data.mixture:
        return "data.mixture"
    return "data.phases" if data.phases else "data.corpus"


def own_name(name: str, worker: int) -> str:
    """Return the name of a corpus for a worker."""
    return name.replace(WORKER_FIELD, str(worker))


def find_corpus(
    data: Data, key: str, spec: str, options: Callable[[], list[str]] = list
) -> Corpus | Path:
    """Return the text, or the folder of shards, that a setting names. If neither is there, raise an
    error that says how to prepare it, with `options`."""
    try:
        if spec.startswith(HUGGING_FACE_PREFIX):
            Dataset.parse(spec)
        elif not _is_shard_folder(spec):
            return open_corpus(spec)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    folder = Path(spec).expanduser()
    if (folder / INDEX_NAME).exists():
        return folder
    raise _unprepared(data, key, spec, options)


def _unprepared(data: Data, key: str, spec: str, options: Callable[[], list[str]]) -> UserError:
    """Return the error that says how to prepare a dataset, or a missing folder of shards."""
    source = data.source if key == "data.corpus" else ""
    if spec.startswith(HUGGING_FACE_PREFIX):
        source, out = spec, f"corpora/{_slug(spec)}"
        problem = f'is read from token shards only: set it to "{out}" after'
    else:
        out, reason = spec, what_is_missing(Path(spec).expanduser())
        problem = f"{reason}: correct the path, set it to text, such as stdlib, or prepare it:"
        if source.startswith(HUGGING_FACE_PREFIX):
            Dataset.parse(source)
    words = ["--source", source or "TEXT", "--tokenizer", data.tokenizer, "--out", out]
    words += options() if key == "data.corpus" else []
    command = f"{command_line('prepare')} {shlex.join(words)}"
    return UserError(f'{key} = "{spec}" {problem}\n    {command}')


def _slug(spec: str) -> str:
    return re.sub(r"\W+", "-", spec.removeprefix(HUGGING_FACE_PREFIX)).strip("-")


def _folder(
    data: Data, key: str, name: str, worker: int, tokenizer: Tokenizer, fraction: float
) -> Path:
    """Return the shard folder of a corpus. Tokenise the corpus if it is text."""
    corpus = find_corpus(data, key, own_name(name, worker))
    if isinstance(corpus, Path):
        return corpus
    made_of = f"{corpus.fingerprint[:8]}-{tokenizer.fingerprint[:8]}-{fraction:g}"
    name = f"{_slug(corpus.spec)[-40:]}-{made_of}-v{FORMAT_VERSION}"
    folder = Path(data.cache_folder).expanduser() / name
    if not (folder / INDEX_NAME).exists():
        prepare(corpus, tokenizer, folder, validation_fraction=fraction, wait=True)
    return folder


def _is_shard_folder(spec: str) -> bool:
    """Return whether a corpus is meant to be a folder of token shards.

    This also holds for an empty folder, and for a single missing path without wildcards or the
    suffix of a text file.
    """
    if spec == STDLIB or "," in spec:
        return False
    path = Path(spec).expanduser()
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()} - {".lock"}
        return not names or bool(names & {INDEX_NAME, STARTED_NAME})
    return not path.exists() and not glob.has_magic(spec) and text_kind(path) is None


# --- prepare --------------------------------------------------------------------------------------


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    max_tokens: int | None = None,
    begin: bool = False,
    wait: bool = False,
) -> bool:
    """Write the shards of both splits, then the index. Return whether there was anything to do.

    `begin`: write the tokenizer's begin token before each document. `wait`: wait for another
    process that is writing the folder, instead of raising an error.
    """
    begin_token = tokenizer.begin_of_document if begin else None
    if begin and begin_token is None:
        raise UserError(f"--begin-token: {tokenizer.name} has none of {', '.join(BEGINS)}")
    settings = {
        "source": corpus.spec,
        "source_fingerprint": corpus.fingerprint,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "validation_fraction": validation_fraction,
        "shard_tokens": shard_tokens,
        "max_tokens": max_tokens,
        "piece_characters": PIECE_CHARACTERS,
        "begin_token": begin_token,
    }
    start, new_tokens = time.monotonic(), 0
    with only_writer(folder, wait=wait):
        index = read_or_begin_index(folder, settings)
        if (folder / INDEX_NAME).exists():
            return False
        writers = {split: ShardWriter(folder, split, index, shard_tokens) for split in SPLITS}
        done = {split: writer.last_piece for split, writer in writers.items()}
        pieces = _tokenised(corpus, tokenizer, done, validation_fraction, begin_token)
        for number, split, tokens, ends_document in pieces:
            enough = max_tokens is not None and writers["train"].tokens >= max_tokens
            # After a restart, earlier pieces may be missing in the other split.
            if enough and number > writers["train"].last_piece:
                break
            writers[split].add(number, tokens, ends_document)
            new_tokens += len(tokens)
        for writer in writers.values():
            writer.finish_shard()
        (folder / STARTED_NAME).rename(folder / INDEX_NAME)
    seconds = time.monotonic() - start
    train, held_out = index.splits["train"], index.splits["validation"]
    print(
        f"data: tokenised {corpus.spec} with {tokenizer.name} in {seconds:.1f} s "
        f"({new_tokens / seconds / 1e6:.2f} M tokens/s): {train.tokens:,} tokens in "
        f"{train.documents:,} documents to train on, {held_out.tokens:,} held out, in {folder}",
        flush=True,
    )
    return True


def _tokenised(
    corpus: Corpus,
    tokenizer: Tokenizer,
    done: dict[Split, int],
    fraction: float,
    begin_token: int | None,
) -> Iterator[Tokenised]:
    """Yield the pieces of the corpus in order, after the last one of each split that is done."""

    def split_of(number: int) -> Split:
        return "validation" if is_held_out(number, fraction) else "train"

    def tokenise(number: int, piece: Piece, begins: bool) -> Tokenised:
        split, tokens = split_of(number), tokenizer.encode(piece.text)
        # Where the next piece goes to the other split, the document ends for this one.
        ends = piece.ends_document or split != split_of(number + 1)
        if ends:
            tokens = np.append(tokens, np.uint32(tokenizer.end_of_document))
        if begin_token is not None and (begins or split != split_of(number - 1)):
            tokens = np.insert(tokens, 0, begin_token)
        return number, split, tokens, ends

    threads, pending = available_cores(), deque[Future[Tokenised]]()
    begins_document = True
    with ThreadPoolExecutor(threads) as pool:  # tokenizers release the GIL
        for number, piece in enumerate(corpus.pieces()):
            if number > done[split_of(number)]:
                pending.append(pool.submit(tokenise, number, piece, begins_document))
            begins_document = piece.ends_document
            if len(pending) == _PIECES_AHEAD * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# --- the command ---


def share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 0.5:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 0.5")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog=command_line("prepare"),
        description="Tokenise a corpus into a folder of token shards.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--source", help=f"{SOURCES}; not needed to divide finished shards into clusters")
    tokenizers = "bytes, an encoding of tiktoken such as gpt2, or a tokenizer.json"
    add("--tokenizer", default="bytes", help=tokenizers)
    add("--out", required=True, type=Path, help="folder of the shards")
    add("--validation-fraction", type=share, default=0.005, help="share held out")
    shard = "a shard is closed once it has so many tokens"
    add("--shard-tokens", type=whole_number, default=DEFAULT_SHARD_TOKENS, help=shard)
    add("--max-tokens", type=whole_number, help="stop at so many tokens to train on")
    begin = "write the tokenizer's begin token before each document, as Llama 3 was trained"
    add("--begin-token", action="store_true", help=begin)
    field = "field of the text in JSON lines and data sets"
    add("--text-field", default=TEXT_FIELD, metavar="NAME", help=field)
    clusters = "also write so many corpora OUT-0, OUT-1, ..., each with documents that are alike"
    add("--clusters", type=whole_number, metavar="NUMBER", help=clusters)
    options = parser.parse_args(arguments)
    if not options.source and not options.clusters:
        parser.error("--source is missing")
    try:
        tokenizer = build_tokenizer(options.tokenizer)
        done = bool(options.source) and prepare(
            open_corpus(options.source, options.text_field),
            tokenizer,
            options.out,
            validation_fraction=options.validation_fraction,
            shard_tokens=options.shard_tokens,
            max_tokens=options.max_tokens,
            begin=options.begin_token,
        )
        if options.clusters:
            done |= write_clusters(options.out, tokenizer, options.clusters)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"\ninterrupted; the same command continues {options.out}\n")
    if not done:
        print(f"{options.out} was complete already")


if __name__ == "__main__":
    main()
