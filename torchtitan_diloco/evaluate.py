"""Text and loss of a trained model.

.venv/bin/torchtitan-diloco generate outputs/RUN --prompt "def main("
.venv/bin/torchtitan-diloco validate outputs/RUN
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_diloco.components.optimizer import compute_dtype
from torchtitan_diloco.components.validation import validate
from torchtitan_diloco.data.corpus import open_split
from torchtitan_diloco.data.loader import ValidationBatches
from torchtitan_diloco.distributed.world import World, pick_device
from torchtitan_diloco.export.saved_model import CommandParser, SavedModel, positive, run_command
from torchtitan_diloco.log import UserError
from torchtitan_diloco.models import LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens: Sequence[int],
    *,
    vocab_size: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow `tokens`, until `stop`, which is excluded.

    Ids from `vocab_size` on only pad the embedding and are never drawn.
    """
    generator, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    context = list(tokens)
    for _ in range(max_new_tokens):
        context = context[-model.sequence_length :]
        logits: Tensor = model(
            torch.tensor([context], device=device),
            head=lambda hidden, matrix: F.linear(hidden[0, -1], matrix[:vocab_size]),
        )
        # Draw on the CPU, so that a seed gives the same text on all devices.
        token = draw(logits.float().cpu(), temperature, top_p, generator)
        if token == stop:
            return
        yield token
        context.append(token)


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw a token, given the logits [vocabulary].

    Temperature 0 takes the most likely token. `top_p` keeps the most likely tokens that together
    have this probability.
    """
    if not bool(logits.isfinite().all()):
        raise UserError("the logits are not finite: the training diverged; use an earlier --step")
    if temperature == 0:
        return int(logits.argmax())
    # Shift the largest logit to 0, so that a temperature near 0 does not make it infinite.
    scaled = (logits.double() - logits.max()) / temperature
    probabilities, ids = scaled.softmax(dim=0).sort(descending=True, stable=True)
    # Keep a token if those before it have at most top_p. This always keeps the first one.
    before = probabilities.cumsum(dim=0) - probabilities
    kept = probabilities.where(before <= top_p, 0.0)
    return int(ids[torch.multinomial(kept, 1, generator=generator)])


def print_text(saved: SavedModel, options: argparse.Namespace) -> None:
    tokenizer, model = saved.tokenizer, saved.model.to(pick_device(options.device, 0))
    if not options.temperature >= 0 or not 0 <= options.top_p <= 1:
        chosen = f"--temperature {options.temperature} --top-p {options.top_p}"
        raise UserError(f"{chosen}: give a temperature from 0 up, and a probability")
    prompt = tokenizer.encode(os.fsencode(options.prompt).decode(errors="replace")).tolist()
    tokens = generate(
        model,
        prompt or [tokenizer.end_of_document],
        vocab_size=tokenizer.vocab_size,
        max_new_tokens=options.tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        stop=tokenizer.end_of_document,
    )
    text = tokenizer.decode([*prompt, *tokens])
    print(saved, file=sys.stderr)
    print(text)


def print_loss(saved: SavedModel, options: argparse.Namespace) -> None:
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


def main(arguments: Sequence[str]) -> int:
    """Run `generate ...` or `validate ...`."""
    name, *words = arguments
    if name == "generate":
        parser = CommandParser(name, "Write text with a trained model.")
        add = parser.add_argument
        add("--prompt", default="", help="text to continue (default: the beginning of a document)")
        add("--tokens", type=positive, default=100, metavar="N", help="at most N (default 100)")
        add("--temperature", type=float, default=0.8, help="default 0.8; 0: the most likely token")
        add("--top-p", type=float, default=1.0, help="only the likeliest that together have P")
        add("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    else:
        parser = CommandParser(name, "Print the loss and perplexity of a trained model.")
        add = parser.add_argument
        add("--corpus", help="as data.validation_corpus (default: what the run held out)")
        add("--sequences", type=positive, help="the first N (default: as many as the run)")
        add("--batch-size", type=positive, help="sequences per batch (default: the run's)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto: a GPU")
    return run_command(print_text if name == "generate" else print_loss, parser, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
