"""Bytes of parts, versions and copies."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs.base import UNIT
from torchtitan_diloco.islands.layout import Layout, hexadecimal
from torchtitan_diloco.islands.merging import MERGE_PIECE, Mean, apply_version, merge, read_outer
from torchtitan_diloco.islands.payload import (
    HEADER_BYTES,
    PartHeader,
    check_part,
    codec_for,
    cut,
    cut_sizes,
    decode,
    decode_cut,
    encode,
    encode_values,
    memory_of,
    read_header,
    write_header,
)
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.note import Part
from torchtitan_diloco.islands.rules.settings import Settings
from torchtitan_diloco.islands.scratch import FragmentState, Scratch

SHAPES = [(1031, 515), (1, 1), (7, 3)]
"""More than two pieces, and rows that no number of ranks divides."""
LAYOUT = Layout(SHAPES)


def numbers(seed: int) -> Tensor:
    return torch.randn(LAYOUT.values, generator=torch.Generator().manual_seed(seed))


def part_of(values: Tensor, header: PartHeader) -> memoryview:
    """Return the bytes of a part by several ranks."""
    codec = codec_for(header.codec, header.block_size)
    shards = list[Tensor]()
    for rank in range(header.ranks):
        spans = LAYOUT.spans(header.ranks, rank)
        mine = torch.cat([values[one.whole :][: one.size] for one in spans] or [values[:0]])
        shards.append(torch.empty(codec.wire_bytes(mine.numel()), dtype=torch.uint8))
        encode_values(codec, mine, shards[-1])
    payload = torch.cat([torch.empty(HEADER_BYTES, dtype=torch.uint8), *shards])
    write_header(payload, header)
    return memory_of(payload)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "fp8_e5m2", "fp4_e3m0"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rank_decodes_its_values_from_few_more_bytes_than_its_share(
    codec: str, ranks: int
) -> None:
    header = PartHeader(codec, 32)
    content = bytearray(memory_of(encode(numbers(0), header)))
    whole = torch.cat([piece.values.clone() for piece in decode(content, [LAYOUT.values])])
    unit = codec_for(codec, 32).wire_bytes(UNIT)
    for rank in range(ranks):
        layout = Layout(SHAPES, ranks, rank)
        shards = cut(content, layout, rank)
        assert [len(shard) for shard in shards] == cut_sizes(header, layout, rank)
        values = torch.cat([values.clone() for values in decode_cut(shards, header, layout)])
        expected = torch.cat([whole[one.whole :][: one.size] for one in layout.mine])
        assert torch.equal(values, expected)
        share = codec_for(codec, 32).wire_bytes(expected.numel())
        assert sum(map(len, shards)) <= share + 2 * unit * len(shards)
    with pytest.raises(MalformedError):
        cut(content[:-1], LAYOUT, 0)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "fp8_e5m2", "fp4_e3m0"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_mean_does_not_depend_on_the_ranks_of_a_part(codec: str, ranks: int) -> None:
    """Except for the blocks of the codec, which are those of the shards."""
    mean = torch.empty(LAYOUT.values)
    header = PartHeader(codec, 32, ranks)
    parts = [(part_of(numbers(seed), header), 3 + seed) for seed in (0, 1)]
    reading = Mean(SHAPES, parts)
    for start in range(0, LAYOUT.values, MERGE_PIECE):
        reading.read(start, mean[start : start + MERGE_PIECE])
    exact = numbers(0) + (numbers(1) - numbers(0)) * (4 / 7)
    if codec == "fp32":
        assert torch.equal(mean, exact)
    assert (mean - exact).norm() < 0.3 * exact.norm()


def test_foreign_bytes_are_malformed() -> None:
    values = numbers(0)
    content = bytes(memory_of(encode(values, PartHeader("fp4_e3m0", 64))))
    part = Part(0, 1, 0, "0", 0, 1, size=len(content), codec="fp4_e3m0")
    check_part(bytearray(content), part, LAYOUT, 64)
    for wrong in (b"", content[:20], content[:-1], content + b"\0", b"x" + content[1:]):
        with pytest.raises(MalformedError):
            check_part(bytearray(wrong), part, LAYOUT, 64)
    with pytest.raises(MalformedError):
        check_part(bytearray(content), part, LAYOUT, 32)
    with pytest.raises(MalformedError):
        read_header(PartHeader("topk").pack())


def new_settings(codec: str, outer: str = "nesterov") -> Settings:
    return Settings(
        sync_every=8,
        delay=1,
        total_tokens=1000,
        slots=2,
        start_with=1,
        streams=1,
        block=1,
        codec=codec,
        outer_lr=0.7,
        outer_optimizer=outer,
    )


def begun(scratch: Scratch) -> FragmentState:
    state = scratch.take(0)
    for one in (state.published, state.theta):
        one.copy_(numbers(7))
    for slot in state.slots:
        slot.zero_()
    state.complete(0)
    return state


def test_what_is_rounded_away_goes_with_the_next_version(tmp_path: Path) -> None:
    """The copy of an island is that of the syncer, and stays near Theta."""
    scratch = Scratch(tmp_path, [SHAPES], slots=1)
    state = begun(scratch)
    copy = state.published.clone()
    for seed in range(6):
        codec = ["fp4_e3m0", "fp32", "fp4_e3m0"][seed // 2]
        delta = 0.01 * numbers(seed)
        part = memory_of(encode(delta, PartHeader("fp4_e3m0")))
        after = scratch.take(0)
        merged = merge(
            state, after, LAYOUT, [(part, 5)], new_settings(codec), weight_of_all=5, clock=5
        )
        assert merged.norms == [pytest.approx(float(delta.norm()), rel=0.1)]
        assert merged.content is not None
        apply_version(copy, merged.content)
        assert torch.equal(copy, after.published)
        assert torch.equal(after.published, after.theta) == (codec == "fp32")
        moved = (after.theta - state.published).norm()
        assert (after.theta - after.published).norm() < 0.3 * moved
        scratch.release(state)
        state = after
    assert state.steps == 6


def test_a_version_that_is_not_finite_is_dropped(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, [SHAPES], slots=2)
    state = begun(scratch)
    delta = numbers(0)
    delta[-1] = 3e38
    parts = [(memory_of(encode(delta, PartHeader())), 1)]
    after = scratch.take(0)
    settings = new_settings("fp32", "adam")
    merged = merge(state, after, LAYOUT, parts, settings, weight_of_all=1, clock=1)
    assert merged.content is None, "its second moment"
    assert merged.norms == [pytest.approx(3e38)]
    assert state.steps == 0
    assert torch.equal(state.theta, numbers(7))


def test_a_part_of_the_weight_makes_a_part_of_the_step(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, [SHAPES], slots=1)
    state = begun(scratch)
    parts = [(memory_of(encode(numbers(0), PartHeader())), 10)]
    settings = new_settings("fp32")
    found = list[Tensor]()
    for weight_of_all in (10, 20):
        after = scratch.take(0)
        merge(state, after, LAYOUT, parts, settings, weight_of_all=weight_of_all, clock=10)
        found.append(after.theta - state.theta)
    torch.testing.assert_close(found[0], 2 * found[1])
    after = scratch.take(0)
    idle = [(memory_of(encode(numbers(0), PartHeader())), 0)]
    merged = merge(state, after, LAYOUT, idle, settings, weight_of_all=0, clock=10)
    assert merged.content is not None
    assert merged.norms == [pytest.approx(float(numbers(0).norm()), rel=1e-4)]
    assert torch.equal(after.theta, state.theta), "its steps were all skipped"


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp4_e3m0"])
@pytest.mark.parametrize("weights", [(3, 4), (0, 4), (3, 0)])
def test_a_merge_finds_the_norm_of_each_part(
    tmp_path: Path, codec: str, weights: tuple[int, int]
) -> None:
    scratch = Scratch(tmp_path, [SHAPES], slots=1)
    good = numbers(0)
    bad = 1e30 * numbers(1)
    bad[-1] = math.nan
    parts = [
        (memory_of(encode(values, PartHeader(codec))), weight)
        for values, weight in zip((good, bad), weights, strict=True)
    ]
    state = begun(scratch)
    merged = merge(
        state, scratch.take(0), LAYOUT, parts, new_settings(codec), weight_of_all=7, clock=7
    )
    assert merged.norms == [
        pytest.approx(float(good.norm()), rel=0.1),
        pytest.approx(math.nan, nan_ok=True),
    ]
    assert (merged.content is None) == (weights[1] > 0)


@pytest.mark.parametrize("has_fallocate", [True, False])
def test_only_a_complete_version_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_fallocate: bool
) -> None:
    """Also on systems that do not allocate files, such as macOS: they are written then."""
    if not has_fallocate:
        monkeypatch.delattr("os.posix_fallocate", raising=False)
    scratch = Scratch(tmp_path, [SHAPES], slots=1)
    state = begun(scratch)
    scratch.keep(state, 0, 3)
    file = state.path.stat()
    assert 512 * file.st_blocks >= file.st_size, "its blocks are allocated"
    checksum = hexadecimal(LAYOUT.checksum(state.published))
    scratch.take(0)
    again = Scratch(tmp_path, [SHAPES], slots=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-3"]
    found = again.find(0, 3, checksum)
    assert found is not None
    assert torch.equal(found.theta, numbers(7))
    copied = again.take(0)
    assert read_outer(bytearray(state.outer_content()), copied) == 0
    assert torch.equal(copied.theta, state.theta)
    assert again.find(0, 3, "0") is None, "another copy"
    assert again.find(0, 2, checksum) is None
    state.slots[0][5] = 1.0
    assert again.find(0, 3, checksum) is None, "it was not written completely"
