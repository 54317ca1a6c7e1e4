"""Prints as JSON the bytes of exchanges, as counted by us and by the kernel.

Run by test_bytes_on_the_wire.py, as a network namespace is entered by a whole process.
"""

import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import link
from tests.diloco.toy import AVERAGE_EVERY_STEP, join
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco.config import CodecName
from torchtitan_diloco.distributed.world import WORKER

NO_NETWORK = 3
"""Exit status where the machine gives no network namespace."""
VALUES = 4_000_001
EXCHANGES = 6
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
        before = link.bytes_on_the_wire()
        dist.barrier()
        outer.step()
        dist.barrier()
        on_the_wire.append(link.bytes_on_the_wire() - before)
        sent.add(int(outer.metrics()["diloco/sent_bytes"]))
    assert len(sent) == 1, "every exchange sends the same"
    return sent.pop(), min(on_the_wire)


def main() -> None:
    try:
        link.enter_own_network("tests.diloco.bytes_on_the_wire", "")
    except link.NoNetworkError as error:
        print(error, file=sys.stderr)
        raise SystemExit(NO_NETWORK) from error
    pool, found = ProcessPool(), []
    for workers, codec in CASES:
        results = pool.run(exchange, workers, codec, workers)
        found.append(
            [workers, codec, sum(sent for sent, _ in results), max(wire for _, wire in results)]
        )
    pool.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
