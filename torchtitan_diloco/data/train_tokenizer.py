"""Train a tokenizer.json on the beginning of a corpus: byte-level BPE, as GPT-2's.

.venv/bin/torchtitan-diloco tokenizer --source stdlib --vocab-size 2048 --out outputs/own.json
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_diloco.data.corpus import whole_number
from torchtitan_diloco.data.text import TEXT_FIELD, open_corpus
from torchtitan_diloco.data.tokenizer import END_OF_DOCUMENT
from torchtitan_diloco.log import Parser, UserError, command_line

FEWEST = 257
"""Smallest vocabulary."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog=command_line("tokenizer"), description="Train a tokenizer on a corpus.")
    add = parser.add_argument
    sources = "stdlib; files, folders, globs with commas; or hf:NAME[/SUBSET][:SPLIT]"
    add("--source", required=True, help=sources)
    add("--out", required=True, type=Path, help="tokenizer.json to write")
    add("--vocab-size", type=whole_number, default=32_000, help="default 32000")
    pieces = "read so many pieces of at most 32,768 characters (default 1e6)"
    add("--pieces", type=whole_number, default=1_000_000, help=pieces)
    field = f"field of the text in JSON lines and data sets (default {TEXT_FIELD})"
    add("--text-field", default=TEXT_FIELD, metavar="NAME", help=field)
    options = parser.parse_args(arguments)
    try:
        if options.vocab_size < FEWEST:
            reason = f"give at least {FEWEST}, the bytes and {END_OF_DOCUMENT}"
            raise UserError(f"--vocab-size {options.vocab_size}: {reason}")
        corpus = open_corpus(options.source, options.text_field)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=options.vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = (piece.text for piece in islice(corpus.pieces(), options.pieces))
        tokenizer.train_from_iterator(texts, trainer)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    except OSError as error:
        parser.exit(2, f"error: --out {options.out} cannot be written: {error}\n")
    print(f"wrote {options.out}: {tokenizer.get_vocab_size():,} tokens")


if __name__ == "__main__":
    main()
