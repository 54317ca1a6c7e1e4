"""Shards of islands with different numbers of ranks, and the arithmetic of replaying."""

import math
from typing import Any, cast
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.islands.written import FACTS
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco import DiLoCoConfig, Quantization
from torchtitan_diloco.diloco.arithmetic import outer_step
from torchtitan_diloco.diloco.codecs import CODECS, UNIT, build_codec
from torchtitan_diloco.diloco.config import CodecName, Fragments
from torchtitan_diloco.diloco.fragments import Fragment, Part, build_fragments
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.islands.copies import Copies, encode_delta, fingerprints
from torchtitan_diloco.islands.joining import check_facts
from torchtitan_diloco.islands.layout import Layout, Ranks, shapes_of

PIECE = UNIT
"""Values per piece: few, so that a fragment has several pieces."""
SHAPES = [(5, 3), (1,), (7,), (4, 2, 3), (2, 9)]


def fragment_of(shapes: list[tuple[int, ...]]) -> Fragment:
    parts = [Part(str(n), nn.Parameter(torch.zeros(shape))) for n, shape in enumerate(shapes)]
    return Fragment(0, "all", tuple(parts))


def shard(whole: Tensor, fragment: Fragment, ranks: int, rank: int) -> Tensor:
    layout = Layout(shapes_of(fragment), ranks, rank)
    values = torch.empty(layout.sizes(ranks)[rank])
    layout.scatter(whole, values)
    return values


@settings(max_examples=40)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_shards_are_those_of_fsdp_and_their_checksums_add_up(
    shapes: list[tuple[int, ...]], ranks: int, seed: int
) -> None:
    fragment = fragment_of(shapes)
    layout = Layout(shapes_of(fragment))
    whole = torch.randn(layout.values, generator=torch.Generator().manual_seed(seed))
    parameters, start = [], 0
    for part in fragment_of(shapes).parts:
        size = part.parameter.numel()
        parameters.append(whole[start : start + size].view(part.parameter.shape))
        start += size
    total = torch.tensor(0)
    for rank in range(ranks):
        values = shard(whole, fragment, ranks, rank)
        chunks = [one.chunk(ranks) for one in parameters]
        mine = [one[rank].flatten() for one in chunks if rank < len(one)]
        assert torch.equal(values, torch.cat([*mine, torch.empty(0)]))
        total += Layout(shapes_of(fragment), ranks, rank).checksum(values)
    assert total == layout.checksum(whole)
    changed = whole.clone()
    changed.view(torch.int32)[seed % layout.values] ^= 1 << (seed % 32)
    assert layout.checksum(changed) != total


@pytest.mark.parametrize("codec", ["fp4_e3m0", "topk"])
def test_islands_compare_what_their_machines_compute(codec: CodecName) -> None:
    """With each format that the run may change to."""
    config = DiLoCoConfig(quantization=Quantization(codec=codec))
    mine = msgspec.structs.replace(FACTS, fingerprints=fingerprints(config, [], {}))
    named = {key for key in mine.fingerprints if key.startswith("arithmetic.decode-of-")}
    formats = {codec} if codec == "topk" else {*CODECS} - {"topk"}
    assert named == {f"arithmetic.decode-of-{name}" for name in formats}
    check_facts(mine, mine)
    for operation in (f"average-of-{codec}", "momentum-of-nesterov"):
        other = mine.fingerprints | {f"arithmetic.{operation}": "other"}
        message = rf"arithmetic\.{operation}: other in the run, \w{{8}} in this island"
        with pytest.raises(UserError, match=message):
            check_facts(msgspec.structs.replace(mine, fingerprints=other), mine)


def copies_of(
    model: nn.Module, config: DiLoCoConfig, ranks: int = 1, rank: int = 0
) -> tuple[Copies, list[OuterState]]:
    """Return the copies of one rank, without process groups."""
    fragments = build_fragments(model, config.fragments)
    states = [OuterState(one, config.outer_optimizer, torch.device("cpu")) for one in fragments]
    alone = Ranks(None)
    alone.size, alone.rank = ranks, rank
    if ranks > 1:
        for state in states:
            size = Layout(shapes_of(state.fragment)).sizes(ranks)[rank]
            cast("Any", state).outer = torch.ones(size)
            state.slots = [torch.ones(size) for _ in state.slots]
    return Copies(states, config, alone), states


@settings(max_examples=25)
@mock.patch("torchtitan_diloco.islands.copies.PIECE", PIECE)
@given(
    senders=st.integers(1, 4),
    readers=st.integers(1, 4),
    codec=st.sampled_from(["fp4_e3m0", "fp32", "topk"]),
)
def test_parts_are_read_by_islands_with_other_ranks(senders: int, readers: int, codec: str) -> None:
    config = DiLoCoConfig(
        fragments=Fragments(layers_per_fragment=0),
        quantization=Quantization(codec=codec),  # type: ignore[arg-type]
    )
    model = nn.Sequential(nn.Linear(40, 37), nn.Linear(37, 5))
    fragment = build_fragments(model, config.fragments)[0]
    layout = Layout(shapes_of(fragment))
    whole = torch.randn(layout.values, generator=torch.Generator().manual_seed(7))
    coder = build_codec(config.quantization)
    payloads, expected = [], torch.empty(layout.values)
    for rank in range(senders):
        payload = encode_delta(coder, shard(whole, fragment, senders, rank))
        decoded = torch.empty(layout.sizes(senders)[rank])
        pieces = payload.split(coder.wire_bytes(PIECE))
        for encoded, piece in zip(pieces, decoded.split(PIECE), strict=True):
            coder.decode(encoded, piece)
        for span in layout.spans(senders, rank):
            expected[span.whole :][: span.size] = decoded[span.local :][: span.size]
        payloads.append(payload)
    part = torch.cat(payloads)
    for rank in range(readers):
        copies, states = copies_of(model, config, readers, rank)
        copies.ranks.size = readers
        shards = copies.shards(0, part, senders, codec)
        assert len(shards) == (readers if senders == readers else 1)
        mine = shards[rank % len(shards)]
        values = torch.cat([one.clone() for one in copies.decode(0, mine, senders, codec)])
        assert torch.equal(values, shard(expected, fragment, readers, rank))
        # Two equal parts have the mean of one.
        theta, slots = states[0].outer.clone(), [slot.clone() for slot in states[0].slots]
        mean = values.clone()
        outer_step(config.outer_optimizer, theta, mean, slots, 1)
        copies._content = [mine, mine]
        copies.advance(0, 1, config.outer_optimizer.lr, [3, 4], [senders] * 2, [codec] * 2)
        assert torch.equal(copies.fragments[0].versions[1], mean)
    norm = float(torch.linalg.vector_norm(expected.double()))
    assert copies.norm(0, part, senders, codec) == pytest.approx(norm, rel=1e-4)
    if codec == "fp32":
        assert math.isnan(copies.norm(0, torch.full_like(part, 0xFF), senders, codec))


def test_a_version_is_dropped_by_the_thread_that_is_first() -> None:
    """The training thread may apply a later one before the reading thread drops it."""
    config = DiLoCoConfig(fragments=Fragments(layers_per_fragment=0))
    copies, _ = copies_of(nn.Linear(3, 2), config)
    for version in (1, 2):
        copies.run(copies.advance, 0, version, 0.7, [], [], [])
    copies.fragments[0].drop_before(2)
    copies.run(copies.drop, 0, 1)
    assert [*copies.fragments[0].versions] == [2]
