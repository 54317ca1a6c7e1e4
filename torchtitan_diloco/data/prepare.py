"""Tokenises a corpus into a folder of token shards.

python -m torchtitan_diloco.data.prepare --source stdlib --tokenizer bytes --out corpora/stdlib-bytes
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_diloco.data.corpora import open_corpus
from torchtitan_diloco.data.preparation import DEFAULT_SHARD_TOKENS, prepare
from torchtitan_diloco.data.quantities import parse_quantity
from torchtitan_diloco.data.shards import SPLITS, TokenShards, read_manifest
from torchtitan_diloco.data.tokenizer import build_tokenizer


def prepare_command(source: str, tokenizer: str, out: str) -> str:
    """The command line that prepares a folder, to print to a user."""
    words = [sys.executable, "-m", "torchtitan_diloco.data.prepare"]
    return shlex.join([*words, "--source", source, "--tokenizer", tokenizer, "--out", out])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_diloco.data.prepare",
        description="Tokenise a corpus into a folder of token shards.",
    )
    parser.add_argument(
        "--source",
        help="stdlib, files, folders and globs separated by commas, or hf:NAME[/SUBSET][:SPLIT]",
    )
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes, a .tiktoken file, or a named tiktoken encoding"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder of the shards")
    parser.add_argument(
        "--validation-fraction", type=float, default=0.005, help="share held out (default 0.005)"
    )
    parser.add_argument(
        "--shard-tokens",
        type=parse_quantity,
        default=DEFAULT_SHARD_TOKENS,
        metavar="N",
        help="a shard is closed once it has so many tokens, such as 100M (default 2**28)",
    )
    parser.add_argument("--threads", type=int, default=None, help="default: every core")
    parser.add_argument(
        "--max-tokens",
        type=parse_quantity,
        metavar="N",
        help="end once there are N tokens to train on",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every byte of the shards; without --source: only that",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.source is None and not options.verify:
            raise ValueError(
                "--source is missing: what is to be tokenised? (--verify alone checks a finished folder)"
            )
        if options.source is not None:
            _prepare_and_tell(options)
        if options.verify:
            _verify_and_tell(options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command continues {options.out}", file=sys.stderr)
        return 130
    return 0


def _prepare_and_tell(options: argparse.Namespace) -> None:
    if options.threads is not None and options.threads < 1:
        raise ValueError(f"--threads {options.threads} must be at least 1")
    done = prepare(
        open_corpus(options.source),
        build_tokenizer(options.tokenizer),
        options.out,
        validation_fraction=options.validation_fraction,
        shard_tokens=options.shard_tokens,
        max_tokens=options.max_tokens,
        threads=options.threads,
    )
    for split in SPLITS:
        print(f"{split}: {done.tokens[split]:,} tokens, {done.documents[split]:,} documents")
    if done.new_tokens == 0:
        print(f"{options.out} was complete already")
        return
    rate, megabytes = done.new_tokens / done.seconds, done.new_text_bytes / 1e6
    print(
        f"{options.out}: {done.new_tokens:,} tokens from {megabytes:,.1f} MB of text in {done.seconds:.1f} s: "
        f"{rate / 1e6:.2f} M tokens/s, {megabytes / done.seconds:.1f} MB/s"
    )


def _verify_and_tell(folder: Path) -> None:
    for split in SPLITS:
        if read_manifest(folder)["splits"][split]["shards"]:
            shards = TokenShards(folder, split)
            shards.verify()
            print(f"{split}: {len(shards):,} tokens as they were written")


if __name__ == "__main__":
    sys.exit(main())
