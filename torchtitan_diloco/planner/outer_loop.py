"""The outer loop's settings as the prediction wants them: what `diloco/exchange.py` would send, and when.

Needs torch, as the formats on the wire and the exchange do.
"""

from collections.abc import Sequence
from functools import cache

from torchtitan_diloco.diloco.chunks import chunk_and_window, slice_bounds, slice_size
from torchtitan_diloco.diloco.codecs import Codec, build_codec, build_gather_codec
from torchtitan_diloco.diloco.config import DiLoCoConfig as DiLoCo, Quantization
from torchtitan_diloco.diloco.transport import HEADER_BYTES
from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.planner.conditions import Conditions
from torchtitan_diloco.planner.payload import Payload
from torchtitan_diloco.planner.prediction import Prediction, predict


def predict_diloco(
    fragments: Sequence[int],
    diloco: DiLoCo,
    conditions: Conditions,
    *,
    ranks: int = 1,
    steps: int | None = None,
) -> Prediction:
    """`fragments`: parameters of each, in the order of their turns. `ranks`: of one worker, which share its fragments.
    `steps`: length of the run; None: the steady state."""
    schedule = Schedule(diloco.sync_every, len(fragments), diloco.overlap.delay)
    return predict(
        payloads_of(fragments, diloco.quantization, conditions.workers, ranks),
        schedule,
        conditions,
        steps,
    )


def payloads_of(
    fragments: Sequence[int], quantization: Quantization, workers: int, ranks: int = 1
) -> list[Payload]:
    chunk, window = chunk_and_window(-(-max(fragments) // ranks), _codecs(quantization)[0])
    return [_payload(values, quantization, workers, ranks, chunk, window) for values in fragments]


def exchange_buffer_bytes(largest: int, quantization: Quantization, workers: int) -> int:
    """That one rank keeps for chunks under way; `largest`: values of its part of the largest fragment."""
    if workers == 1:
        return 0
    codec, gather = _codecs(quantization)
    chunk, window = chunk_and_window(largest, codec)
    values = min(chunk, slice_size(chunk, workers))
    incoming = (workers - 1) * codec.wire_bytes(values)
    means = 0 if workers == 2 else workers * gather.wire_bytes(values)
    outgoing = 0 if codec.is_fp32 else codec.wire_bytes(chunk)
    return window * (incoming + means + outgoing) + (0 if workers == 2 else 4 * values)


@cache
def _codecs(quantization: Quantization) -> tuple[Codec, Codec]:
    return build_codec(quantization), build_gather_codec(quantization)


@cache
def _payload(
    values: int, quantization: Quantization, workers: int, ranks: int, chunk: int, window: int
) -> Payload:
    """The ranks of a worker send their parts at the same time over the worker's one link."""
    share = -(-values // ranks)
    chunks = max(1, -(-share // chunk))
    if workers == 1:
        return Payload(
            (0,), (0,), hops=0, chunks=1, window=1, coded_bytes=0, state_bytes=4 * values
        )
    sent, received = [0] * workers, [0] * workers
    for part, count in ((share, values // share), (values % share, 1)):
        if part:
            for worker, (out, back) in enumerate(_traffic(part, quantization, workers, chunk)):
                sent[worker] += count * out
                received[worker] += count * back
    # Two workers encode their own and decode both; more encode their own and the mean of their slice, and decode all parts
    # of that slice and all means.
    passes = 3.0 if workers == 2 else 3.0 + 1 / workers
    return Payload(
        tuple(sent),
        tuple(received),
        hops=1 if workers == 2 else 2,
        chunks=chunks,
        window=window if workers == 2 else max(1, window // 2),
        coded_bytes=round(4 * values * passes),
        state_bytes=4 * values,
    )


def _traffic(
    values: int, quantization: Quantization, workers: int, chunk: int
) -> list[tuple[int, int]]:
    """Bytes that one rank of each worker sends and receives for `values`, headers included."""
    codec, gather = _codecs(quantization)
    traffic = [[(workers - 1) * HEADER_BYTES] * 2 for _ in range(workers)]
    for part, count in ((chunk, values // chunk), (values % chunk, 1)):
        if not part or not count:
            continue
        bounds = [slice_bounds(part, workers, worker) for worker in range(workers)]
        slices = [end - start for start, end in bounds]
        own = [codec.wire_bytes(one) for one in slices]
        means = [0 if workers == 2 else gather.wire_bytes(one) for one in slices]
        for worker, both in enumerate(traffic):
            others = [other for other in range(workers) if other != worker]
            both[0] += count * (sum(own[other] for other in others) + (workers - 1) * means[worker])
            both[1] += count * ((workers - 1) * own[worker] + sum(means[other] for other in others))
    return [(out, back) for out, back in traffic]
