"""How a delta is cut for its way between workers, and what is done with the pieces in which order: arithmetic only.

The exchange goes by it, and the planner counts by it.
"""

from collections.abc import Iterator
from enum import Enum

from torchtitan_diloco.diloco.codecs import UNIT, Codec
from torchtitan_diloco.diloco.outer_optimizer import BLOCK

CHUNK = 16 * BLOCK
"""Values in one message (2 MB in fp32)."""
IN_FLIGHT = 2**23
"""Bytes in chunks under way at once: long links need as many as they carry in a round trip."""

assert BLOCK % UNIT == 0, "codecs can be fed in blocks"


def chunk_and_window(largest: int, codec: Codec) -> tuple[int, int]:
    """Values of a chunk, and chunks under way at once; `largest`: values of a fragment."""
    chunk = min(CHUNK, max(1, largest))
    return chunk, max(1, min(-(-largest // chunk), IN_FLIGHT // codec.wire_bytes(chunk)))


def slice_size(values: int, workers: int) -> int:
    """Values of a chunk that one worker averages: all of it with two workers, an equal part in whole units with more, so that a
    slice's bytes are a stretch of the chunk's."""
    return values if workers == 2 else -(-values // (workers * UNIT)) * UNIT


def slice_bounds(values: int, workers: int, worker: int) -> tuple[int, int]:
    """Of the part of a chunk that a worker averages; the last ones may be short or empty."""
    if workers == 2:
        return 0, values
    size = slice_size(values, workers)
    return min(worker * size, values), min((worker + 1) * size, values)


class Task(Enum):
    """What is done with a chunk, in this order."""

    SEND = "send"
    AVERAGE = "average"
    """What has come of the first hop; with more than two workers the mean is sent on."""
    COLLECT = "collect"
    """The means of the second hop."""


def lead_of_sends(window: int, workers: int) -> int:
    """By how many chunks sending is ahead of averaging. A second hop has the other half of the window."""
    return window - 1 if workers == 2 else window // 2


def programme(chunks: int, window: int, workers: int) -> Iterator[tuple[Task, int]]:
    """Tasks and numbers of chunks, at most `window` of which are under way. Every worker runs the same, so that messages meet
    their receivers."""
    last, lead = window - 1, lead_of_sends(window, workers)
    for step in range(chunks + last):
        if step < chunks:
            yield Task.SEND, step
        if 0 <= step - lead < chunks:
            yield Task.AVERAGE, step - lead
        if workers > 2 and 0 <= step - last < chunks:
            yield Task.COLLECT, step - last
