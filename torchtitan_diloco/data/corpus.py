"""From the `[data]` section to token shards: shard folders are opened, text is tokenised once.

The same text and settings give the same bytes, whatever the number of threads, and also if the job
was killed and started again: finished shards are kept, and their text is not tokenised again.
"""

import glob
import re
import shlex
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.config.schema import Data
from torchtitan_diloco.data.files import LOCK_NAME, aside_path, only_writer
from torchtitan_diloco.data.shards import (
    FORMAT_VERSION,
    INDEX_NAME,
    SPLITS,
    STARTED_NAME,
    Index,
    ShardWriter,
    Split,
    SplitIndex,
    TokenShards,
    read_index,
    write_index,
)
from torchtitan_diloco.data.text import (
    HUGGING_FACE_PREFIX,
    PIECE_CHARACTERS,
    STDLIB,
    Corpus,
    Piece,
    is_held_out,
    open_corpus,
    text_kind,
)
from torchtitan_diloco.data.tokenizer import Tokenizer, build_tokenizer, train_command
from torchtitan_diloco.utils import available_cores

DEFAULT_SHARD_TOKENS = 2**28  # half a gigabyte at two bytes a token

Encoded = tuple[int, npt.NDArray[np.uint32], bool, int]
"""Number of a piece, its tokens, whether they end a document, and the bytes of text so far."""

_JOB_PIECES = 32  # tokenised at once by a thread
_JOBS_AHEAD = 4  # per thread; bounds memory


def open_tokenizer(data: Data) -> Tokenizer:
    """Build the tokenizer of a config. The error for a missing file has all commands to make it."""
    path = Path(data.tokenizer).expanduser()
    if not data.tokenizer.endswith(".tiktoken") or path.exists():
        return build_tokenizer(data.tokenizer)
    in_shards = _is_shard_folder(data.corpus)
    source = data.source or ("TEXT" if in_shards else data.corpus)
    commands = [train_command(source, data.tokenizer)]
    if in_shards and not _is_finished(data.corpus):
        commands.append(prepare_command(source, data.tokenizer, data.corpus))
    raise ValueError(
        f'data.tokenizer = "{data.tokenizer}" does not exist ({path.absolute()}). Make it with'
        + "".join(f"\n    {command}" for command in commands)
    )


def open_split(data: Data, tokenizer: Tokenizer, split: Split) -> TokenShards:
    """Open the tokens of one split. `data.validation_corpus` replaces that for validation."""
    own, corpus = data.validation_corpus, data.corpus
    if split == "train" or not own:
        # With a corpus of its own for validation, all of this text is for training.
        fraction = 0.0 if own else data.validation_fraction
        return _open(data, "data.corpus", corpus, tokenizer, fraction, split)
    split = "train"
    if _is_shard_folder(own):
        # Validate on what the folder holds out; on all of it if that is nothing.
        index = Path(own).expanduser() / INDEX_NAME
        held_out = index.exists() and read_index(index).splits["validation"].tokens
        split = "validation" if held_out or own == corpus else "train"
    elif own == corpus:
        raise ValueError(
            f'data.validation_corpus = "{own}" is data.corpus itself, which is trained on; leave '
            f"it empty to hold out data.validation_fraction of the corpus"
        )
    return _open(data, "data.validation_corpus", own, tokenizer, 0.0, split)


def prepare_command(source: str, tokenizer: str, out: str) -> str:
    """Return the command line that prepares a folder, to print to a user."""
    options = ["--source", source, "--tokenizer", tokenizer, "--out", out]
    return shlex.join([sys.executable, "-m", "torchtitan_diloco.data.prepare", *options])


def _open(
    data: Data, key: str, spec: str, tokenizer: Tokenizer, fraction: float, split: Split
) -> TokenShards:
    if spec.startswith(HUGGING_FACE_PREFIX):
        out = "corpora/" + re.sub(r"\W+", "-", spec.removeprefix(HUGGING_FACE_PREFIX)).strip("-")
        raise ValueError(
            f'{key} = "{spec}": a Hugging Face dataset is prepared before the run. Prepare it with'
            f'\n    {prepare_command(spec, data.tokenizer, out)}\nand set {key} = "{out}".'
        )
    folder = Path(spec).expanduser()
    if not _is_shard_folder(spec):
        folder = _tokenise_once(data, key, spec, tokenizer, fraction)
    elif not _is_finished(spec):
        source = data.source if key == "data.corpus" else ""
        state = "is not finished" if folder.exists() else "does not exist"
        hint = "" if source else " (TEXT: what to tokenise, as in data.source)"
        raise ValueError(
            f'{key} = "{spec}" is a folder of token shards that {state} ({folder.absolute()}). '
            f"Prepare it{hint} with\n    {prepare_command(source or 'TEXT', data.tokenizer, spec)}"
            f"\nor set {key} to text: stdlib, files, a folder or a glob."
        )
    return TokenShards(folder, split, tokenizer)


def _is_shard_folder(spec: str) -> bool:
    """Return whether a corpus is, or is meant to be, a folder of token shards.

    A folder is one by its manifest. What does not exist, or is an empty folder, is meant as one if
    it is a single path without wildcards that does not end like a text file.
    """
    if spec == STDLIB or spec.startswith(HUGGING_FACE_PREFIX) or "," in spec:
        return False
    path = Path(spec).expanduser()
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()} - {LOCK_NAME}
        return not names or bool(names & {INDEX_NAME, STARTED_NAME})
    return not path.exists() and not glob.has_magic(spec) and text_kind(path) is None


def _is_finished(spec: str) -> bool:
    return (Path(spec).expanduser() / INDEX_NAME).exists()


def _tokenise_once(data: Data, key: str, spec: str, tokenizer: Tokenizer, fraction: float) -> Path:
    """Return the folder with the tokens of a text corpus, which one of several processes makes."""
    try:
        corpus = open_corpus(spec)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    made_of = f"{corpus.fingerprint[:8]}-{tokenizer.fingerprint[:8]}-{fraction:g}"
    name = f"{corpus.name}-{made_of}-v{FORMAT_VERSION}"
    folder = Path(data.cache_folder).expanduser() / name
    if not (folder / INDEX_NAME).exists():
        done = prepare(corpus, tokenizer, folder, validation_fraction=fraction, wait=True)
        if done.new_tokens:
            print(
                f"data: tokenised {spec} with {tokenizer.name} in {done.seconds:.1f} s: "
                f"{done.splits['train'].tokens:,} tokens to train on, "
                f"{done.splits['validation'].tokens:,} held out, kept in {folder}",
                flush=True,
            )
    return folder


# --- from text to shards ---


class Prepared(NamedTuple):
    """Result of `prepare`."""

    splits: dict[Split, SplitIndex]
    new_tokens: int
    """Tokens that this call made; 0: the folder was complete already."""
    seconds: float


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    max_tokens: int | None = None,
    threads: int | None = None,
    wait: bool = False,
) -> Prepared:
    """Write the shards of both splits, then the manifest. Keep a finished folder as it is.

    `wait`: for another process that writes the folder; otherwise that is an error.
    """
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
    }
    start, new_tokens, finished = time.monotonic(), 0, folder / INDEX_NAME
    with only_writer(folder, wait=wait):
        if finished.exists():
            index = read_index(finished)
            _refuse_other_settings(folder, index.settings, settings)
        else:
            index = _start_or_continue(folder, settings)
            writers = {split: ShardWriter(folder, split, index, shard_tokens) for split in SPLITS}
            try:
                new_tokens = _write(
                    writers, corpus, tokenizer, validation_fraction, max_tokens, threads
                )
            finally:
                for writer in writers.values():
                    writer.discard_partial()
            write_index(finished, index)
        (folder / STARTED_NAME).unlink(missing_ok=True)
    return Prepared(index.splits, new_tokens, time.monotonic() - start)


def _write(
    writers: dict[Split, ShardWriter],
    corpus: Corpus,
    tokenizer: Tokenizer,
    fraction: float,
    max_tokens: int | None,
    threads: int | None,
) -> int:
    """Tokenise all pieces that are not written yet. Return the number of new tokens."""
    train = writers["train"]
    done = {split: writer.end_piece for split, writer in writers.items()}
    missing = (
        (number, piece)
        for number, piece in enumerate(corpus.pieces())
        if number >= done[_split_of(number, fraction)]
    )
    new_tokens = 0
    encoded = _encode_all(missing, tokenizer, fraction, threads or available_cores())
    with closing(encoded), corpus.progress_bar("tokenising") as bar:
        for number, tokens, ends_text, bytes_read in encoded:
            enough = max_tokens is not None and train.tokens >= max_tokens
            if enough and number >= train.end_piece:
                break
            writers[_split_of(number, fraction)].add(number, tokens, ends_text)
            new_tokens += len(tokens)
            bar.set_postfix_str(f"{new_tokens / 1e6:,.1f} M tokens", refresh=False)
            bar.update(bytes_read - bar.n)
    for writer in writers.values():
        writer.finish_shard()
    return new_tokens


def _split_of(piece: int, fraction: float) -> Split:
    return "validation" if is_held_out(piece, fraction) else "train"


def _encode_all(
    pieces: Iterator[tuple[int, Piece]], tokenizer: Tokenizer, fraction: float, threads: int
) -> Generator[Encoded, None, None]:
    """Yield the pieces in order, encoded by threads: tiktoken releases the interpreter's lock."""

    def encode(job: list[tuple[int, Piece]]) -> list[Encoded]:
        result = []
        for number, piece in job:
            # Where the next piece goes to the other split, the document ends for this one.
            next_is_apart = _split_of(number, fraction) != _split_of(number + 1, fraction)
            ends_text = piece.ends_document or next_is_apart
            tokens = tokenizer.encode(piece.text)
            if ends_text:
                tokens = np.append(tokens, np.uint32(tokenizer.end_of_document))
            result.append((number, tokens, ends_text, piece.bytes_read))
        return result

    pool = ThreadPoolExecutor(threads)
    jobs: deque[Future[list[Encoded]]] = deque()
    try:
        while job := list(islice(pieces, _JOB_PIECES)):
            jobs.append(pool.submit(encode, job))
            if len(jobs) >= _JOBS_AHEAD * threads:
                yield from jobs.popleft().result()
        while jobs:
            yield from jobs.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_or_continue(folder: Path, settings: dict[str, Any]) -> Index:
    started = folder / STARTED_NAME
    if started.exists():
        index = read_index(started)
        _refuse_other_settings(folder, index.settings, settings)
        return index
    ours = (LOCK_NAME, aside_path(started).name)
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in ours)
    if foreign:
        raise ValueError(
            f"{folder} is not empty ({', '.join(foreign[:3])}); choose a new folder with --out"
        )
    index = Index(FORMAT_VERSION, settings, {split: SplitIndex() for split in SPLITS})
    write_index(started, index)
    return index


def _refuse_other_settings(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if "tokenizer_fingerprint" not in keys:  # another path to the same ranks
        keys = [key for key in keys if key != "tokenizer"]
    if keys:
        changes = [f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in keys]
        raise ValueError(
            f"{folder} was prepared with other settings: {'; '.join(changes)}. Use the same ones "
            f"to continue, or another folder."
        )
