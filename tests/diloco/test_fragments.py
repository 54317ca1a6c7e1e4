"""Every parameter is in exactly one fragment, whatever the pattern."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.diloco.config import Fragments
from torchtitan_diloco.diloco.fragments import (
    Fragment,
    build_fragments,
)
from torchtitan_diloco.models.decoder import Decoder


def decoder(layers: int = 7, vocabulary: int = 64) -> nn.Module:
    with torch.device("meta"):
        return Decoder(
            Model(layers=layers, width=8, heads=2, head_dim=4, feed_forward=16), vocabulary, 16
        )


def blocks_of(fragment: Fragment) -> list[int]:
    return sorted(
        {int(part.name.split(".")[1]) for part in fragment.parts if part.name.startswith("blocks.")}
    )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("strided", [[0, 3, 6], [1, 4], [2, 5], []]), ("sequential", [[0, 1, 2], [3, 4, 5], [6], []])],
)
def test_blocks_and_the_rest(pattern: str, expected: list[list[int]]) -> None:
    fragments = build_fragments(decoder(), Fragments(pattern=pattern))  # type: ignore[arg-type]
    assert [blocks_of(fragment) for fragment in fragments] == expected
    assert {part.name for part in fragments[-1].parts} == {"embedding.weight", "norm.weight"}


@given(
    layers=st.integers(1, 12),
    per_fragment=st.integers(0, 5),
    pattern=st.sampled_from(["strided", "sequential"]),
    vocabulary=st.sampled_from([3, 64, 1000]),
)
def test_every_value_is_in_exactly_one_fragment(
    layers: int, per_fragment: int, pattern: str, vocabulary: int
) -> None:
    model = decoder(layers, vocabulary)
    fragments = build_fragments(model, Fragments(pattern=pattern, layers_per_fragment=per_fragment))  # type: ignore[arg-type]
    assert sum(fragment.parameters for fragment in fragments) == sum(
        p.numel() for p in model.parameters()
    )
    assert all(fragment.parts for fragment in fragments)
    assert [fragment.index for fragment in fragments] == list(range(len(fragments)))


def test_explicit_fragments_and_their_mistakes() -> None:
    model = decoder(layers=2)

    def build(*modules: tuple[str, ...]) -> tuple[Fragment, ...]:
        return build_fragments(model, Fragments(pattern="explicit", modules=modules))

    fragments = build(
        ("blocks.0", "norm"),
        ("blocks.1.attention",),
        ("blocks.1", "embedding.weight")[1:],
        ("blocks.1.feed_forward", "blocks.1.attention_norm", "blocks.1.feed_forward_norm"),
    )
    assert [part.name for part in fragments[2].parts] == ["embedding.weight"]
    with pytest.raises(ValueError, match=r"parameter norm.weight is in no fragment"):
        build(("blocks", "embedding"))
    with pytest.raises(ValueError, match=r"blocks.0.*is in more than one fragment"):
        build(("blocks", "embedding", "norm"), ("blocks.0",))
    with pytest.raises(ValueError, match=r'names "block.0".*did you mean blocks.0'):
        build(("block.0", "embedding", "norm"))


def test_any_module() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"no ModuleList.*layers_per_fragment = 0"):
        build_fragments(plain, Fragments())
    assert len(build_fragments(plain, Fragments(layers_per_fragment=0))) == 1
    nested = nn.Module()
    nested.trunk = plain
    named = build_fragments(nested, Fragments(blocks="trunk", layers_per_fragment=1))
    assert [fragment.name for fragment in named] == ["trunk.0", "trunk.1"]


def test_blocks_in_a_module_dict() -> None:
    """As in torchtitan, and not the dict that holds the parts of a model, as in nanoGPT."""
    model = nn.Module()
    model.layers = nn.ModuleDict({str(number): nn.Linear(2, 2) for number in range(3)})
    found = build_fragments(model, Fragments(layers_per_fragment=1))
    assert [fragment.name for fragment in found] == ["layers.0", "layers.1", "layers.2"]
    model = nn.Module()
    parts = {
        "wte": nn.Embedding(2, 2),
        "h": nn.ModuleList([nn.Linear(2, 2)]),
        "ln": nn.Linear(2, 2),
    }
    model.transformer = nn.ModuleDict(parts)
    assert build_fragments(model, Fragments())[0].name == "transformer.h.0"


def test_frozen_and_tied_parameters() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(5, 4)
    model.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    model.head = nn.Linear(4, 5, bias=False)
    model.head.weight = model.embedding.weight
    model.blocks[1].weight.requires_grad_(False)
    fragments = build_fragments(model, Fragments(layers_per_fragment=1))
    assert [[part.name for part in fragment.parts] for fragment in fragments] == [
        ["blocks.0.weight"],
        ["embedding.weight"],
    ]
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_fragments(model.requires_grad_(False), Fragments())


def test_experts_inside_a_block_are_no_blocks() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(8))})
        for _ in range(4)
    )
    names = [fragment.name for fragment in build_fragments(model, Fragments(layers_per_fragment=2))]
    assert names == ["layers.0, layers.2", "layers.1, layers.3"]


def test_blocks_that_cannot_be_fragments() -> None:
    model = decoder()
    with pytest.raises(ValueError, match=r'blocks = "block" is no module .*did you mean blocks'):
        build_fragments(model, Fragments(blocks="block"))
    model.get_submodule("blocks").requires_grad_(False)
    with pytest.raises(ValueError, match=r"have no trainable parameter.*layers_per_fragment = 0"):
        build_fragments(model, Fragments())
