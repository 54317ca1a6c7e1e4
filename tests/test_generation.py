"""What is drawn from the model, and how the context is kept."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.generation import choose, generate, next_logits
from torchtitan_diloco.models.chinchilla.model import Decoder

VOCABULARY, ROWS, LENGTH = 50, 64, 12
LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20)


def build(positions: str = "rotary") -> Decoder:
    decoder = Decoder(
        Model(layers=2, width=24, heads=2, head_dim=8, positions=positions), ROWS, LENGTH
    )  # type: ignore[arg-type]
    decoder.init_weights(seed=0)
    with torch.no_grad():
        decoder.embedding.weight *= 20  # sharper than at the start of training
        decoder.embedding.weight[VOCABULARY:] *= (
            20  # rows that stand for nothing would be chosen all the time
        )
    return decoder


def draw(decoder: Decoder, tokens: list[int], **changes: Any) -> list[int]:
    return list(
        generate(decoder, tokens, **{"vocab_size": VOCABULARY, "max_new_tokens": 20, **changes})
    )


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@settings(max_examples=30)
@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_token_is_of_the_vocabulary_and_set_by_the_seed(
    positions: str, tokens: list[int], seed: int
) -> None:
    decoder = build(positions)
    first = draw(decoder, tokens, seed=seed, max_new_tokens=5)
    assert first == draw(decoder, tokens, seed=seed, max_new_tokens=5)
    assert len(first) == 5
    assert all(0 <= token < VOCABULARY for token in first)
    assert first == draw(decoder, tokens[-LENGTH:], seed=seed, max_new_tokens=5), (
        "what is older than the model reads"
    )


def test_seeds_differ_and_torchs_own_generator_is_left_alone() -> None:
    decoder, state = build(), torch.get_rng_state()
    drawn = {tuple(draw(decoder, [1], seed=seed, temperature=2.0)) for seed in range(5)}
    assert len(drawn) == 5
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in decoder.parameters())


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_greedy_is_the_likeliest_token_of_the_context(positions: str) -> None:
    decoder, tokens = build(positions), [3, 4]
    for token in generate(
        decoder, [3, 4], vocab_size=VOCABULARY, max_new_tokens=2 * LENGTH, temperature=0
    ):
        logits = decoder(torch.tensor([tokens[-LENGTH:]]))[0, -1]
        torch.testing.assert_close(next_logits(decoder, tokens[-LENGTH:]), logits)
        assert token == int(logits[:VOCABULARY].argmax())
        tokens.append(token)
    assert len(tokens) == 2 + 2 * LENGTH
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-9}):
        assert draw(decoder, [3, 4], max_new_tokens=2 * LENGTH, **narrow) == tokens[2:]


def test_the_stop_token_ends_the_text_and_is_not_yielded() -> None:
    decoder = build()
    free = draw(decoder, [5], temperature=3.0, max_new_tokens=40)
    for stop in set(free[:10]):
        assert (
            draw(decoder, [5], temperature=3.0, max_new_tokens=40, stop=stop)
            == free[: free.index(stop)]
        )


def test_tokens_come_one_by_one() -> None:
    endless = generate(build(), [1], vocab_size=VOCABULARY, max_new_tokens=10**9)
    assert len(list(itertools.islice(endless, 3))) == 3
    assert draw(build(), [1], max_new_tokens=0) == []


@given(LOGITS, st.integers(0, 25), st.floats(0.01, 1.0), st.floats(0.05, 5.0), st.integers(0, 1000))
def test_a_choice_is_among_the_likeliest(
    logits: list[float], top_k: int, top_p: float, temperature: float, seed: int
) -> None:
    values = torch.tensor(logits)
    token = choose(values, temperature, top_k, top_p, torch.Generator().manual_seed(seed))
    if top_k:
        assert int((values > values[token]).sum()) < top_k
    probabilities = (values.double() / temperature).softmax(0)
    likelier = probabilities[values > values[token]].sum()
    assert likelier < top_p + 1e-9 or top_k, "the likelier ones alone fill top_p"


def test_choices_follow_the_models_probabilities() -> None:
    logits, generator = torch.tensor([1.0, 0.0, 2.0, -1.0]), torch.Generator().manual_seed(0)
    for temperature, top_k, top_p, kept in (
        (1.0, 0, 1.0, [0, 1, 2, 3]),
        (2.0, 3, 1.0, [0, 1, 2]),
        (1.0, 0, 0.7, [0, 2]),
    ):
        drawn = torch.tensor(
            [choose(logits, temperature, top_k, top_p, generator) for _ in range(4000)]
        )
        expected = torch.zeros(4)
        expected[kept] = (logits[kept] / temperature).softmax(0)
        torch.testing.assert_close(
            torch.bincount(drawn, minlength=4) / 4000, expected, rtol=0, atol=0.03
        )
        assert set(drawn.tolist()) == set(kept)


def test_a_broken_model_is_an_error() -> None:
    decoder = build()
    with torch.no_grad():
        decoder.norm.weight.fill_(float("nan"))  # type: ignore[operator]
    with pytest.raises(ValueError, match="logits are not finite"):
        draw(decoder, [1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens = -1 is negative: give 0 or more"),
        ({"temperature": -0.1}, "temperature = -0.1 is not a number from 0 on"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"top_k": -1}, "top_k = -1 is negative"),
        ({"top_p": 0.0}, "top_p = 0.0 is not above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"top_p": float("nan")}, "top_p = nan"),
        ({"seed": -1}, "seed = -1 is not in 0"),
        ({"seed": 2**63}, "seed = 9223372036854775808 is not in 0"),
        ({"stop": 50}, "stop: 50 is not an id of a vocabulary of 50"),
        ({"vocab_size": 65}, r"vocab_size = 65 is not in 1 \.\.\. 64"),
        ({"vocab_size": 0}, "vocab_size = 0"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_drawn(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(build(), [1], **{"vocab_size": VOCABULARY, "max_new_tokens": 1, **changes})


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "tokens is empty"), ([1, 50], "tokens: 50 is not"), ([-1], "tokens: -1")],
)
def test_wrong_tokens_are_named(tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(build(), tokens, vocab_size=VOCABULARY, max_new_tokens=1)
