"""Writes text with a model that a run has saved, as it comes.

python -m torchtitan_diloco.generate outputs/RUN --prompt "def main("
"""

import argparse
import codecs
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.distributed.world import pick_device
from torchtitan_diloco.generation import generate
from torchtitan_diloco.saved_model import add_device_argument, add_saved_arguments, open_saved


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_diloco.generate",
        description="Write text with a model that a run has saved.",
    )
    add_saved_arguments(parser)
    parser.add_argument(
        "--prompt", default="", help="text to go on from (default: the beginning of a document)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=100,
        metavar="N",
        help="at most so many new tokens (default 100)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: the likeliest token (default 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="only the K likeliest tokens (default 0: all)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="only the likeliest that make P (default 1.0)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="the same seed gives the same text (default 0)"
    )
    parser.add_argument(
        "--count",
        type=int,
        default=1,
        metavar="N",
        help="texts, with the seeds from --seed on (default 1)",
    )
    add_device_argument(parser)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    try:
        _write_texts(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    except (
        BrokenPipeError
    ):  # whoever read the text has seen enough; nothing must be written to it when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _write_texts(options: argparse.Namespace) -> None:
    if options.count < 1:
        raise ValueError(f"--count {options.count} is no number of texts: give at least 1")
    device = pick_device(options.device, 0)
    saved = open_saved(options.run, options.step, options.weights)
    print(saved, file=sys.stderr, flush=True)
    model, tokenizer = saved.model.to(device), saved.tokenizer
    prompt = tokenizer.encode(options.prompt).tolist()
    for number in range(options.count):
        tokens = generate(
            model,
            prompt or [tokenizer.end_of_document],
            vocab_size=tokenizer.vocab_size,
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed + number,
            stop=tokenizer.end_of_document,
        )
        if options.count > 1:
            print(f"--- {number + 1} of {options.count}, seed {options.seed + number}")
        print(tokenizer.decode(prompt), end="", flush=True)
        for piece in as_text(tokenizer, tokens):
            print(piece, end="", flush=True)
        print(flush=True)


def as_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens as soon as it is certain: a token may end in the middle of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        piece = decoder.decode(tokenizer.decode_bytes([token]))
        if piece:
            yield piece
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest


if __name__ == "__main__":
    sys.exit(main())
