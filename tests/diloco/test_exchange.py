"""Exchanges of many chunks: slots are used again, and every message has to meet its receiver."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.diloco.toy import join
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import exchange
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import Quantization
from torchtitan_diloco.diloco.exchange import Exchange, chunk_and_window
from torchtitan_diloco.diloco.outer_step import STEP_VALUES
from torchtitan_diloco.diloco.transport import Bytes, Header, header_bytes
from torchtitan_diloco.diloco.vitals import Vitals
from torchtitan_diloco.distributed import world as world_module
from torchtitan_diloco.distributed.world import WORKER, World

SIZES = [9 * STEP_VALUES + 17, 1, 5 * STEP_VALUES, 11 * STEP_VALUES + 1]
"""Values of some deltas: chunks that fill the slots several times, with a rest, and one value."""
ROOM = 2**18 + 1029


def delta_of(worker: int, number: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * number + worker))


def header(weight: float = 1.0, flags: int = 0) -> Header:
    return Header(flags, 1, fragment=0, outer_round=1, step=8, weight=weight, checksum=0)


def build(
    world: World, codec: str, largest: int, patches: dict[str, Any], device: str = "cpu"
) -> Exchange:
    """Return an exchange on a CPU, built with other values of names of its module."""
    group = world.group(WORKER)
    where = torch.device(device)
    assert group is not None
    own = build_codec(Quantization(codec=codec))
    with pytest.MonkeyPatch.context() as patch:  # these processes run other tests, too
        for name, value in patches.items():
            patch.setattr(exchange, name, value)
        limits: dict[str, Any] = {"largest": largest, "timeout_seconds": 600}
        return Exchange(group, own, **limits, device=where, streams=world.streams)


def _exchange(codec: str, window: int, weights: list[float]) -> list[tuple[Tensor, float]]:
    """Return means and scalar products, with chunks of one block, `window` of them in flight."""
    workers = len(weights)
    sizes = {"chunk_and_window": lambda *_, **__: (STEP_VALUES, window)}
    made = build(join(workers), codec, max(SIZES), sizes)
    found = []
    for number, size in enumerate(SIZES):
        delta = delta_of(made.me, number, size)
        headers, traffic = made.average(delta, header(weights[made.me]), measured=True)
        assert [one.weight for one in headers] == weights
        assert {*traffic.heard, made.me} == set(range(workers))
        found.append((delta, traffic.dot))
    return found


def mean_at_once(name: str, deltas: list[Tensor], weights: list[float]) -> Tensor:
    """Return the mean of whole deltas. Workers of weight 0 are left out."""
    codec = build_codec(Quantization(name))
    mean = torch.zeros_like(deltas[0])
    heard = {one: weight for one, weight in enumerate(weights) if weight}
    payloads = [torch.zeros(codec.wire_bytes(len(mean)), dtype=torch.uint8) for _ in heard]
    for one, payload in zip(heard, payloads, strict=True):
        codec.encode(deltas[one].clone(), payload)
    codec.average(payloads, list(heard.values()), mean)
    return mean


@pytest.mark.parametrize(
    ("codec", "window", "weights"),
    [
        ("fp32", 3, [1.0, 3.0]),
        ("fp4_e3m0", 2, [1.0, 1.0]),
        ("fp32", 4, [2.0, 0.0, 1.0]),
        ("int8", 3, [1.0, 1.0, 1.0]),
        ("fp32", 1, [1.0, 2.0, 3.0, 4.0]),
        ("fp4_e3m0", 5, [1.0, 1.0, 1.0, 1.0]),
        ("bf16", 3, [1.0, 1.0, 1.0]),
        ("topk", 2, [1.0, 2.0, 1.0]),
        ("topk", 3, [7.0, 0.0, 49.0]),
    ],
)
def test_every_chunk_is_its_own_mean(
    processes: ProcessPool, codec: str, window: int, weights: list[float]
) -> None:
    workers = len(weights)
    results = processes.run(_exchange, workers, codec, window, weights)
    for number, size in enumerate(SIZES):
        deltas = [delta_of(worker, number, size) for worker in range(workers)]
        shares = torch.tensor(weights, dtype=torch.float64) / math.fsum(weights)
        mean = shares @ torch.stack(deltas).double()
        for worker, rounds in enumerate(results):
            got, dot = rounds[number]
            assert torch.equal(got, results[0][number][0]), "the same bits on every worker"
            error = (got.double() - mean).abs().max().item()
            if codec == "topk":
                assert torch.equal(got, mean_at_once(codec, deltas, weights))
            else:
                assert error < {"fp32": 1e-5, "bf16": 0.1, "int8": 0.07}.get(codec, 4.0)
            expected = torch.dot(deltas[worker].double(), got.double()).item()
            assert dot == pytest.approx(expected, rel=1e-3, abs=1e-3)


def _over_streams(codec: str, workers: int, streams: int) -> tuple[list[Tensor], set[int]]:
    """Return means, and the streams that were used, with the number that the world has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "is_loopback", lambda _: False)
        world = join(workers, streams=streams)
    used = set[int]()
    found = list[Tensor]()
    send = dist.isend

    def isend(payload: Tensor, tag: int, **more: Any) -> Any:
        used.add(tag % streams)
        return send(payload, tag=tag, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "CHUNK", STEP_VALUES)
        patch.setattr(dist, "isend", isend)
        made = build(world, codec, max(SIZES), {})
        for number, size in enumerate(SIZES):
            found.append(delta_of(made.me, number, size))
            made.average(found[-1], header())
        made.close()
    return found, used


@pytest.mark.parametrize(("workers", "codec"), [(2, "fp4_e3m0"), (3, "fp32"), (3, "topk")])
def test_streams_are_all_used_and_change_no_bit(
    processes: ProcessPool, workers: int, codec: str
) -> None:
    plain = processes.run(_over_streams, workers, codec, workers, 1)
    several = processes.run(_over_streams, workers, codec, workers, 4)
    for (means, one), (others, four) in zip(plain, several, strict=True):
        assert (one, four) == ({0}, {0, 1, 2, 3})
        assert all(map(torch.equal, means, others))


def allocate_on_both(size: int, device: torch.device, *, is_read_in_place: bool = False) -> Bytes:
    assert not is_read_in_place
    return Bytes(*(torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)))


def _by_way_of_the_host(workers: int, codec: str) -> list[Tensor]:
    """Return means, in chunks of a CPU and of a GPU; the latter with buffers for gloo apart from
    those of the codec, and also with deltas that are not where they are encoded."""
    world = join(workers)
    found = list[Tensor]()
    sizes = partial(chunk_and_window, on_gpu=True)
    on_gpu = {"GPU_CHUNK": 2**18, "chunk_and_window": sizes, "allocate_bytes": allocate_on_both}
    elsewhere = "cpu:0"  # is not equal to the device of a tensor
    for patches, device in (({}, "cpu"), (on_gpu, "cpu"), (on_gpu, elsewhere)):
        made = build(world, codec, ROOM, patches, device)
        made.warm_up([ROOM])
        found.append(delta_of(made.me, 0, ROOM))
        made.average(found[-1], header())
        made.close()
    return found


@pytest.mark.parametrize(("workers", "codec"), [(2, "topk"), (3, "fp4_e3m0")])
def test_encoded_bytes_by_way_of_the_host_make_the_same_mean(
    processes: ProcessPool, workers: int, codec: str
) -> None:
    results = processes.run(_by_way_of_the_host, workers, workers, codec)
    for mean, *others in results:
        assert all(torch.equal(mean, other) for other in others)
        assert torch.equal(mean, results[0][0])


def test_headers() -> None:
    said = Vitals(0.5, 0.25, upload=1e9, transfers=(0.0, 2.0, 4.0))
    sent = Header(3, 2**63 + 5, 7, 9, step=10**12, weight=0.1, checksum=2**64 - 1, vitals=said)
    assert len(sent.pack()) == header_bytes(3)
    sent = replace(sent, vitals=said._replace(upload=60_000.0))  # in 16 bits
    assert Header.unpack(sent.pack()) == sent
    with pytest.raises(ValueError, match="a worker runs different code"):
        Header.unpack(b"\1" * header_bytes(3))
