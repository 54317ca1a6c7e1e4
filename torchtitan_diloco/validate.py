"""Print the loss and perplexity of a trained model on held-out text.

.venv/bin/torchtitan-diloco validate outputs/RUN
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from torchtitan_diloco.components.optimizer import compute_dtype
from torchtitan_diloco.components.validation import validate
from torchtitan_diloco.data.corpus import open_split
from torchtitan_diloco.data.loader import ValidationBatches
from torchtitan_diloco.distributed.world import World, pick_device
from torchtitan_diloco.export.saved_model import CommandParser, SavedModel, in_range, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("validate", "Print the loss and perplexity of a trained model.")
    add = parser.add_argument
    add("--corpus", help="as data.validation_corpus (default: what the run held out)")
    count = in_range(int, 1)
    add("--sequences", type=count, metavar="N", help="the first N (default: as many as the run)")
    add("--batch-size", type=count, metavar="N", help="sequences per batch (default: the run's)")
    parser.add_device()
    return run_command(_validate, parser, arguments)


def _validate(saved: SavedModel, options: argparse.Namespace) -> None:
    config, device = saved.config, pick_device(options.device, 0)
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
        saved.model.to(device, compute_dtype(config.parallel.compute_dtype, device)),
        batches,
        World(rank=0, size=1, workers=1, device=device),
        chunk_tokens=config.training.loss_chunk_tokens,
    )
    print(saved, file=sys.stderr)
    print(
        f"loss {result.loss:.4f}, perplexity {result.perplexity:,.2f} over {result.tokens:,} "
        f"tokens ({batches.sequences:,} sequences of {length:,}) of "
        f"{data.validation_corpus or data.corpus}"
    )


if __name__ == "__main__":
    sys.exit(main())
