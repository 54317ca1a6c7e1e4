"""The bytes that the planner computes are those of a real exchange."""

import pytest
import torch
import torch.distributed as dist

from tests.processes import ProcessPool
from torchtitan_diloco.diloco.chunks import CHUNK
from torchtitan_diloco.diloco.codecs import build_codec, build_gather_codec
from torchtitan_diloco.diloco.config import CodecName, Quantization
from torchtitan_diloco.diloco.exchange import Exchange
from torchtitan_diloco.diloco.transport import HEADER_BYTES, Header
from torchtitan_diloco.planner.scenario import payloads_of

SIZES = [1, 1023, 5000, 100_001, CHUNK, 2 * CHUNK + 7777]
WIRES = [
    Quantization(codec="fp32"),
    Quantization(codec="int8"),
    Quantization(codec="fp4_e3m0", gather_codec="bf16"),
]


def _sent_and_received(wire: Quantization) -> list[tuple[int, int]]:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    exchange = Exchange(
        group,
        build_codec(wire),
        build_gather_codec(wire),
        largest=max(SIZES),
        device=torch.device("cpu"),
        timeout_seconds=30,
    )
    header = Header(flags=0, run=1, fragment=0, outer_round=1, step=1, weight=1.0, checksum=0)
    found = []
    for values in SIZES:
        _, traffic = exchange.average(torch.ones(values), header)
        found.append((int(traffic.bytes_sent), int(traffic.bytes_received)))
    return found


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.codec)
def test_bytes_are_those_of_a_real_exchange(
    processes: ProcessPool, workers: int, wire: Quantization
) -> None:
    payloads = payloads_of(SIZES, wire, workers)
    for worker, counted in enumerate(processes.run(_sent_and_received, workers, wire)):
        assert [(payload.sent[worker], payload.received[worker]) for payload in payloads] == counted


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "fp4_e3m0", "ternary"])
@pytest.mark.parametrize("values", SIZES)
def test_two_workers_send_all_they_have(codec: CodecName, values: int) -> None:
    wire = Quantization(codec=codec)
    (payload,) = payloads_of([values], wire, workers=2)
    sent = build_codec(wire).wire_bytes(values) + HEADER_BYTES
    assert (payload.sent, payload.received, payload.hops) == ((sent, sent), (sent, sent), 1)


def test_a_single_worker_sends_nothing() -> None:
    (payload,) = payloads_of([1000], Quantization(), workers=1)
    assert (payload.sent, payload.received, payload.hops) == ((0,), (0,), 0)
