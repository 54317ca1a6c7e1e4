"""The sizes of the flavors and the properties a decoder must have."""

import math
from dataclasses import replace

import pytest
import torch

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.models import FLAVORS, build_model
from torchtitan_diloco.models.decoder import SIZES, Decoder, resolve_shape, shape_of
from torchtitan_diloco.models.interface import flops_per_token, init_weights, parameter_counts

MILLIONS = {
    "paper-35m": 35.3,
    "paper-100m": 88.3,
    "paper-200m": 183.8,
    "paper-300m": 335.9,
    "paper-500m": 558.8,
    "paper-1b": 1273,
    "paper-4b": 4175,
    "diloco-60m": 58.9,
    "diloco-150m": 149.8,
    "diloco-400m": 388.9,
}
"""Of parameters, as the papers' shapes give them with a vocabulary of 32,000."""
VARIANTS = [
    Model(),
    Model(activation="gelu"),
    Model(qk_norm=False, heads=3, head_dim=10),
    Model(heads=4, kv_heads=2, rotary_scaling=4.0, tied_head=False),
]
LLAMAS = {"llama-1b": 1_235_814_400, "llama-3b": 3_212_749_824, "llama-8b": 8_030_261_248}


def build(config: Model, vocabulary: int = 50) -> Decoder:
    decoder = Decoder(resolve_shape(config), vocabulary)
    init_weights(decoder, seed=0)
    return decoder


def matrices(flavor: str) -> int:
    """Return the number of parameters in matrices."""
    model = build_model(Model(flavor=flavor), 32_000, 2048)
    found = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    gains = parameter_counts(model)["total"] - found
    assert gains < 1e-3 * found, "beside the matrices there are only the norms' gains"
    return found


@pytest.mark.parametrize("flavor", [*MILLIONS, *SIZES])
def test_parameter_counts_are_the_papers(flavor: str) -> None:
    if flavor in SIZES:  # gated, with as many parameters as in the papers
        assert 1 <= matrices(flavor) / matrices(f"paper-{flavor}") < 1.02
    else:
        millions = MILLIONS[flavor]
        tolerance = 0.51 if millions > 1000 else 0.051
        assert matrices(flavor) / 1e6 == pytest.approx(millions, abs=tolerance)


@pytest.mark.parametrize(("flavor", "parameters"), LLAMAS.items())
def test_parameter_counts_are_those_of_published_llamas(flavor: str, parameters: int) -> None:
    model = build_model(Model(flavor=flavor), 128_256, 8192)
    tables = 2 if flavor == "llama-8b" else 1  # embedding and head
    counts = {"total": parameters, "embedding": tables * 128_256 * shape_of(model).width}
    assert parameter_counts(model) == counts


def test_a_flavor_that_does_not_exist_is_refused() -> None:
    message = r'flavor = "llama-8": there is no .*; there are debug, .*; did you mean llama-8b\?$'
    with pytest.raises(UserError, match=message) as caught:
        build_model(Model(flavor="llama-8"), 50, 16)
    assert ", ".join(FLAVORS) in str(caught.value)


@pytest.mark.parametrize("config", VARIANTS)
def test_a_decoder_reads_the_past_in_order_and_every_parameter_learns(config: Model) -> None:
    decoder = build(config)
    tokens = torch.arange(32).view(2, 16)
    future = tokens.clone()
    swapped = tokens.clone()
    future[:, 9:] += 10
    swapped[:, :2] = tokens[:, :2].flip(1)
    before = decoder(tokens)
    after = decoder(future)
    assert before.shape == (2, 16, 50)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])
    assert not torch.allclose(before[:, -1], decoder(swapped)[:, -1], atol=1e-6)
    before.square().sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
        assert not name.endswith("bias")


def test_a_shape_that_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.kv_heads = 2 does not divide model.heads = 3"):
        build_model(Model(kv_heads=2), 50, 16)
    with pytest.raises(ValueError, match=r"model.head_dim = 7 is odd"):
        build_model(Model(head_dim=7), 50, 16)


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    first = build(Model())
    second = build(Model(layers=2))
    other = build(Model())
    init_weights(other, seed=1)
    shared = dict(second.named_parameters())
    for name, parameter in first.named_parameters():
        residual = name.endswith(("out.weight", "down.weight"))  # scaled by the depth
        if name in shared and not residual:
            assert torch.equal(parameter, shared[name]), name
        if parameter.dim() > 1:
            assert not torch.equal(parameter, dict(other.named_parameters())[name])


@pytest.mark.parametrize("config", VARIANTS)
def test_initial_loss_is_that_of_a_uniform_guess(config: Model) -> None:
    decoder = build(config, vocabulary=256)
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
    logits = decoder(tokens).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens.roll(1).flatten())
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)


def test_flops_of_a_token() -> None:
    config = Model(layers=2, width=8, heads=2, head_dim=4, feed_forward=32, qk_norm=False)
    attention = 12 * 2 * 2 * 4 * 16
    gelu = build(replace(config, activation="gelu"), vocabulary=10)
    weights = 10 * 8 + 2 * (4 * 8 * 8 + 2 * 8 * 32) + 5 * 8
    assert flops_per_token(gelu, 16) == 6 * weights + attention
    for tied_head in (True, False):  # one matrix product with the vocabulary
        grouped = build(replace(config, kv_heads=1, tied_head=tied_head), vocabulary=10)
        weights = 10 * 8 + 2 * (3 * 8 * 8 + 3 * 8 * 32) + 5 * 8
        assert flops_per_token(grouped, 16) == 6 * weights + attention
