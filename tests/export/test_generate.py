"""Tokens drawn from a model."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.export.__main__ import draw, generate
from torchtitan_diloco.models.decoder import Decoder, resolve_shape
from torchtitan_diloco.models.interface import init_weights

VOCABULARY, ROWS, LENGTH = 50, 64, 12


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    decoder = Decoder(resolve_shape(Model(layers=2, width=24, heads=2, head_dim=8)), ROWS)
    init_weights(decoder, seed=0)
    with torch.no_grad():
        decoder.embedding.weight *= 20  # sharper than at the start of training
        decoder.embedding.weight[VOCABULARY:] *= 20  # padding, which would always be drawn
    return decoder


def tokens_from(decoder: Decoder, tokens: list[int], new: int, **options: Any) -> list[int]:
    options |= {"vocab_size": VOCABULARY, "sequence_length": LENGTH, "max_new_tokens": new}
    return list(generate(decoder, tokens, **options))


@settings(max_examples=12)
@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_seed_sets_the_tokens_and_padding_is_never_drawn(
    decoder: Decoder, tokens: list[int], seed: int
) -> None:
    state = torch.get_rng_state()
    first = tokens_from(decoder, tokens, 5, seed=seed)
    assert len(first) == 5
    assert all(0 <= token < VOCABULARY for token in first)
    # No token matters that is older than the model's sequence length.
    assert first == tokens_from(decoder, tokens[-LENGTH:], 5, seed=seed)
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator is left alone"


def test_greedy_takes_the_most_likely_token_until_the_stop(decoder: Decoder) -> None:
    tokens, found = [3, 4], tokens_from(decoder, [3, 4], 2 * LENGTH, temperature=0)
    for token in found:
        logits = decoder(torch.tensor([tokens[-LENGTH:]]))[0, -1]
        assert token == int(logits[:VOCABULARY].argmax())
        tokens.append(token)
    assert found == tokens_from(decoder, [3, 4], 2 * LENGTH, temperature=1e-9)
    stop = found[5]
    stopped = tokens_from(decoder, [3, 4], 2 * LENGTH, temperature=0, stop=stop)
    assert stopped == found[: found.index(stop)], "which is not part of the text"


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_draws_follow_the_models_probabilities(temperature: float) -> None:
    logits, generator = torch.tensor([1.0, 0.0, 2.0, -1.0]), torch.Generator().manual_seed(0)
    drawn = torch.tensor([draw(logits, temperature, generator) for _ in range(1500)])
    found = torch.bincount(drawn, minlength=4) / 1500
    expected = (logits / temperature).softmax(0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    with pytest.raises(ValueError, match="logits are not finite"):
        draw(logits * float("nan"), temperature, generator)
