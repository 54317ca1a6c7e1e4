"""The decoder's sizes and the properties a decoder must have."""

import pytest
import torch

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.diloco.fields import setting_types
from torchtitan_diloco.models.chinchilla.flavors import FLAVORS
from torchtitan_diloco.models.chinchilla.model import Decoder

# Millions of parameters, as the papers' shapes give them with a vocabulary of 32,000.
PUBLISHED = {
    "35m": 35.3,
    "100m": 88.3,
    "200m": 183.8,
    "300m": 335.9,
    "500m": 558.8,
    "1b": 1273,
    "4b": 4175,
    "diloco-60m": 58.9,
    "diloco-150m": 149.8,
    "diloco-400m": 388.9,
}
VARIANTS = [
    Model(),
    Model(norm="layernorm"),
    Model(positions="learned"),
    Model(activation="swiglu"),
    Model(qk_norm=False, heads=3, head_dim=10),
]


def build(config: Model, vocabulary: int = 50, length: int = 16) -> Decoder:
    decoder = Decoder(config, vocabulary, length)
    decoder.init_weights(seed=0)
    return decoder


@pytest.mark.parametrize(("flavor", "millions"), PUBLISHED.items())
def test_parameter_counts_are_the_papers(flavor: str, millions: float) -> None:
    with torch.device("meta"):
        decoder = Decoder(Model(flavor=flavor), 32_000, 2048)  # type: ignore[arg-type]
    matrices = sum(parameter.numel() for parameter in decoder.parameters() if parameter.dim() > 1)
    assert matrices / 1e6 == pytest.approx(millions, abs=0.51 if millions > 1000 else 0.051)
    gains = decoder.parameter_counts()["total"] - matrices
    assert gains < 1e-3 * matrices, "beside the matrices there are only the norms' gains"


def test_the_config_offers_exactly_the_flavors_there_are() -> None:
    assert set(setting_types(Model)["flavor"].__args__) == set(FLAVORS)


@pytest.mark.parametrize("config", VARIANTS)
def test_no_token_sees_the_future(config: Model) -> None:
    decoder = build(config)
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 50
    before, after = decoder(tokens), decoder(changed)
    assert before.shape == (2, 16, 50)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_order_matters(positions: str) -> None:
    decoder = build(Model(positions=positions))  # type: ignore[arg-type]
    tokens = torch.arange(16).unsqueeze(0)
    swapped = tokens.clone()
    swapped[0, :2] = torch.tensor([1, 0])
    assert not torch.allclose(decoder(tokens)[:, -1], decoder(swapped)[:, -1], atol=1e-6)


def test_rotary_attention_depends_on_distance_only() -> None:
    from torchtitan_diloco.models.chinchilla.model import rotary_table, rotate

    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=generator, dtype=torch.float64)
    table = rotary_table(64, 8, 10_000.0, torch.device("cpu"))
    turned_q = rotate(query.expand(1, 1, 64, 8), table)
    turned_k = rotate(key.expand(1, 1, 64, 8), table)
    scores = (turned_q @ turned_k.transpose(-1, -2))[0, 0]
    for distance in (0, 3, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", VARIANTS)
def test_every_parameter_learns_and_none_is_a_bias(config: Model) -> None:
    decoder = build(config)
    decoder(torch.arange(16).unsqueeze(0)).square().sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
        assert not name.endswith("bias")


def test_head_and_embedding_are_tied() -> None:
    decoder = build(Model())
    matrices = [name for name, parameter in decoder.named_parameters() if 50 in parameter.shape]
    assert matrices == ["embedding.weight"]


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    first, second, other = build(Model()), build(Model(layers=2)), Decoder(Model(), 50, 16)
    other.init_weights(seed=1)
    shared = dict(second.named_parameters())
    for name, parameter in first.named_parameters():
        residual = name.endswith(("out.weight", "down.weight"))  # scaled by the depth
        if name in shared and not residual:
            assert torch.equal(parameter, shared[name]), name
        if parameter.dim() > 1:
            assert not torch.equal(parameter, dict(other.named_parameters())[name])


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    decoder = build(Model(), vocabulary=256, length=64)
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(
        decoder(tokens).flatten(0, 1), tokens.roll(1).flatten()
    )
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), rel=0.02)


def test_flops_of_a_token() -> None:
    config = Model(
        layers=2, width=8, heads=2, head_dim=4, feed_forward=32, qk_norm=False, positions="learned"
    )
    decoder = Decoder(config, vocab_size=10, sequence_length=16)
    weights = 10 * 8 + 2 * (4 * 8 * 8 + 2 * 8 * 32) + 5 * 8
    assert decoder.flops_per_token(16) == 6 * weights + 12 * 2 * 2 * 4 * 16


def test_odd_head_dim_needs_learned_positions() -> None:
    with pytest.raises(ValueError, match=r"model.head_dim = 7 .*learned"):
        Decoder(Model(head_dim=7), 50, 16)
    Decoder(Model(head_dim=7, positions="learned"), 50, 16)
