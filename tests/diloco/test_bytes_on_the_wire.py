"""Bytes are counted in the buffers sent: the kernel's interface counter must agree."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.network import LOOPBACK, read_counters
from tests.diloco.toy import AVERAGE_EVERY_STEP, join
from tests.network import PATIENCE, network_of, processes_in
from torchtitan_diloco.diloco import Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import CodecName
from torchtitan_diloco.diloco.transport import HEADER_BYTES
from torchtitan_diloco.distributed.world import WORKER

VALUES = 1_000_001
EXCHANGES = 5
CODECS: tuple[CodecName, ...] = ("fp32", "int8", "fp4_e3m0")


def exchange(workers: int) -> None:
    """Print for each codec the bytes this worker counts, and those of the interface, of all.

    The least of some exchanges: on a busy machine TCP sends parts of one again.
    """
    world = join(workers)
    found = []
    for codec in CODECS:
        model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(VALUES))})
        chosen = replace(AVERAGE_EVERY_STEP, quantization=Quantization(codec=codec))
        outer = StreamingDiLoCo(model, world.group(WORKER), chosen)
        sent, on_the_wire = set[int](), []
        for _ in range(EXCHANGES):
            dist.barrier()
            before = read_counters(LOOPBACK)[0]
            dist.barrier()
            outer.step()
            dist.barrier()
            on_the_wire.append(read_counters(LOOPBACK)[0] - before)
            sent.add(int(outer.metrics()["diloco/sent_bytes"]))
        assert len(sent) == 1, "every exchange sends the same"
        found.append([sent.pop(), min(on_the_wire)])
    print(json.dumps(found), flush=True)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_interface_counts_what_we_count(tmp_path: Path, workers: int) -> None:
    logs = [tmp_path / str(worker) for worker in range(workers)]
    with (
        network_of(1) as network,
        processes_in(network, logs, exchange, workers, loopback=True) as programs,
    ):
        for program in programs:
            program.join(PATIENCE)
    said = [log.read_text() for log in logs]
    assert [program.exitcode for program in programs] == [0] * workers, said
    measured = zip(*(json.loads(text.splitlines()[-1]) for text in said), strict=True)
    for codec, results in zip(CODECS, measured, strict=True):
        counted, on_the_wire = sum(sent for sent, _ in results), max(wire for _, wire in results)
        assert counted <= on_the_wire <= 1.02 * counted, codec
        fragments = 2 * (workers - 1)  # sent by all workers together
        payloads = fragments * build_codec(Quantization(codec=codec)).wire_bytes(VALUES)
        assert counted == pytest.approx(payloads + workers * (workers - 1) * HEADER_BYTES, abs=64)
        if codec.startswith("fp4"):
            assert 8 * counted <= 4.25 * fragments * VALUES, "with headers, scales and padding"
