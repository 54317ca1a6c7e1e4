"""Print the loss and perplexity of a trained model on held-out text.

python -m torchtitan_diloco.validate outputs/RUN
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from torchtitan_diloco.components.optimizer import autocast, compute_dtype
from torchtitan_diloco.components.validation import validate
from torchtitan_diloco.data.corpus import open_split
from torchtitan_diloco.data.loader import ValidationBatches
from torchtitan_diloco.distributed.world import World, pick_device
from torchtitan_diloco.export.saved_model import (
    add_device_argument,
    in_range,
    open_saved,
    run_command,
    saved_model_parser,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = saved_model_parser(
        "torchtitan_diloco.validate", "Print the loss and perplexity of a trained model."
    )
    add = parser.add_argument
    add("--corpus", help="as data.validation_corpus (default: what the run held out)")
    count = in_range(int, 1)
    add("--sequences", type=count, metavar="N", help="the first N (default: as many as the run)")
    add("--batch-size", type=count, metavar="N", help="sequences per batch (default: the run's)")
    add_device_argument(parser)
    return run_command(_validate, parser, arguments)


def _validate(options: argparse.Namespace) -> None:
    device = pick_device(options.device, 0)
    saved = open_saved(options.run, options.step, options.weights)
    config = saved.config
    data, length = config.data, config.training.sequence_length
    if options.corpus is not None:
        data = replace(data, validation_corpus=options.corpus)
    batches = ValidationBatches(
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
        f"loss {result.loss:.4f}, perplexity {result.perplexity:,.2f} over {result.tokens:,} "
        f"tokens ({batches.sequences:,} sequences of {length:,}) of "
        f"{data.validation_corpus or data.corpus}"
    )


if __name__ == "__main__":
    sys.exit(main())
