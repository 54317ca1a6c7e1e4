"""Division of a delta into chunks and slices, and the order in which they are processed.

Arithmetic only: the exchange follows it, and the planner counts bytes with it.
"""

from collections.abc import Iterator
from enum import Enum

from torchtitan_diloco.diloco.codecs import UNIT, Codec
from torchtitan_diloco.diloco.outer_optimizer import BLOCK

CHUNK = 8 * BLOCK
"""Values in one message (2 MB in fp32)."""
IN_FLIGHT = 2**23
"""Bytes in chunks in flight at once: long links need as many as they carry in a round trip."""
GPU_CHUNK, GPU_IN_FLIGHT = 2**24, 2**28
"""The same for deltas on a GPU, where a kernel for 2 MB takes less time than its launch."""

assert BLOCK % UNIT == GPU_CHUNK % UNIT == 0, "codecs can be called block by block"


def chunk_and_window(largest: int, codec: Codec, *, on_gpu: bool = False) -> tuple[int, int]:
    """Return values per chunk, and chunks in flight. `largest`: values of the largest fragment."""
    chunk, in_flight = (GPU_CHUNK, GPU_IN_FLIGHT) if on_gpu else (CHUNK, IN_FLIGHT)
    chunk = min(chunk, max(1, largest))
    return chunk, max(1, min(-(-largest // chunk), in_flight // codec.wire_bytes(chunk)))


def slice_owners(workers: int, codec: Codec) -> int:
    """Return over how many workers the averaging of a chunk is spread.

    It is 1 where all workers send all others everything and average it themselves: two workers, and
    sparse deltas, which are smaller than their mean.
    """
    return 1 if workers == 2 or codec.is_sparse else workers


def slice_size(values: int, owners: int) -> int:
    """Return how many values of a chunk one worker averages.

    With one owner these are all, with more an equal part in whole units, so that the bytes of a
    slice are contiguous in those of the chunk.
    """
    return values if owners == 1 else -(-values // (owners * UNIT)) * UNIT


def slice_bounds(values: int, owners: int, worker: int) -> tuple[int, int]:
    """Return start and end of the part of a chunk that a worker averages; it may be empty."""
    if owners == 1:
        return 0, values
    size = slice_size(values, owners)
    return min(worker * size, values), min((worker + 1) * size, values)


class Task(Enum):
    """Stages of a chunk, in this order."""

    SEND = "send"
    AVERAGE = "average"
    """Average what the first hop brought; with owners of slices also send the mean on."""
    COLLECT = "collect"
    """Take the means of the second hop."""


def send_lead(window: int, owners: int) -> int:
    """Return by how many chunks SEND is ahead of AVERAGE. Two hops share the window."""
    return window - 1 if owners == 1 else window // 2


def pipeline_schedule(chunks: int, window: int, owners: int) -> Iterator[tuple[Task, int]]:
    """Yield tasks and chunk numbers so that at most `window` chunks are in flight.

    The order is the same on every worker, so that every message meets its receiver.
    """
    last, lead = window - 1, send_lead(window, owners)
    for step in range(chunks + last):
        if step < chunks:
            yield Task.SEND, step
        if 0 <= step - lead < chunks:
            yield Task.AVERAGE, step - lead
        if owners > 1 and 0 <= step - last < chunks:
            yield Task.COLLECT, step - last
