"""Tokenize text into shards.

.venv/bin/torchtitan-diloco prepare --source stdlib --tokenizer bytes --out corpora/stdlib

The same text and settings give the same bytes, for any number of processes, and however often the
command was killed and started again.
"""

import argparse
import math
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.hardware import available_cores
from torchtitan_diloco.base.registry import add_imports_option
from torchtitan_diloco.base.user import Parser, UserError, command_line, paths_of_option
from torchtitan_diloco.data.clusters import cluster_folders, write_clusters
from torchtitan_diloco.data.pieces import PIECE_CHARACTERS, Corpus, Position, Reading
from torchtitan_diloco.data.progress import Amount, Progress
from torchtitan_diloco.data.shards import (
    INDEX_NAME,
    SPLITS,
    STARTED_NAME,
    Index,
    ShardWriter,
    describe_empty_validation,
    only_writer,
    read_index,
    read_or_begin_index,
    write_index,
)
from torchtitan_diloco.data.text import TEXT_FIELD, open_source, sources_text, whole_number
from torchtitan_diloco.data.tokenizer import BEGINS, Ids, Tokenizer, build_tokenizer
from torchtitan_diloco.data.tokenizing import (
    MOST_PROCESSES,
    Batch,
    Encoding,
    read_batches,
    tokenize,
    usual_processes,
)

DEFAULT_SHARD_TOKENS = 2**28  # half a gigabyte at two bytes a token
_RECORD_TOKENS = 2**24
"""After so many tokens, what is written of the shards is recorded, too."""


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    max_tokens: int | None = None,
    begin: bool = False,
    processes: int | None = None,
    wait: bool = False,
) -> bool:
    """Write the shards of both splits, then the index. Return whether there was anything to do.

    `begin`: write the tokenizer's begin token before each document. `processes`: tokenize in so
    many, None for threads of this one. `wait`: wait for another process that is writing the folder,
    instead of raising an error.
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
    start = time.monotonic()
    with only_writer(folder, wait=wait):
        index = read_or_begin_index(folder, settings)
        if (folder / INDEX_NAME).exists():
            (folder / STARTED_NAME).unlink(missing_ok=True)  # of a start that was killed before
            return False
        writing = _Writing(folder, index, corpus)
        writing.write(Encoding(tokenizer, begin_token), processes)
        writing.finish()
    seconds = time.monotonic() - start
    train = index.splits["train"]
    held_out = index.splits["validation"]
    print(
        f"data: tokenized {corpus.spec} with {tokenizer.name} in {seconds:.1f} s "
        f"({writing.new_tokens / seconds / 1e6:.2f} M tokens/s): {train.tokens:,} tokens in "
        f"{counted(train.documents, 'document')} to train on, {held_out.tokens:,} held out, in "
        f"{folder}",
        flush=True,
    )
    return True


class _Writing:
    """A corpus that is being written, from where an earlier start has recorded that it was."""

    def __init__(self, folder: Path, index: Index, corpus: Corpus) -> None:
        self._folder = folder
        self._index = index
        self._corpus = corpus
        self._shard_tokens = index.settings["shard_tokens"]
        self._max_tokens = index.settings["max_tokens"]
        self._writers = {
            split: ShardWriter(folder, split, index, shard_tokens=self._shard_tokens)
            for split in SPLITS
        }
        self._position = Position() if index.position is msgspec.UNSET else index.position
        self._recorded = self._tokens
        self._first_tokens = self._recorded

    @property
    def _tokens(self) -> int:
        return sum(writer.tokens for writer in self._writers.values())

    @property
    def new_tokens(self) -> int:
        """Tokens that this start has written."""
        return self._tokens - self._first_tokens

    def write(self, encoding: Encoding, processes: int | None) -> None:
        """Write all pieces after the position, until there are enough tokens to train on."""
        reading = self._corpus.read(self._position.place)
        if self._position.pieces:
            progress_before = (
                f"{counted(self._position.documents, 'document')}, {self._tokens:,} tokens"
            )
            how = f": {reading.how}" if reading.how else ""
            print(f"data: continue {self._folder} after {progress_before}{how}", flush=True)
        done = {split: writer.last_piece for split, writer in self._writers.items()}
        fraction = self._index.settings["validation_fraction"]
        batches = read_batches(
            reading.pieces, start=self._position, done=done, held_out_fraction=fraction
        )
        progress = Progress(f"tokenize {self._corpus.spec}", self._amount(), self._share(reading))
        with closing(progress), closing(tokenize(batches, encoding, processes)) as tokenized:
            for batch, tokens in tokenized:
                if not self._add(batch, tokens):
                    break
                progress.show(self._amount(), self._share(reading))
        if not self._tokens:
            raise self._corpus.is_empty()

    def _add(self, batch: Batch, tokens: Sequence[Ids]) -> bool:
        """Write a batch. Return False if there are enough tokens to train on."""
        train = self._writers["train"]
        for text, ids in zip(batch.texts, tokens, strict=True):
            enough = self._max_tokens is not None and train.tokens >= self._max_tokens
            # After a restart, earlier pieces may be missing in the other split.
            if enough and text.number > train.last_piece:
                return False
            self._writers[text.split].add(text.number, ids, text.ends)
        self._position = batch.after
        if self._tokens - self._recorded >= min(self._shard_tokens, _RECORD_TOKENS):
            self._record()
        return True

    def _record(self) -> None:
        """Record how far reading and both splits are, so that a later start continues here."""
        for writer in self._writers.values():
            writer.record()
        self._index.position = self._position
        write_index(self._folder / STARTED_NAME, self._index)
        self._recorded = self._tokens

    def finish(self) -> None:
        for writer in self._writers.values():
            writer.finish_shard()
        self._index.position = msgspec.UNSET
        write_index(self._folder / INDEX_NAME, self._index)
        (self._folder / STARTED_NAME).unlink()

    def _amount(self) -> Amount:
        return Amount(self._position.place.bytes, self._position.documents, self._tokens)

    def _share(self, reading: Reading) -> float | None:
        """Return the share that is done: of the corpus, or of the tokens to train on."""
        amounts = [
            (self._position.place.bytes, reading.bytes),
            (self._position.documents, reading.documents),
            (self._writers["train"].tokens, self._max_tokens),
        ]
        return max((min(1.0, done / whole) for done, whole in amounts if whole), default=None)


# --- the command ---


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 0.5:
        raise argparse.ArgumentTypeError(f'"{text}": give a number from 0 to 0.5')
    return value


def process_count(text: str) -> int:
    """Parse the number of processes, of which more than there are cores gain nothing."""
    cores = available_cores()
    most = max(cores, MOST_PROCESSES)
    if not text.isdecimal() or not 1 <= int(text) <= most:
        reason = f"give a whole number from 1 to {most} (this machine has {counted(cores, 'core')})"
        raise argparse.ArgumentTypeError(f'"{text}": {reason}')
    return int(text)


def _warn_if_nothing_is_held_out(folder: Path) -> None:
    index = read_index(folder / INDEX_NAME)
    if index.settings["validation_fraction"] and not index.splits["validation"].tokens:
        print(f"warning: {folder}: {describe_empty_validation(index)}", file=sys.stderr)


def _interrupt(number: int, _: object) -> None:
    """End on SIGTERM as on Ctrl-C, so that the processes that tokenize and their semaphores are not
    left."""
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice: to it, and to its group
    raise KeyboardInterrupt(number)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog=command_line("prepare"),
        description="Tokenize a corpus into a folder of token shards. If it was interrupted or "
        "killed, the same command continues.",
    )
    add = parser.add_argument
    source = f"{sources_text()}; not needed to divide finished shards into clusters"
    add("--source", type=paths_of_option, help=source)
    add_imports_option(parser)
    tokenizers = "bytes (default), a tiktoken encoding such as gpt2, or a tokenizer.json"
    add("--tokenizer", type=paths_of_option, default="bytes", help=tokenizers)
    add("--out", required=True, type=Path, help="folder of the shards")
    held_out = "share of the pieces held out (default 0.005)"
    add("--validation-fraction", type=share, default=0.005, help=held_out)
    shard = f"number of tokens after which a shard is closed (default {DEFAULT_SHARD_TOKENS})"
    add("--shard-tokens", type=whole_number, default=DEFAULT_SHARD_TOKENS, help=shard)
    add("--max-tokens", type=whole_number, help="stop at this number of training tokens")
    begin = "write the tokenizer's begin token before each document, as in Llama 3's training"
    add("--begin-token", action="store_true", help=begin)
    field = f"field of the text in JSON lines and datasets (default {TEXT_FIELD})"
    add("--text-field", default=TEXT_FIELD, metavar="NAME", help=field)
    text = (
        f"number of processes (default: one for each core, at most {MOST_PROCESSES}; 1 for bytes)"
    )
    text += "; the shards do not depend on it"
    add("--processes", type=process_count, default=argparse.SUPPRESS, metavar="NUMBER", help=text)
    clusters = "also write this number of corpora OUT-0, OUT-1, ..., each of similar documents"
    add("--clusters", type=whole_number, metavar="NUMBER", help=clusters)
    options = parser.parse_args(arguments)
    if not options.source and not options.clusters:
        parser.error("--source is missing")
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        tokenizer = build_tokenizer(options.tokenizer)
        done = bool(options.source) and prepare(
            open_source(options.source, options.text_field),
            tokenizer,
            options.out,
            validation_fraction=options.validation_fraction,
            shard_tokens=options.shard_tokens,
            max_tokens=options.max_tokens,
            begin=options.begin_token,
            processes=vars(options).get("processes", usual_processes(tokenizer)),
        )
        folders = [options.out]
        if options.clusters:
            done |= write_clusters(options.out, tokenizer, options.clusters)
            folders += cluster_folders(options.out, options.clusters)
        for folder in folders:
            _warn_if_nothing_is_held_out(folder)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt as interrupt:
        code = 128 + (interrupt.args or (signal.SIGINT,))[0]
        parser.exit(code, f"\ninterrupted; the same command continues {options.out}\n")
    finally:
        signal.signal(signal.SIGTERM, before)
    if not done:
        print(f"{options.out} was complete already")
