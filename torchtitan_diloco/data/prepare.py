"""Tokenises a corpus into a folder of token shards.

python -m torchtitan_diloco.data.prepare --source stdlib --tokenizer bytes --out corpora/stdlib
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_diloco.data.corpus import DEFAULT_SHARD_TOKENS, prepare
from torchtitan_diloco.data.shards import INDEX_NAME, TokenShards, read_index
from torchtitan_diloco.data.text import open_corpus
from torchtitan_diloco.data.tokenizer import build_tokenizer


def parse_quantity(text: str) -> int:
    """Return a whole number: 1000000, 1_000_000, 1e6, 1M and 1MB are the same."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([KMGT]?)B?", text.strip(), re.IGNORECASE)
    value = (
        0.5 if match is None else float(match[1]) * 1000 ** "_KMGT".index(match[2].upper() or "_")
    )
    if value != int(value):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number such as 1000000, 1e6, 1M or 1GB"
        )
    return int(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_diloco.data.prepare",
        description="Tokenise a corpus into a folder of token shards.",
    )
    add = parser.add_argument
    add("--source", help="stdlib; files, folders, globs with commas; or hf:NAME[/SUBSET][:SPLIT]")
    add("--tokenizer", default="bytes", help="bytes, a .tiktoken file, or a tiktoken encoding")
    add("--out", required=True, type=Path, help="folder of the shards")
    add("--validation-fraction", type=float, default=0.005, help="share held out (default 0.005)")
    add(
        "--shard-tokens",
        type=parse_quantity,
        default=DEFAULT_SHARD_TOKENS,
        metavar="N",
        help="a shard is closed once it has N tokens, such as 100M (default 2**28)",
    )
    add("--threads", type=int, help="default: every core")
    add("--max-tokens", type=parse_quantity, metavar="N", help="stop at N tokens to train on")
    add("--verify", action="store_true", help="check every byte; without --source: only that")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.source is None and not options.verify:
            raise ValueError("--source is missing; --verify alone checks a finished folder")
        if options.source is not None:
            _prepare(options)
        if options.verify:
            _verify(options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command continues {options.out}", file=sys.stderr)
        return 130
    return 0


def _prepare(options: argparse.Namespace) -> None:
    for name in ("shard_tokens", "max_tokens", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if not 0 <= options.validation_fraction <= 0.5:
        share = options.validation_fraction
        raise ValueError(f"--validation-fraction {share:g} is not between 0 and 0.5")
    done = prepare(
        open_corpus(options.source),
        build_tokenizer(options.tokenizer),
        options.out,
        validation_fraction=options.validation_fraction,
        shard_tokens=options.shard_tokens,
        max_tokens=options.max_tokens,
        threads=options.threads,
    )
    for split, index in done.splits.items():
        print(f"{split}: {index.tokens:,} tokens, {index.documents:,} documents")
    if done.new_tokens == 0:
        print(f"{options.out} was complete already")
        return
    rate = done.new_tokens / done.seconds / 1e6
    print(
        f"{options.out}: {done.new_tokens:,} tokens in {done.seconds:.1f} s, {rate:.2f} M tokens/s"
    )


def _verify(folder: Path) -> None:
    for split, index in read_index(folder / INDEX_NAME).splits.items():
        if index.shards:
            shards = TokenShards(folder, split)
            shards.verify()
            print(f"{split}: {len(shards):,} tokens as they were written")


if __name__ == "__main__":
    sys.exit(main())
