"""Tokenise a corpus into a folder of token shards.

.venv/bin/torchtitan-diloco prepare --source stdlib --tokenizer bytes --out corpora/stdlib

The same text and settings give the same bytes, for any number of threads. A job that was killed
continues after its finished shards.
"""

import argparse
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.data.shards import (
    INDEX_NAME,
    SPLITS,
    STARTED_NAME,
    ShardWriter,
    Split,
    TokenShards,
    only_writer,
    read_index,
    read_or_begin_index,
)
from torchtitan_diloco.data.text import (
    PIECE_CHARACTERS,
    TEXT_FIELD,
    Corpus,
    Piece,
    is_held_out,
    open_corpus,
)
from torchtitan_diloco.data.tokenizer import BEGINS, Tokenizer, build_tokenizer
from torchtitan_diloco.hardware import available_cores
from torchtitan_diloco.log import UserError, command_line

DEFAULT_SHARD_TOKENS = 2**28  # half a gigabyte at two bytes a token
_PIECES_AHEAD = 128  # for each thread; bounds memory

Tokenised = tuple[int, Split, npt.NDArray[np.uint32], bool]
"""Number of a piece, its split, its tokens, and whether a document of the split ends with it."""


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    max_tokens: int | None = None,
    threads: int | None = None,
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
    } | ({"begin_token": begin_token} if begin else {})
    start, new_tokens = time.monotonic(), 0
    with only_writer(folder, wait=wait):
        index = read_or_begin_index(folder, settings)
        if (folder / INDEX_NAME).exists():
            return False
        writers = {split: ShardWriter(folder, split, index, shard_tokens) for split in SPLITS}
        done = {split: writer.end_piece for split, writer in writers.items()}
        pieces = _tokenised(corpus, tokenizer, done, validation_fraction, begin_token, threads)
        for number, split, tokens, ends_document in pieces:
            enough = max_tokens is not None and writers["train"].tokens >= max_tokens
            if enough and number >= writers["train"].end_piece:
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
    threads: int | None,
) -> Iterator[Tokenised]:
    """Yield the pieces of the corpus in order, except those that are done."""

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

    threads, pending = threads or available_cores(), deque[Future[Tokenised]]()
    begins_document = True
    with ThreadPoolExecutor(threads) as pool:  # tokenizers release the GIL
        for number, piece in enumerate(corpus.pieces("tokenising")):
            if number >= done[split_of(number)]:
                pending.append(pool.submit(tokenise, number, piece, begins_document))
            begins_document = piece.ends_document
            if len(pending) == _PIECES_AHEAD * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# --- the command ---


def parse_quantity(text: str) -> int:
    """Parse a positive integer: 1000000, 1_000_000, 1e6, 1M and 1MB are the same."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([KMGT]?)B?", text, re.IGNORECASE)
    scale = 1000 ** "_KMGT".index(match[2].upper() or "_") if match else 0
    value = float(match[1]) * scale if match else 0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from 1 on such as 1000000, 1e6, 1M or 1GB"
        )
    return int(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=command_line("prepare"),
        description="Tokenise a corpus into a folder of token shards.",
    )
    add = parser.add_argument
    add("--source", help="stdlib; files, folders, globs with commas; or hf:NAME[/SUBSET][:SPLIT]")
    tokenizer_help = "bytes, a tokenizer.json, or a tiktoken encoding"
    add("--tokenizer", default="bytes", help=tokenizer_help)
    add("--out", required=True, type=Path, help="folder of the shards")
    add("--validation-fraction", type=float, default=0.005, help="share held out (default 0.005)")
    shard_help = "a shard is closed once it has so many tokens, such as 100M (default 2**28)"
    add("--shard-tokens", type=parse_quantity, default=DEFAULT_SHARD_TOKENS, help=shard_help)
    add("--threads", type=parse_quantity, help="default: every core")
    add("--max-tokens", type=parse_quantity, help="stop at so many tokens to train on")
    begin_help = "write the tokenizer's begin token before each document, as Llama 3 was trained"
    add("--begin-token", action="store_true", help=begin_help)
    field_help = "field of the text in JSON lines and data sets (default text)"
    add("--text-field", default=TEXT_FIELD, metavar="NAME", help=field_help)
    add("--verify", action="store_true", help="check every byte; without --source: only that")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"\ninterrupted; the same command continues {options.out}\n")


def _run(options: argparse.Namespace) -> None:
    if options.source is None and not options.verify:
        raise UserError("--source is missing; --verify alone checks a finished folder")
    if not 0 <= options.validation_fraction <= 0.5:
        share = options.validation_fraction
        raise UserError(f"--validation-fraction {share:g} is not between 0 and 0.5")
    if options.source is not None:
        done = prepare(
            open_corpus(options.source, options.text_field),
            build_tokenizer(options.tokenizer),
            options.out,
            validation_fraction=options.validation_fraction,
            shard_tokens=options.shard_tokens,
            max_tokens=options.max_tokens,
            threads=options.threads,
            begin=options.begin_token,
        )
        if not done:
            print(f"{options.out} was complete already")
    if options.verify:
        for split, index in read_index(options.out / INDEX_NAME).splits.items():
            if index.shards:
                TokenShards(options.out, split).verify()
            print(f"{split}: {index.tokens:,} tokens as they were written")


if __name__ == "__main__":
    main()
