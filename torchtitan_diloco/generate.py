"""Write text with a trained model, token by token.

.venv/bin/torchtitan-diloco generate outputs/RUN --prompt "def main("
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.distributed.world import pick_device
from torchtitan_diloco.export.saved_model import CommandParser, SavedModel, in_range, run_command
from torchtitan_diloco.log import UserError
from torchtitan_diloco.models import LanguageModel


def generate(
    model: LanguageModel,
    tokens: Sequence[int],
    *,
    vocab_size: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow `tokens`, until `stop`, which is excluded.

    Ids from `vocab_size` on only pad the embedding and are never drawn. For `temperature`, `top_k`
    and `top_p` see `draw`.
    """
    assert tokens
    context, generator = list(tokens), torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        context = context[-model.sequence_length :]
        logits = next_logits(model, context)[:vocab_size]
        token = draw(logits, temperature, top_k, top_p, generator)
        if token == stop:
            return
        yield token
        context.append(token)


@torch.no_grad()
def next_logits(model: LanguageModel, context: Sequence[int]) -> Tensor:
    """Return the logits of the next token, fp32 [vocabulary], on the CPU, so that random draws are
    the same for all devices."""
    inputs = torch.tensor([context], dtype=torch.int64, device=next(model.parameters()).device)
    logits: Tensor = model(inputs, head=lambda hidden, matrix: F.linear(hidden[0, -1], matrix))
    return logits.float().cpu()


def draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """Draw the id of a token, given the logits [vocabulary].

    Temperature 0 takes the most likely token. `top_k` keeps the K most likely tokens (0: all),
    `top_p` the most likely ones that together have this probability.
    """
    if not bool(logits.isfinite().all()):
        raise UserError(
            "the model's logits are not finite: its weights are damaged, or its training diverged"
        )
    if temperature == 0:
        return int(logits.argmax())
    # Shift the largest logit to 0, so that a temperature near 0 does not make it infinite.
    scaled = (logits.double() - logits.max()) / temperature
    scaled, ids = scaled.sort(descending=True, stable=True)
    if top_k:
        scaled, ids = scaled[:top_k], ids[:top_k]
    probabilities = scaled.softmax(dim=0)
    # Keep a token if those before it have at most top_p. This always keeps the first one.
    before = probabilities.cumsum(dim=0) - probabilities
    kept = probabilities.where(before <= top_p, 0.0)
    return int(ids[torch.multinomial(kept, 1, generator=generator)])


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield text as soon as its characters are complete. A token may end inside a character."""
    ids, done, text = list[int](), "", ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(done) :]
            done = text
    if rest := text[len(done) :]:
        yield rest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("generate", "Write text with a trained model.")
    add = parser.add_argument
    add("--prompt", default="", help="text to continue (default: the beginning of a document)")
    count, natural, seeds = in_range(int, 1), in_range(int, 0), in_range(int, 0, 2**62)
    add("--tokens", type=natural, default=100, metavar="N", help="at most N tokens (default 100)")
    temperature, probability = in_range(float, 0), in_range(float, 0, 1)
    add("--temperature", type=temperature, default=0.8, metavar="T", help="default 0.8; 0: greedy")
    add("--top-k", type=natural, default=0, metavar="K", help="only the K likeliest (0: all)")
    nucleus = "only the likeliest that together have P"
    add("--top-p", type=probability, default=1.0, metavar="P", help=nucleus)
    add("--seed", type=seeds, default=0, help="the same seed gives the same text (default 0)")
    add("--count", type=count, default=1, metavar="N", help="texts, of seeds from --seed on")
    parser.add_device()
    try:
        return run_command(_generate, parser, arguments)
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:  # stdout is closed, and Python flushes it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _generate(saved: SavedModel, options: argparse.Namespace) -> None:
    tokenizer, model = saved.tokenizer, saved.model.to(pick_device(options.device, 0))
    print(saved, file=sys.stderr, flush=True)
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
        for piece in stream_text(tokenizer, tokens):
            print(piece, end="", flush=True)
        print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
