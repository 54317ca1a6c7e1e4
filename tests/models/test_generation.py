"""Tokens drawn from a model."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.export.reading import build
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models.decoder import Decoder, resolve_shape
from torchtitan_diloco.models.generation import draw, generate
from torchtitan_diloco.models.interface import init_weights

VOCABULARY = 50
ROWS = 64
LENGTH = 12
END = 7


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    decoder = Decoder(resolve_shape(Model(layers=2, width=24, heads=2, head_dim=8)), ROWS)
    init_weights(decoder, seed=0)
    with torch.no_grad():
        decoder.embedding.weight *= 20  # sharper than at the start of training
        decoder.embedding.weight[VOCABULARY:] *= 20  # padding, which would always be drawn
    return decoder


def tokens_from(decoder: nn.Module, tokens: list[int], new: int, **options: Any) -> list[int]:
    return continuations(decoder, [tokens], new, **options)[0]


def continuations(
    model: nn.Module, prompts: list[list[int]], new: int, **options: Any
) -> list[list[int]]:
    options |= {"vocab_size": VOCABULARY, "sequence_length": LENGTH, "max_new_tokens": new}
    return generate(model, prompts, **options)


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
    tokens = [3, 4]
    found = tokens_from(decoder, [3, 4], 2 * LENGTH, temperature=0)
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
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([draw(logits, temperature, generator) for _ in range(1500)])
    found = torch.bincount(drawn, minlength=4) / 1500
    expected = (logits / temperature).softmax(0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    with pytest.raises(ValueError, match="logits are not finite"):
        draw(logits * float("nan"), temperature, generator)


# --- several prompts, with and without a cache ----------------------------------------------------

MODELS = st.builds(
    Model,
    layers=st.just(2),
    width=st.just(24),
    heads=st.just(4),
    kv_heads=st.sampled_from([None, 1, 2]),
    head_dim=st.just(6),
    feed_forward=st.just(32),
    activation=st.sampled_from(["swiglu", "gelu"]),
    qk_norm=st.booleans(),
    tied_head=st.booleans(),
    rotary_base=st.sampled_from([100.0, 10_000.0]),
    rotary_scaling=st.sampled_from([1.0, 8.0]),
)
TOKENS = st.integers(0, VOCABULARY - 1)
PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=LENGTH), min_size=1, max_size=4)


@settings(max_examples=10)
@given(MODELS, st.lists(st.lists(TOKENS, min_size=4, max_size=9), min_size=1, max_size=3))
def test_a_cache_gives_the_same_logits(config: Model, rows: list[list[int]]) -> None:
    """Three tokens of each row are read after its beginning, and the first row ends before."""
    model = build(config)
    texts = [torch.tensor(row) for row in rows]
    expected = [model(text[None])[0] for text in texts]
    lengths = [len(row) - 3 for row in rows]
    cache = model.new_cache(lengths, new_tokens=3)
    beginnings = [text[:-3] for text in texts]
    logits = model(pad_sequence(beginnings, batch_first=True), cache=cache)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(logits[row, :length], expected[row][:length])
    for place in (-3, -2, -1):
        if place == -1 and len(rows) > 1:
            cache.keep(range(1, len(rows)))
            texts = texts[1:]
            expected = expected[1:]
        logits = model(torch.stack([text[place] for text in texts])[:, None], cache=cache)
        assert logits.shape[1] == 1
        wanted = torch.stack([of_row[place] for of_row in expected])
        torch.testing.assert_close(logits[:, 0], wanted, rtol=1e-5, atol=1e-4)


@settings(max_examples=15)
@given(MODELS, PROMPTS, st.booleans())
def test_a_prompt_has_the_same_text_in_any_company_with_and_without_a_cache(
    config: Model, prompts: list[list[int]], document_mask: bool
) -> None:
    """Some texts become longer than what the model reads, and some end before others."""
    model = build(config)
    options: dict[str, Any] = {"temperature": 0, "stop": END, "document_mask": document_mask}
    alone = [tokens_from(model, prompt, 8, use_cache=False, **options) for prompt in prompts]
    assert continuations(model, prompts, 8, use_cache=False, **options) == alone
    assert continuations(model, prompts, 8, **options) == alone
    if document_mask:
        model.end_of_document = END
        assert continuations(model, prompts, 8, temperature=0, stop=END) == alone


@pytest.mark.parametrize(("use_cache", "read"), [(True, [10, 2, 2, 2]), (False, [10, 12, 14, 16])])
def test_a_cache_reads_each_token_once(decoder: Decoder, use_cache: bool, read: list[int]) -> None:
    """The prompts are padded to five tokens, and continued with four."""
    lengths: list[int] = []
    hook = decoder.embedding.register_forward_pre_hook(
        lambda _, arguments: lengths.append(arguments[0].numel())
    )
    continuations(decoder, [[1, 2, 3, 4, 5], [6, 8, 9, 10]], 4, use_cache=use_cache)
    hook.remove()
    assert lengths == read


class Means(nn.Module):
    """A model of a user, which has no cache: the mean of all tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 16)

    def forward(self, tokens: Tensor, head: Any = F.linear) -> Any:
        counts = torch.arange(1, tokens.shape[1] + 1)[:, None]
        return head(self.embedding(tokens).cumsum(dim=1) / counts, self.embedding.weight)


@settings(max_examples=5)
@given(PROMPTS)
def test_a_model_without_a_cache_continues_several_prompts(prompts: list[list[int]]) -> None:
    torch.manual_seed(0)
    model = Means()
    alone = [tokens_from(model, prompt, 5, seed=3) for prompt in prompts]
    assert continuations(model, prompts, 5, seed=3) == alone
