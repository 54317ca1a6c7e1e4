"""Bytes are counted in the buffers sent: the kernel's interface counter must agree.

The exchanges run in a program of their own, as a network namespace is entered by a whole process.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.network import NoNetworkError, enter_own_network, loopback_bytes
from tests.conftest import REPOSITORY
from tests.diloco.toy import AVERAGE_EVERY_STEP, join
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import CodecName
from torchtitan_diloco.diloco.transport import HEADER_BYTES
from torchtitan_diloco.distributed.world import WORKER

MODULE = "tests.diloco.test_bytes_on_the_wire"
NO_NETWORK = 3
"""Exit status where the machine gives no network namespace."""
VALUES = 1_000_001
EXCHANGES = 5
CODECS: tuple[CodecName, ...] = ("fp32", "int8", "fp4_e3m0")
CASES: list[tuple[int, CodecName]] = [(workers, codec) for workers in (2, 3) for codec in CODECS]


def exchange(codec: CodecName, workers: int) -> tuple[int, int]:
    """Return bytes this worker counts, and bytes the interface counts for all workers.

    The least of some exchanges: on a busy machine TCP sends parts of one again.
    """
    world = join(workers)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(VALUES))})
    chosen = replace(AVERAGE_EVERY_STEP, quantization=Quantization(codec=codec))
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)
    sent, on_the_wire = set[int](), []
    for _ in range(EXCHANGES):
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        outer.step()
        dist.barrier()
        on_the_wire.append(loopback_bytes() - before)
        sent.add(int(outer.metrics()["diloco/sent_bytes"]))
    assert len(sent) == 1, "every exchange sends the same"
    return sent.pop(), min(on_the_wire)


def main() -> None:
    try:
        enter_own_network(MODULE)
    except NoNetworkError as error:
        print(error, file=sys.stderr)
        raise SystemExit(NO_NETWORK) from error
    pool = ProcessPool()
    found = [pool.run(exchange, workers, codec, workers) for workers, codec in CASES]
    pool.close()
    print(json.dumps(found))


def test_the_interface_counts_what_we_count() -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", MODULE],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if outcome.returncode == NO_NETWORK:
        pytest.skip(f"no network namespace here: {outcome.stderr.strip()}")
    assert outcome.returncode == 0, outcome.stderr
    measured = json.loads(outcome.stdout.splitlines()[-1])
    for (workers, codec), results in zip(CASES, measured, strict=True):
        counted, on_the_wire = sum(sent for sent, _ in results), max(wire for _, wire in results)
        assert counted <= on_the_wire <= 1.02 * counted, f"{workers} workers, {codec}"
        fragments = 2 if workers == 2 else 2 * (workers - 1)  # sent by all workers together
        payloads = fragments * build_codec(Quantization(codec=codec)).wire_bytes(VALUES)
        assert counted == pytest.approx(payloads + workers * (workers - 1) * HEADER_BYTES, abs=64)
        if codec.startswith("fp4"):
            assert 8 * counted <= 4.25 * fragments * VALUES, "with headers, scales and padding"


if __name__ == "__main__":
    main()
