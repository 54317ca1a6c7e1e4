"""Loss and perplexity of a model that a run has saved, on the text that the run held out or on another corpus.

python -m torchtitan_diloco.validate outputs/RUN
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from torchtitan_diloco.components.optimizer import autocast, compute_dtype
from torchtitan_diloco.components.validation import validate
from torchtitan_diloco.data.loader import build_validation_batches, open_split
from torchtitan_diloco.distributed.world import World, pick_device
from torchtitan_diloco.saved_model import add_device_argument, add_saved_arguments, open_saved


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_diloco.validate",
        description="Loss and perplexity of a model that a run has saved.",
    )
    add_saved_arguments(parser)
    parser.add_argument(
        "--corpus", help="as data.validation_corpus (default: what the run held out)"
    )
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="the first N (default: the run's validation.sequences)",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="sequences at once (default: the run's)"
    )
    add_device_argument(parser)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    try:
        _validate_and_tell(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _validate_and_tell(options: argparse.Namespace) -> None:
    for flag, value in (("--sequences", options.sequences), ("--batch-size", options.batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} {value} is too few: give at least 1")
    device = pick_device(options.device, 0)
    saved = open_saved(options.run, options.step, options.weights)
    config = saved.config
    data = (
        config.data
        if options.corpus is None
        else replace(config.data, validation_corpus=options.corpus)
    )
    length = config.training.sequence_length
    batches = build_validation_batches(
        open_split(data, saved.tokenizer, "validation"),
        sequence_length=length,
        batch_size=options.batch_size or config.training.batch_size,
        rank=0,
        ranks=1,
        sequences=options.sequences or config.validation.sequences,
    )
    result = validate(
        saved.model.to(device),
        batches,
        World(rank=0, size=1, workers=1, device=device),
        chunk_tokens=config.training.loss_chunk_tokens,
        precision=autocast(compute_dtype(config.parallel.compute_dtype, device), device),
    )
    print(saved, file=sys.stderr)
    print(
        f"loss {result.loss:.4f}, perplexity {result.perplexity:,.2f} over {result.tokens:,} tokens "
        f"({batches.sequences:,} sequences of {length:,}) of {data.validation_corpus or data.corpus}"
    )


if __name__ == "__main__":
    sys.exit(main())
