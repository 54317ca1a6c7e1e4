"""Text goes on: tokens drawn one by one from a decoder, each from a pass over all that stands before it."""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_diloco.models.chinchilla.model import Decoder

LARGEST_SEED = 2**63 - 1


def generate(
    model: Decoder,
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
    """Yields the tokens that follow `tokens`: `max_new_tokens` of them, or fewer where `stop` comes up (it ends the text
    and is not yielded).

    Temperature 0 takes the likeliest token. `top_k` and `top_p` leave only the likeliest tokens to choose from (0 and 1:
    all of them). Ids from `vocab_size` on, which fill up the embedding and stand for nothing, are never chosen. Beyond
    the model's sequence length the oldest tokens are dropped. The same arguments give the same tokens.
    """
    _check_tokens(model, tokens, vocab_size, stop)
    _check_choice(max_new_tokens, temperature, top_k, top_p, seed)
    return _generate(
        model,
        [int(token) for token in tokens],
        vocab_size,
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        seed,
        stop,
    )


def _generate(
    model: Decoder,
    context: list[int],
    vocab_size: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: int | None,
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        context = context[-model.sequence_length :]
        token = choose(
            next_logits(model, context)[:vocab_size], temperature, top_k, top_p, generator
        )
        if token == stop:
            return
        yield token
        context.append(token)


@torch.no_grad()
def next_logits(model: Decoder, context: Sequence[int]) -> Tensor:
    """Of the token that follows the context: fp32, on the CPU, where every device draws the same random numbers."""
    inputs = torch.tensor([context], dtype=torch.int64, device=model.embedding.weight.device)
    logits: Tensor = model(inputs, head=_last_place)
    return logits.float().cpu()


def _last_place(hidden: Tensor, matrix: Tensor) -> Tensor:
    return F.linear(hidden[0, -1], matrix)


def choose(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """One of the ids, by the logits [vocabulary]."""
    if not bool(logits.isfinite().all()):
        raise ValueError(
            "the model's logits are not finite: its weights are damaged, or its training has diverged"
        )
    if temperature == 0:
        return int(logits.argmax())
    # Less than the greatest logit first: a temperature near 0 must not make an infinity of it.
    scaled, ids = ((logits.double() - logits.max()) / temperature).sort(
        descending=True, stable=True
    )
    if top_k:
        scaled, ids = scaled[:top_k], ids[:top_k]
    probabilities = scaled.softmax(dim=0)
    # A token stays while those before it are less than top_p, so the first one always does.
    before = probabilities.cumsum(dim=0) - probabilities
    kept = probabilities.where(before < top_p, 0.0)
    return int(ids[torch.multinomial(kept, 1, generator=generator)])


def _check_tokens(model: Decoder, tokens: Sequence[int], vocab_size: int, stop: int | None) -> None:
    if not 1 <= vocab_size <= model.vocab_size:
        raise ValueError(
            f"vocab_size = {vocab_size} is not in 1 ... {model.vocab_size}, the rows of the model's embedding: give the "
            "vocabulary of the tokenizer that the model was trained with"
        )
    if len(tokens) == 0:
        raise ValueError(
            "tokens is empty: give at least one, such as the end-of-document token, after which documents begin"
        )
    for name, ids in (("tokens", tokens), ("stop", () if stop is None else (stop,))):
        outside = [int(token) for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"{name}: {outside[0]} is not an id of a vocabulary of {vocab_size}; encode the text with the tokenizer that "
                "the model was trained with"
            )


def _check_choice(
    max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens} is negative: give 0 or more")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            f"temperature = {temperature} is not a number from 0 on: 0 is greedy, 1 is the model's own spread"
        )
    if top_k < 0:
        raise ValueError(
            f"top_k = {top_k} is negative: give the number of tokens to choose from, or 0 for all of them"
        )
    if not 0 < top_p <= 1:
        raise ValueError(
            f"top_p = {top_p} is not above 0 and at most 1: give 1 to choose from all tokens"
        )
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed = {seed} is not in 0 ... {LARGEST_SEED}: give another one")
