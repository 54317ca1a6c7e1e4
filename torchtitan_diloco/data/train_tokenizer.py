"""Learns a byte-level BPE tokenizer and writes it as a `.tiktoken` rank file.

python -m torchtitan_diloco.data.train_tokenizer --source stdlib --vocab-size 4096 --out tokenizers/stdlib.tiktoken
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan_diloco.data.corpora import Corpus, is_held_out, open_corpus
from torchtitan_diloco.data.files import write_whole
from torchtitan_diloco.data.progress import Progress
from torchtitan_diloco.data.quantities import parse_quantity
from torchtitan_diloco.data.tokenizer import SPLIT_PATTERN, build_tokenizer, format_ranks
from torchtitan_diloco.utils import install_command

DEFAULT_MAX_BYTES = 10**9
SMALLEST_VOCABULARY = 257  # every byte, and the end-of-document token


def train_tokenizer(
    corpus: Corpus, vocab_size: int, max_bytes: int = DEFAULT_MAX_BYTES
) -> dict[bytes, int]:
    """The ranks of vocab_size - 1 tokens; the end-of-document token is the last of the vocabulary."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"--vocab-size {vocab_size} is too small: {SMALLEST_VOCABULARY} is every byte and the end-of-document token"
        )
    learned = learn_bpe(_sample(corpus, max_bytes), vocab_size - 1)
    ranks = ranks_of(learned)
    if len(ranks) < vocab_size - 1:
        raise ValueError(
            f"--vocab-size {vocab_size} is too large for this text: after {len(ranks)} tokens no two of them stand "
            f"next to each other any more. Give more text, or --vocab-size {len(ranks) + 1}."
        )
    return ranks


def learn_bpe(texts: Iterator[str], tokens: int) -> Any:
    """A `tokenizers.Tokenizer` with so many tokens, 256 of them the bytes."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError(
            f"learning a tokenizer needs the package tokenizers: {install_command('tokenizer')}"
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def ranks_of(learned: Any) -> dict[bytes, int]:
    """tiktoken's ranks: ids are given in the order of learning, which is the order of merging."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary: dict[str, int] = learned.get_vocab(with_added_tokens=False)
    return {
        bytes(byte_of[character] for character in token): rank for token, rank in vocabulary.items()
    }


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte: itself where Latin-1 has a visible one, else
    the next one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, next_free = [], 0x100
    for byte in range(256):
        if byte in visible:
            characters.append(chr(byte))
        else:
            characters.append(chr(next_free))
            next_free += 1
    return characters


def _sample(corpus: Corpus, max_bytes: int) -> Iterator[str]:
    """At most so many bytes of text, from all over the corpus where its size is known, else from its beginning.

    Lone surrogates, which a JSON escape can make, are left out: no UTF-8 has them.
    """
    share = min(1.0, max_bytes / corpus.total_bytes) if corpus.total_bytes else 1.0
    progress = Progress(f"learning from {corpus.spec}", corpus.total_bytes)
    taken = 0
    for number, piece in enumerate(corpus.pieces()):
        if not is_held_out(number, share):  # the same even spread that selects the held-out pieces
            continue
        encoded = piece.text.encode("utf-8", errors="ignore")
        taken += len(encoded)
        if taken > max_bytes:
            break
        progress.update(piece.bytes_read, f"{taken / 1e6:,.1f} MB")
        yield encoded.decode()
    progress.finish()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_diloco.data.train_tokenizer",
        description="Learn a byte-level BPE tokenizer and write it as a .tiktoken rank file.",
    )
    parser.add_argument(
        "--source", required=True, help="what to learn from: anything that `prepare` takes"
    )
    parser.add_argument(
        "--vocab-size",
        type=parse_quantity,
        default=32_000,
        help="tokens, the end-of-document one included (32000)",
    )
    parser.add_argument(
        "--out", required=True, type=Path, help="the rank file to write; its name ends in .tiktoken"
    )
    parser.add_argument(
        "--max-bytes",
        type=parse_quantity,
        default=DEFAULT_MAX_BYTES,
        help="most text to learn from (1GB)",
    )
    options = parser.parse_args(arguments)
    start = time.monotonic()
    try:
        if options.out.suffix != ".tiktoken":
            raise ValueError(
                f"--out {options.out} must end in .tiktoken, by which data.tokenizer knows a rank file"
            )
        if options.out.exists():
            raise ValueError(
                f"--out {options.out} exists; shards may depend on it. Choose another name or delete it."
            )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        ranks = train_tokenizer(open_corpus(options.source), options.vocab_size, options.max_bytes)
        write_whole(options.out, format_ranks(ranks))
        tokenizer = build_tokenizer(str(options.out))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{options.out}: {tokenizer.vocab_size:,} tokens (256 bytes, {tokenizer.vocab_size - 257:,} merges, 1 end of "
        f"document), fingerprint {tokenizer.fingerprint}, in {time.monotonic() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
