"""Exchanges of many chunks: slots are used again, and every message has to meet its receiver."""

import math
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.diloco.toy import join
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import exchange
from torchtitan_diloco.diloco.codecs import build_codec, build_gather_codec
from torchtitan_diloco.diloco.config import CodecName, Quantization
from torchtitan_diloco.diloco.exchange import Exchange
from torchtitan_diloco.diloco.outer_optimizer import BLOCK
from torchtitan_diloco.diloco.transport import HEADER_BYTES, Bytes, Header
from torchtitan_diloco.distributed.world import WORKER

SIZES = [9 * BLOCK + 17, 1, 5 * BLOCK, 11 * BLOCK + 1]
"""Values of some deltas: chunks that fill the slots several times, with a rest, and one value."""


def delta_of(worker: int, number: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * number + worker))


def _exchange(
    codec: CodecName, workers: int, window: int, weights: list[float]
) -> list[tuple[Tensor, float]]:
    """Return means and scalar products, with chunks of one block, `window` of them in flight."""
    world = join(workers)
    group = world.group(WORKER)
    assert group is not None
    chosen = Quantization(codec=codec, rounding="stochastic" if codec == "bf16" else "nearest")
    own, gather = build_codec(chosen), build_gather_codec(chosen)
    with pytest.MonkeyPatch.context() as patch:  # these processes run other tests, too
        patch.setattr(exchange, "CHUNK", BLOCK)
        patch.setattr(exchange, "IN_FLIGHT", window * own.wire_bytes(BLOCK))
        made = Exchange(
            group, own, gather, largest=max(SIZES), device=torch.device("cpu"), timeout_seconds=600
        )
    found = []
    for number, size in enumerate(SIZES):
        delta = delta_of(world.worker, number, size)
        weight = weights[world.worker]
        header = Header(0, 1, fragment=0, outer_round=number, step=8, weight=weight, checksum=0)
        headers, traffic = made.average(delta, header, measured=True)
        assert [one.weight for one in headers] == weights
        assert sorted(traffic.heard) == [
            worker for worker in range(workers) if worker != world.worker
        ]
        found.append((delta, traffic.dot))
    return found


@pytest.mark.parametrize(
    ("workers", "codec", "window", "weights"),
    [
        (2, "fp32", 3, [1.0, 3.0]),
        (2, "fp4_e3m0", 2, [1.0, 1.0]),
        (3, "fp32", 4, [2.0, 0.0, 1.0]),
        (3, "int8", 3, [1.0, 1.0, 1.0]),
        (4, "fp32", 1, [1.0, 2.0, 3.0, 4.0]),
        (4, "fp4_e3m0", 5, [1.0, 1.0, 1.0, 1.0]),
        (3, "bf16", 3, [1.0, 1.0, 1.0]),
        (3, "topk", 2, [1.0, 2.0, 1.0]),
    ],
)
def test_every_chunk_is_its_own_mean(
    processes: ProcessPool, workers: int, codec: CodecName, window: int, weights: list[float]
) -> None:
    results = processes.run(_exchange, workers, codec, workers, window, weights)
    for number, size in enumerate(SIZES):
        deltas = [delta_of(worker, number, size) for worker in range(workers)]
        shares = torch.tensor(weights, dtype=torch.float64) / math.fsum(weights)
        mean = shares @ torch.stack(deltas).double()
        for worker, rounds in enumerate(results):
            got, dot = rounds[number]
            assert torch.equal(got, results[0][number][0]), "the same bits on every worker"
            error = (got.double() - mean).abs().max().item()
            assert error < {"fp32": 1e-5, "bf16": 0.1, "int8": 0.1}.get(codec, 4.0)
            if codec == "int8" and size > 1:
                assert torch.nn.functional.cosine_similarity(got.double(), mean, dim=0) > 0.999
            assert dot == pytest.approx(
                torch.dot(deltas[worker].double(), got.double()).item(), rel=1e-3, abs=1e-3
            )


def _means_by_way_of_the_host(workers: int, chunk: int) -> list[Tensor]:
    """Return the means of one delta, in chunks of a CPU and of a GPU; the latter with buffers for
    gloo apart from those of the codec."""
    world = join(workers)
    group, cpu = world.group(WORKER), torch.device("cpu")
    assert group is not None
    chosen = Quantization(codec="fp4_e3m0", rounding="stochastic", error_feedback=True)
    size, found = chunk + 1029, []
    for staged in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if staged:
                sizes = partial(exchange.chunk_and_window, on_gpu=True)
                patch.setattr(exchange, "GPU_CHUNK", chunk)
                patch.setattr(exchange, "chunk_and_window", sizes)
                patch.setattr(exchange, "room", room_for_both)
            codecs = build_codec(chosen), build_gather_codec(chosen)
            made = Exchange(group, *codecs, largest=size, device=cpu, timeout_seconds=60)
        made.warm_up([size], feedback=True)
        delta, residual = delta_of(world.worker, 0, size), torch.zeros(size)
        header = Header(0, 1, fragment=0, outer_round=0, step=8, weight=1.0, checksum=0)
        made.average(delta, header, residual, keys=(world.worker, 7))
        made.close()
        found += [delta, residual]
    return found


def room_for_both(size: int, device: torch.device, *, is_read_in_place: bool = False) -> Bytes:
    assert not is_read_in_place
    return Bytes(*(torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)))


@pytest.mark.parametrize("workers", [2, 3])
def test_encoded_bytes_by_way_of_the_host_make_the_same_mean(
    processes: ProcessPool, workers: int
) -> None:
    results = processes.run(_means_by_way_of_the_host, workers, workers, 2**18)
    for mean, residual, staged_mean, staged_residual in results:
        assert torch.equal(mean, staged_mean)
        assert torch.equal(residual, staged_residual)
        assert torch.equal(mean, results[0][0])


@settings(max_examples=30)
@given(count=st.integers(1, 20), window=st.integers(1, 9), owners=st.integers(1, 4))
def test_as_many_chunks_as_the_window_allows_are_in_flight(
    count: int, window: int, owners: int
) -> None:
    last = "_average" if owners == 1 else "_collect_means"
    made = MagicMock(_owners=owners, _window=window)
    chunks: list[Any] = [MagicMock() for _ in range(count)]
    Exchange._run(made, MagicMock(), chunks, MagicMock(), MagicMock())
    done = {"_send": 0, "_average" if owners == 1 else "_send_mean": 0, last: 0}
    most = 0
    for name, arguments, _ in made.mock_calls:
        if name in done:
            assert arguments[0] is chunks[done[name]]
            done[name] += 1
            counts = list(done.values())
            assert counts == sorted(counts, reverse=True), "no task comes before the one it needs"
            most = max(most, counts[0] - min(counts))
    assert set(done.values()) == {count}
    assert most == min(count, window)


def test_headers() -> None:
    header = Header(3, 2**63 + 5, 7, outer_round=9, step=10**12, weight=0.1, checksum=2**64 - 1)
    assert len(header.pack()) == HEADER_BYTES
    assert Header.unpack(header.pack()) == header
    with pytest.raises(ValueError, match="some worker runs other code"):
        Header.unpack(b"\1" * HEADER_BYTES)
