"""From a corpus to a folder of token shards.

The same source and settings give the same bytes, whatever the number of threads, and also when the job was killed and
started again: finished shards are kept, and their pieces are read but not tokenised again.
"""

import json
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.data.corpora import Corpus, is_held_out
from torchtitan_diloco.data.files import LOCK_NAME, only_writer, write_whole
from torchtitan_diloco.data.progress import Progress
from torchtitan_diloco.data.shard_writer import ShardWriter
from torchtitan_diloco.data.shards import (
    MANIFEST_NAME,
    SPLITS,
    Split,
    read_manifest,
    write_manifest,
)
from torchtitan_diloco.data.text_files import PIECE_CHARACTERS, Piece
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.utils import available_cores

STARTED_NAME = "prepare.json"
"""Settings of a preparation that has not ended. Gone once `corpus.json` is there."""
DEFAULT_SHARD_TOKENS = 2**28  # half a gigabyte at two bytes a token

_JOB_CHARACTERS = (
    2 * PIECE_CHARACTERS
)  # many short documents are one job, which keeps the cost of a job small
_JOBS_AHEAD = 4  # per thread; bounds memory


@dataclass(frozen=True)
class Prepared:
    """What a preparation did."""

    tokens: dict[Split, int]
    documents: dict[Split, int]
    new_tokens: int
    """Tokens that this run made; 0: all was there already."""
    new_text_bytes: int
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
    """Writes the shards of both splits and then the manifest. A finished folder with the same settings stays as it is.

    Threads, not processes: tiktoken releases the interpreter's lock. `wait`: for another process that is writing
    there.
    """
    if not 0.0 <= validation_fraction <= 0.5:
        raise ValueError(f"--validation-fraction {validation_fraction:g} is not between 0 and 0.5")
    if shard_tokens < 1 or (max_tokens is not None and max_tokens < 1):
        raise ValueError(
            f"--shard-tokens {shard_tokens} and --max-tokens {max_tokens} must be at least 1"
        )
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
    with only_writer(folder, wait=wait):
        if (folder / MANIFEST_NAME).exists():
            _refuse_other_settings(folder, read_manifest(folder)["settings"], settings)
            (folder / STARTED_NAME).unlink(missing_ok=True)  # we were killed between the two
            return _report(folder, _Made(), 0.0)
        _start_or_continue(folder, settings)
        progress = Progress(f"tokenising {corpus.spec}", corpus.total_bytes)
        writers = {split: ShardWriter(folder, split, tokenizer, shard_tokens) for split in SPLITS}
        try:
            made = _fill(
                writers, corpus, tokenizer, validation_fraction, max_tokens, threads, progress
            )
        except BaseException:
            for writer in writers.values():
                writer.discard_partial()
            raise
        finally:
            progress.finish()
        write_manifest(folder, settings)
        (folder / STARTED_NAME).unlink()
        return _report(folder, made, progress.seconds())


class _Made(NamedTuple):
    tokens: int = 0
    text_bytes: int = 0


def _fill(
    writers: dict[Split, ShardWriter],
    corpus: Corpus,
    tokenizer: Tokenizer,
    fraction: float,
    max_tokens: int | None,
    threads: int | None,
    progress: Progress,
) -> _Made:
    train = writers["train"]
    done = {split: writer.end_piece for split, writer in writers.items()}
    wanted = (
        (number, piece)
        for number, piece in enumerate(corpus.pieces())
        if number >= done["validation" if is_held_out(number, fraction) else "train"]
    )
    made_tokens = made_bytes = 0
    with closing(
        _tokenized(wanted, tokenizer, fraction, threads or available_cores())
    ) as coded_pieces:
        for coded in coded_pieces:
            if (
                max_tokens is not None
                and train.tokens >= max_tokens
                and coded.number >= train.end_piece
            ):
                break
            split: Split = "validation" if is_held_out(coded.number, fraction) else "train"
            writers[split].add(coded.number, coded.tokens, coded.ends_text)
            made_tokens += len(coded.tokens)
            made_bytes += coded.text_bytes
            progress.update(coded.bytes_read, f"{made_tokens / 1e6:,.1f} M tokens")
    for writer in writers.values():
        writer.finish_shard()
    return _Made(made_tokens, made_bytes)


class _Coded(NamedTuple):
    number: int
    tokens: npt.NDArray[np.uint32]
    ends_text: bool
    text_bytes: int
    bytes_read: int


def _tokenized(
    pieces: Iterator[tuple[int, Piece]], tokenizer: Tokenizer, fraction: float, threads: int
) -> Generator[_Coded, None, None]:
    """The pieces in their order, tokenised on several threads."""
    pool = ThreadPoolExecutor(threads)
    jobs: deque[Future[list[_Coded]]] = deque()
    try:
        for job in _grouped(pieces):
            jobs.append(
                pool.submit(lambda job: [_encode(*item, tokenizer, fraction) for item in job], job)
            )
            if len(jobs) >= _JOBS_AHEAD * threads:
                yield from jobs.popleft().result()
        while jobs:
            yield from jobs.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _grouped(pieces: Iterator[tuple[int, Piece]]) -> Iterator[list[tuple[int, Piece]]]:
    job: list[tuple[int, Piece]] = []
    characters = 0
    for item in pieces:
        job.append(item)
        characters += len(item[1].text)
        if characters >= _JOB_CHARACTERS:
            yield job
            job, characters = [], 0
    if job:
        yield job


def _encode(number: int, piece: Piece, tokenizer: Tokenizer, fraction: float) -> _Coded:
    # A document also ends, for one split, where its next piece goes to the other one: what follows there in the split
    # is not its continuation.
    ends_text = piece.ends_document or is_held_out(number, fraction) != is_held_out(
        number + 1, fraction
    )
    tokens = tokenizer.encode(piece.text)
    if ends_text:
        tokens = np.append(tokens, np.uint32(tokenizer.end_of_document))
    text_bytes = len(piece.text.encode("utf-8", "surrogatepass"))
    return _Coded(number, tokens, ends_text, text_bytes, piece.bytes_read)


def _start_or_continue(folder: Path, settings: dict[str, Any]) -> None:
    started = folder / STARTED_NAME
    if started.exists():
        try:
            before = json.loads(started.read_bytes())
        except ValueError as error:
            raise ValueError(
                f"cannot read {started}: {error}; delete {folder} and start again"
            ) from error
        _refuse_other_settings(folder, before, settings)
        return
    foreign = sorted(path.name for path in folder.iterdir() if path.name != LOCK_NAME)
    foreign = [name for name in foreign if not name.startswith(f".{STARTED_NAME}")]
    if foreign:
        raise ValueError(
            f"{folder} is not empty ({', '.join(foreign[:3])}); choose a new folder with --out"
        )
    write_whole(started, json.dumps(settings, indent=2).encode())


def _refuse_other_settings(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    # The same ranks under another path are the same tokenizer, and a source is what its files are.
    if "tokenizer_fingerprint" not in keys:
        keys = [key for key in keys if key != "tokenizer"]
    if keys:
        differences = "; ".join(
            f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in keys
        )
        raise ValueError(
            f"{folder} was prepared with other settings: {differences}. Use the same ones to continue, another folder "
            f"to start afresh, or delete this one."
        )


def _report(folder: Path, made: _Made, seconds: float) -> Prepared:
    splits = read_manifest(folder)["splits"]
    return Prepared(
        tokens={split: splits[split]["tokens"] for split in SPLITS},
        documents={split: splits[split]["documents"] for split in SPLITS},
        new_tokens=made.tokens,
        new_text_bytes=made.text_bytes,
        seconds=seconds,
    )
