"""Train a byte-level BPE tokenizer and write it as a `.tiktoken` rank file.

.venv/bin/torchtitan-diloco train-tokenizer --source stdlib --vocab-size 4096 --out my.tiktoken
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan_diloco.data.prepare import parse_quantity
from torchtitan_diloco.data.text import Corpus, is_held_out, open_corpus
from torchtitan_diloco.data.tokenizer import (
    SPLIT_PATTERN,
    build_tokenizer,
    byte_characters,
    format_ranks,
)
from torchtitan_diloco.utils import command_line, install_command, write_whole


def train_tokenizer(corpus: Corpus, vocab_size: int, max_bytes: int = 10**9) -> dict[bytes, int]:
    """Return the ranks of vocab_size - 1 tokens. The last token is the end of a document."""
    if vocab_size < 257:
        raise ValueError(
            f"--vocab-size {vocab_size} is too small: every byte and the end of a document make 257"
        )
    ranks = ranks_of(learn_bpe(_sample(corpus, max_bytes), vocab_size - 1))
    if len(ranks) < vocab_size - 1:
        raise ValueError(
            f"--vocab-size {vocab_size} is too large for this text: after {len(ranks)} tokens "
            f"there is no pair left to merge. Give more text, or --vocab-size {len(ranks) + 1}."
        )
    return ranks


def learn_bpe(texts: Iterator[str], tokens: int) -> Any:
    """Train a `tokenizers.Tokenizer` with this many tokens, including the 256 bytes."""
    tokenizer = byte_level_bpe(SPLIT_PATTERN)
    from tokenizers import trainers

    alphabet = sorted(byte_characters())
    trainer = trainers.BpeTrainer(vocab_size=tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_level_bpe(pattern: str, **model: Any) -> Any:
    """Return a `tokenizers.Tokenizer` that splits text by a pattern, then merges bytes."""
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ValueError(
            f"this needs the package tokenizers: {install_command('tokenizer')}"
        ) from error
    tokenizer = Tokenizer(models.BPE(**model))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def ranks_of(learned: Any) -> dict[bytes, int]:
    """Return the ranks of a trained tokenizer, which are its ids: both are in order of merging."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary: dict[str, int] = learned.get_vocab(with_added_tokens=False)
    return {bytes(byte_of[c] for c in token): rank for token, rank in vocabulary.items()}


def _sample(corpus: Corpus, max_bytes: int) -> Iterator[str]:
    """Yield up to `max_bytes` of text, spread over the corpus if its size is known, else from its
    start. Drop lone surrogates, which UTF-8 does not allow."""
    share = min(1.0, max_bytes / corpus.total_bytes) if corpus.total_bytes else 1.0
    taken = 0
    for number, piece in enumerate(corpus.pieces("learning from")):
        if is_held_out(number, share):  # evenly spaced
            encoded = piece.text.encode(errors="ignore")
            taken += len(encoded)
            if taken > max_bytes:
                break
            yield encoded.decode()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=command_line("train-tokenizer"),
        description="Learn a byte-level BPE tokenizer and write it as a .tiktoken rank file.",
    )
    add = parser.add_argument
    add("--source", required=True, help="text to learn from: anything that `prepare` takes")
    vocabulary_help = "tokens, the end-of-document one included (32000)"
    add("--vocab-size", type=parse_quantity, default=32_000, help=vocabulary_help)
    add("--out", required=True, type=Path, help="rank file to write; its name ends in .tiktoken")
    add("--max-bytes", type=parse_quantity, default=10**9, help="most text to learn from (1GB)")
    options = parser.parse_args(arguments)
    out, start = options.out, time.monotonic()
    try:
        if out.suffix != ".tiktoken":
            raise ValueError(f"--out {out} must end in .tiktoken, which marks a rank file")
        if out.exists():
            raise ValueError(f"--out {out} exists, and shards may depend on it; choose another")
        ranks = train_tokenizer(open_corpus(options.source), options.vocab_size, options.max_bytes)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, format_ranks(ranks))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    tokenizer = build_tokenizer(str(out))
    print(
        f"{out}: {tokenizer.vocab_size:,} tokens (256 bytes, {tokenizer.vocab_size - 257:,} "
        f"merges, 1 end of document), fingerprint {tokenizer.fingerprint}, in "
        f"{time.monotonic() - start:.1f} s"
    )


if __name__ == "__main__":
    main()
