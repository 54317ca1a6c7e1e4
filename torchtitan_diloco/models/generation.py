"""Tokens drawn from a model."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.models.interface import Cache, new_cache


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    sequence_length: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
    document_mask: bool = False,
    use_cache: bool = True,
) -> list[list[int]]:
    """Return the tokens that follow each prompt, until `stop`, which is excluded.

    But for rounding, the other prompts and the cache make no difference to the tokens after a
    prompt. Ids from `vocab_size` on only pad the embedding and are never drawn.

    `sequence_length`: the most tokens that the model reads. `document_mask`: whether a token
    attends to nothing before its document, which begins after a `stop`.
    """
    tokens_of_rows = [list[int]() for _ in prompts]
    generators = [torch.Generator().manual_seed(seed) for _ in prompts]
    unfinished = list(range(len(prompts)))
    reader = ContextReader(
        model,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        max_new_tokens=max_new_tokens if use_cache else 0,
    )
    for _ in range(max_new_tokens):
        contexts = [[*prompts[row], *tokens_of_rows[row]][-sequence_length:] for row in unfinished]
        if document_mask:
            contexts = [last_document(context, stop) for context in contexts]
        logits = reader.next_logits(contexts)
        stays = []
        for place, row in enumerate(unfinished):
            token = draw(logits[place], temperature, generators[row])
            if token != stop:
                tokens_of_rows[row].append(token)
                stays.append(place)
        if not stays:
            break
        if len(stays) < len(unfinished):
            reader.keep(stays)
            unfinished = [unfinished[place] for place in stays]
    return tokens_of_rows


def last_document(context: Sequence[int], end: int | None) -> list[int]:
    """Return the tokens of a context to which its last one attends if documents are separate. The
    token that ends a document belongs to it."""
    for place in reversed(range(len(context) - 1)):
        if context[place] == end:
            return list(context[place + 1 :])
    return list(context)


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw a token, given the logits [vocabulary]; with temperature 0, the most likely one."""
    if not bool(logits.isfinite().all()):
        raise UserError(
            "the logits are not finite: the training diverged; use an earlier checkpoint"
        )
    if temperature == 0:
        return int(logits.argmax())
    # Shift the largest logit to 0, so that a temperature near 0 does not make it infinite.
    scaled = (logits.double() - logits.max()) / temperature
    return int(torch.multinomial(scaled.softmax(dim=0), 1, generator=generator))


class ContextReader:
    """Reads contexts that grow, and with a cache only what is new in them.

    A cache holds contexts from their first token on. If one has lost its first token, as it was as
    long as `sequence_length`, all are read anew.
    """

    def __init__(
        self, model: nn.Module, *, vocab_size: int, sequence_length: int, max_new_tokens: int
    ) -> None:
        """Build a generator. `max_new_tokens`: for how many to have a cache, 0 to have none."""
        self._model = model
        self._vocab_size = vocab_size
        self._sequence_length = sequence_length
        self._max_new_tokens = max_new_tokens
        self._cache: Cache | None = None
        self._cached = list[list[int]]()

    def next_logits(self, contexts: Sequence[list[int]]) -> Tensor:
        """Return the logits after each context, fp32 [contexts, vocabulary].

        They are on the CPU, where a seed gives the same draws for all devices.
        """
        if self._cache is not None and [context[:-1] for context in contexts] == self._cached:
            new = [context[-1:] for context in contexts]
        else:
            new = list(contexts)
            lengths = [len(context) for context in contexts]
            room = min(self._max_new_tokens, self._sequence_length - min(lengths))
            self._cache = new_cache(self._model, lengths, room) if room else None
        self._cached = list(contexts)
        return self._read(new).float().cpu()

    def _read(self, rows: Sequence[list[int]]) -> Tensor:
        """Return the logits after each row of new tokens."""
        device = next(self._model.parameters()).device
        # No token sees what follows it, so padding on the right changes nothing.
        padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        number = torch.arange(len(rows), device=device)

        def head(hidden: Tensor, matrix: Tensor) -> Tensor:
            return F.linear(hidden[number, last], matrix[: self._vocab_size])

        options: dict[str, Any] = {} if self._cache is None else {"cache": self._cache}
        logits: Tensor = self._model(padded.to(device), head=head, **options)
        return logits

    def keep(self, places: Sequence[int]) -> None:
        """Forget all contexts but these."""
        self._cached = [self._cached[place] for place in places]
        if self._cache is not None:
            self._cache.keep(places)
