"""Every parameter is in exactly one fragment, whatever the pattern."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.diloco.config import Fragments
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.models.decoder import Decoder, resolve_shape


def decoder(layers: int = 7, vocabulary: int = 64) -> nn.Module:
    config = Model(layers=layers, width=8, heads=2, head_dim=4, feed_forward=16)
    with torch.device("meta"):
        return Decoder(resolve_shape(config), vocabulary)


def holder(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        setattr(model, name, module)
    return model


def names(model: nn.Module, layers_per_fragment: int = 1) -> list[str]:
    chosen = Fragments(layers_per_fragment=layers_per_fragment)
    return [fragment.name for fragment in build_fragments(model, chosen)]


def test_more_blocks_in_a_fragment_than_there_are_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"fragment = 8: the model has 7 .* give 1 to 7"):
        build_fragments(decoder(), Fragments(layers_per_fragment=8))
    blocks, _ = build_fragments(decoder(2), Fragments())
    assert blocks.name == "blocks.0, blocks.1", "the default is for deeper models"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("strided", [["0", "3", "6"], ["1", "4"], ["2", "5"]]),
        ("sequential", [["0", "1", "2"], ["3", "4", "5"], ["6"]]),
    ],
)
def test_blocks_and_the_rest(pattern: Any, expected: list[list[str]]) -> None:
    *blocks, rest = build_fragments(decoder(), Fragments(pattern=pattern))
    found = [sorted({part.name.split(".")[1] for part in one.parts}) for one in blocks]
    assert found == expected
    assert {part.name for part in rest.parts} == {"embedding.weight", "norm.weight"}


@given(
    layers=st.integers(1, 12),
    per_fragment=st.integers(0, 5),
    pattern=st.sampled_from(["strided", "sequential"]),
    vocabulary=st.sampled_from([3, 64, 1000]),
)
def test_every_value_is_in_exactly_one_fragment(
    layers: int, per_fragment: int, pattern: Any, vocabulary: int
) -> None:
    model = decoder(layers, vocabulary)
    per_fragment = min(per_fragment, layers)
    fragments = build_fragments(model, Fragments(pattern=pattern, layers_per_fragment=per_fragment))
    found = sorted(part.name for fragment in fragments for part in fragment.parts)
    assert found == sorted(name for name, _ in model.named_parameters())
    assert all(fragment.parts for fragment in fragments)
    assert [fragment.index for fragment in fragments] == list(range(len(fragments)))


def test_which_modules_are_blocks() -> None:
    """A list or a dict with numbers, as in torchtitan; not the dict that holds the parts of a
    model, as in nanoGPT, nor a list of experts in a block."""
    block = nn.Linear(2, 2)
    numbered = nn.ModuleDict({str(number): nn.Linear(2, 2) for number in range(3)})
    assert names(holder(layers=numbered)) == ["layers.0", "layers.1", "layers.2"]
    parts = nn.ModuleDict({"wte": nn.Embedding(2, 2), "h": nn.ModuleList([block]), "ln": block})
    assert names(holder(transformer=parts))[0] == "transformer.h.0"
    experts = [
        nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(8))})
        for _ in range(4)
    ]
    assert names(holder(layers=nn.ModuleList(experts)), 2) == [
        "layers.0, layers.2",
        "layers.1, layers.3",
    ]
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert len(names(plain, 0)) == 1
    named = build_fragments(holder(trunk=plain), Fragments(blocks="trunk", layers_per_fragment=1))
    assert [fragment.name for fragment in named] == ["trunk.0", "trunk.1"]


def test_frozen_and_tied_parameters() -> None:
    blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    model = holder(embedding=nn.Embedding(5, 4), blocks=blocks, head=nn.Linear(4, 5, bias=False))
    model.get_submodule("head").weight = model.get_parameter("embedding.weight")
    blocks[1].requires_grad_(False)
    fragments = build_fragments(model, Fragments(layers_per_fragment=1))
    assert [[part.name for part in fragment.parts] for fragment in fragments] == [
        ["blocks.0.weight"],
        ["embedding.weight"],
    ]
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_fragments(model.requires_grad_(False), Fragments())


def test_parameters_that_have_no_mean_are_refused() -> None:
    model = holder(blocks=nn.ModuleList([nn.Linear(3, 3)]))
    model.rotation = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"parameter rotation is torch.complex64.*view_as_real"):
        build_fragments(model, Fragments())
    model.get_parameter("rotation").requires_grad_(False)
    assert len(build_fragments(model, Fragments())) == 1


def test_blocks_that_cannot_be_fragments() -> None:
    with pytest.raises(ValueError, match=r"no ModuleList.*layers_per_fragment = 0"):
        build_fragments(nn.Sequential(nn.Linear(3, 3)), Fragments())
    model = decoder()
    with pytest.raises(
        ValueError, match=r'"block" is not a module .* empty; did you mean blocks\?'
    ):
        build_fragments(model, Fragments(blocks="block"))
    model.get_submodule("blocks").requires_grad_(False)
    with pytest.raises(ValueError, match=r"have no trainable parameter.*layers_per_fragment = 0"):
        build_fragments(model, Fragments())
