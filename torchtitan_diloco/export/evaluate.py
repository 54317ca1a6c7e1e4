"""Write text with a trained model, or print its loss on held-out text.

.venv/bin/torchtitan-diloco generate outputs/RUN --prompt "def main("
.venv/bin/torchtitan-diloco validate outputs/RUN
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_diloco.components.optimizer import compute_dtype
from torchtitan_diloco.components.validation import validate
from torchtitan_diloco.data.corpus import open_split
from torchtitan_diloco.data.loader import ValidationBatches
from torchtitan_diloco.distributed.world import World, pick_device
from torchtitan_diloco.export.saved_model import CommandParser, SavedModel, run_command
from torchtitan_diloco.log import UserError
from torchtitan_diloco.models import LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens: Sequence[int],
    *,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """Yield the tokens that follow `tokens`. Ids from `vocab_size` on pad the embedding."""
    assert tokens
    context, generator = list(tokens), torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    while True:
        context = context[-model.sequence_length :]
        inputs = torch.tensor([context], dtype=torch.int64, device=device)
        logits = model(inputs, head=lambda hidden, matrix: F.linear(hidden[0, -1], matrix))
        # On the CPU, so that random draws are the same for all devices.
        context.append(draw(logits[:vocab_size].double().cpu(), temperature, top_k, generator))
        yield context[-1]


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw one of the `top_k` most likely tokens (0: all), or at temperature 0 the first one."""
    if not bool(logits.isfinite().all()):
        raise UserError("the model's logits are not finite: it is damaged, or training diverged")
    logits, ids = logits.sort(descending=True, stable=True)
    if temperature == 0:
        return int(ids[0])
    # Shift the largest logit to 0, so that a temperature near 0 does not make it infinite.
    kept = ((logits - logits[0]) / temperature)[: top_k or None]
    return int(ids[torch.multinomial(kept.softmax(dim=0), 1, generator=generator)])


def _generate(saved: SavedModel, options: argparse.Namespace) -> None:
    if not 0 <= options.temperature < float("inf") or options.top_k < 0:
        raise UserError("--temperature and --top-k: give numbers from 0 up")
    print(saved, file=sys.stderr, flush=True)
    tokenizer, end = saved.tokenizer, saved.tokenizer.end_of_document
    tokens = generate(
        saved.model.to(pick_device(options.device, 0)),
        tokenizer.encode(options.prompt).tolist() or [end],
        vocab_size=tokenizer.vocab_size,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    wanted = islice(tokens, max(0, options.tokens))
    text = tokenizer.decode(list(takewhile(lambda token: token != end, wanted)))
    print(options.prompt + text, flush=True)


def _validate(saved: SavedModel, options: argparse.Namespace) -> None:
    config, device = saved.config, pick_device(options.device, 0)
    corpus = options.corpus or config.data.validation_corpus
    length, data = config.training.sequence_length, replace(config.data, validation_corpus=corpus)
    batches = ValidationBatches(
        open_split(data, saved.tokenizer, "validation"),
        sequence_length=length,
        batch_size=config.training.batch_size,
        rank=0,
        ranks=1,
        sequences=options.sequences or config.validation.sequences,
    )
    print(saved, file=sys.stderr, flush=True)
    result = validate(
        saved.model.to(device, compute_dtype(config.parallel.compute_dtype, device)),
        batches,
        World(rank=0, size=1, workers=1, device=device),
        chunk_tokens=config.training.loss_chunk_tokens,
    )
    print(
        f"loss {result.loss:.4f}, perplexity {result.perplexity:,.2f} over {result.tokens:,} "
        f"tokens ({batches.sequences:,} sequences of {length:,}) of {corpus or data.corpus}"
    )


def main(arguments: Sequence[str]) -> int:
    command, *words = arguments
    parser = CommandParser(command, "Write text with a trained model, or print its loss.")
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto: a GPU")
    if command == "generate":
        add("--prompt", default="", help="text to continue (default: the beginning of a document)")
        add("--tokens", type=int, default=100, help="at most so many tokens (default 100)")
        add("--temperature", type=float, default=0.8, help="default 0.8; 0: greedy")
        add("--top-k", type=int, default=0, help="only so many of the likeliest tokens (0: all)")
        add("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    else:
        add("--corpus", help="as data.validation_corpus (default: what the run held out)")
        add("--sequences", type=int, help="the first ones (default: as many as the run)")
    return run_command(_generate if command == "generate" else _validate, parser, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
