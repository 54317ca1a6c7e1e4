"""Weighted mean of the workers' deltas.

Each sender encodes its delta once. Values are averaged in fp32 in the order of workers, and every
worker decodes the same bytes, including its own, so all get the same bits. With two workers, or
with sparse deltas, each worker sends its whole delta to all others. Otherwise each worker averages
one slice of every chunk and sends the mean, encoded again, to all others.

Messages are point-to-point, so that an error can name the lost worker. After the headers, the delta
is sent in chunks, which overlaps transfers with encoding and decoding. Chunks take turns in the TCP
streams between two workers: gloo picks the stream by the tag. On a CPU, chunks are processed in
pieces that fit the cache, and fp32 is sent without a copy. On a GPU, deltas are encoded and
averaged on the caller's stream. Those in host memory are copied to it and back for this, as a CPU
takes ten times as long.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.diloco.codecs import UNIT, Codec
from torchtitan_diloco.diloco.config import STREAM_BYTES
from torchtitan_diloco.diloco.delta_norms import settle_weights
from torchtitan_diloco.diloco.outer_step import STEP_VALUES
from torchtitan_diloco.diloco.round import Traffic
from torchtitan_diloco.diloco.transport import (
    Bytes,
    Header,
    Messages,
    Transport,
    check_headers,
    header_bytes,
)

CHUNK = 8 * STEP_VALUES
"""Values per message: 2 MB in fp32."""
IN_FLIGHT = 2**23
"""Bytes in flight, unless several streams carry more."""
GPU_CHUNK = 2**24
"""Values per message on a GPU, where a kernel for 2 MB takes less time than its launch."""
GPU_IN_FLIGHT = 2**28
"""Bytes in flight on a GPU."""
PIECE = 2 * STEP_VALUES
"""Values processed at once on a CPU, in a dozen passes: larger pieces do not fit into the cache,
and smaller ones need more calls."""

assert STEP_VALUES % UNIT == GPU_CHUNK % UNIT == 0, "codecs can be called block by block"


def chunk_and_window(
    largest: int, codec: Codec, *, on_gpu: bool = False, streams: int = 1, owners: int = 1
) -> tuple[int, int]:
    """Return values per chunk and chunks in flight. `largest`: values of the largest fragment."""
    chunk = GPU_CHUNK if on_gpu else CHUNK
    in_flight = GPU_IN_FLIGHT if on_gpu else IN_FLIGHT
    if streams > 1:
        # Smaller chunks, as each travels in a single stream.
        chunk = max(min(CHUNK, chunk), chunk // 2 ** math.ceil(math.log2(streams)))
        # Of a chunk, a worker gets a slice in each of two hops. Twice what streams carry in a round
        # trip, as gloo sends nothing before the receiver has announced its buffer.
        slices = 1 if owners == 1 else 2 * owners
        in_flight = max(in_flight, 2 * streams * STREAM_BYTES * slices)
    chunk = min(chunk, max(1, largest))
    chunks = -(-largest // chunk)
    return chunk, max(1, min(chunks, in_flight // codec.wire_bytes(chunk)))


def slice_owners(workers: int, codec: Codec) -> int:
    """Return the number of workers that share the averaging of a chunk. 1: every worker averages
    everything, as two do, and more with sparse deltas, which are smaller than their mean."""
    return 1 if workers == 2 or codec.format.is_sparse else workers


def bytes_from_each(values: int, workers: int, codec: Codec) -> float:
    """Return the bytes that each other worker sends to this one in an exchange, without headers: a
    whole delta, or a slice of the delta and one of the mean."""
    slices = slice_owners(workers, codec)
    whole = codec.wire_bytes(values)
    return whole if slices == 1 else 2 * whole / slices


def exchange_bytes(values: int, workers: int, codec: Codec, ranks: int = 1) -> int:
    """Return the bytes that a worker sends in an exchange, with headers. It receives as many.

    `values`: those of the fragment on all `ranks` of the worker.
    """
    others = workers - 1
    if not others:
        return 0
    payloads = int(others * bytes_from_each(values, workers, codec))
    return payloads + others * ranks * header_bytes(workers)


def slice_bounds(values: int, owners: int, worker: int) -> tuple[int, int]:
    """Return the range of a chunk's values that a worker averages: all of them, or a slice of whole
    units, whose encoded bytes are contiguous. It may be empty."""
    if owners == 1:
        return 0, values
    size = -(-values // (owners * UNIT)) * UNIT
    return min(worker * size, values), min((worker + 1) * size, values)


@dataclass
class Chunk:
    """A chunk of the delta and its buffers. Lists have one entry for the slice of each worker."""

    number: int
    values: Tensor
    payload: Bytes  # this worker's encoded values
    slices: list[Tensor]
    outgoing: list[Bytes]  # bytes of `payload` for each slice
    incoming: dict[int, Bytes]  # the others' values of this worker's slice
    means: list[Bytes]  # encoded means of all slices
    first_hop: Messages = field(default_factory=Messages)
    second_hop: Messages = field(default_factory=Messages)


def allocate_bytes(size: int, device: torch.device, *, is_read_in_place: bool = False) -> Bytes:
    """Allocate buffers for encoded bytes. Values that are read in place need only gloo's copy."""
    local = torch.empty(0 if is_read_in_place else size, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        return Bytes(local)
    return Bytes(local, torch.empty(size, dtype=torch.uint8, pin_memory=True))


class Exchange:
    """Averages one delta at a time, in the same order on every worker, from one thread."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        codec: Codec,
        *,
        largest: int,
        device: torch.device,
        timeout_seconds: float,
        streams: int = 1,
    ) -> None:
        """Allocate the buffers.

        `largest`: values of the largest fragment. `device`: where to encode deltas, which may be in
        host memory. `streams`: those between two workers, for each of which the group has a
        connection.
        """
        self.transport = Transport(group, timeout_seconds)
        self.workers = self.transport.workers
        self.me = self.transport.me
        self.close = self.transport.close
        self._others = self.transport.others
        assert self.workers > 1
        self._failure: Exception | None = None
        self._codec = codec
        self._device = device
        self._streams = streams
        self._owners = slice_owners(self.workers, codec)
        on_gpu = device.type != "cpu"
        self._chunk, self._window = chunk_and_window(
            largest, codec, on_gpu=on_gpu, streams=streams, owners=self._owners
        )
        self._piece = self._chunk if on_gpu else min(PIECE, self._chunk)
        slice_values = slice_bounds(self._chunk, self._owners, 0)[1]
        averaging = range(self.workers if self._owners > 1 else 0)

        def buffers(workers: Iterable[int], size: int) -> dict[int, Bytes]:
            return {worker: allocate_bytes(size, device) for worker in workers}

        window = range(self._window)
        whole = codec.wire_bytes(self._chunk)
        size = header_bytes(self.workers)
        self._headers = {worker: torch.zeros(size, dtype=torch.uint8) for worker in self._others}
        self._incoming = [buffers(self._others, codec.wire_bytes(slice_values)) for _ in window]
        self._means = [buffers(averaging, codec.wire_bytes(slice_values)) for _ in window]
        self._outgoing = [
            allocate_bytes(whole, device, is_read_in_place=codec.is_fp32) for _ in window
        ]
        mean_values = slice_values if averaging else 0
        self._mean = torch.empty(mean_values, dtype=torch.float32, device=device)
        self._before = torch.empty(self._piece, dtype=torch.float32, device=device)
        self._dot = torch.zeros((), dtype=torch.float64, device=device)
        self._is_measured = False

    def average(
        self, delta: Tensor, header: Header, *, measured: bool = False
    ) -> tuple[list[Header], Traffic]:
        """Replace `delta` with the weighted mean over workers, or with 0 if all weights are 0.

        Return all headers and the traffic. After a failure every call raises the same error, as
        messages of the failed exchange may still be in flight. `measured`: compute the dot product
        of the delta and the mean.
        """
        if self._failure is not None:
            raise self._failure
        self.transport.start(Traffic())
        self._is_measured = measured
        self._dot.zero_()
        try:
            headers = self._run(header, delta)
        except Exception as error:
            self._failure = error
            raise
        if measured:
            self._traffic.dot = self._dot.item()
        return headers, self._traffic

    @property
    def _traffic(self) -> Traffic:
        return self.transport.traffic

    def _run(self, header: Header, delta: Tensor) -> list[Header]:
        """Exchange the chunks, in the same order on every worker, with up to `window` in flight.

        In step i, chunk i is sent, chunk i - lead is averaged, and with a second hop the means of
        chunk i - last are collected. A chunk that is done gives its buffers to the one `window`
        later, whose receive is then posted.
        """
        self._others = self._in_turn(header.outer_round)
        content = header.pack().ljust(header_bytes(self.workers), b"\0")  # nothing may be known
        own_header = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._traffic.header_sent = time.perf_counter()
        header_messages = self.transport.receive(self._headers.items())
        parts = [(worker, own_header) for worker in self._others]
        self.transport.send(header_messages, parts, watched=True)
        headers = list[Header]()
        weights = list[float]()
        starts = range(0, max(1, delta.numel()), self._chunk)
        chunks = [self._chunk_at(start, delta) for start in starts]
        for chunk in chunks[: self._window]:
            self._receive(chunk)
            self._receive_means(chunk)
        count = len(chunks)
        last = self._window - 1
        # With a second hop, half of the window is for the deltas and half for the means.
        lead = last if self._owners == 1 else self._window // 2
        for step in range(count + last):
            if step < count:
                self._send(chunks[step])
            if 0 <= (number := step - lead) < count:
                chunk = chunks[number]
                if not headers:
                    headers = self._read_headers(header_messages, own_header)
                    weights = [settled.weight for settled in headers]
                moments = self.transport.wait(chunk.first_hop)
                if number <= lead:  # the senders of later ones also wait for this worker
                    self._traffic.note_arrivals(chunk.first_hop.sizes, moments)
                if self._owners == 1:
                    self._average(chunk, weights, out=chunk.values)
                else:
                    self._send_mean(chunk, weights)
                if number + self._window < count:
                    self._receive(chunks[number + self._window])  # into the same buffers
            if self._owners > 1 and 0 <= (number := step - last) < count:
                self.transport.wait(chunks[number].second_hop, are_means=True)
                self._collect_means(chunks[number])
                if number + self._window < count:
                    self._receive_means(chunks[number + self._window])
        return headers

    def _in_turn(self, number: int) -> list[int]:
        """Return the other workers in the order of sends. It differs between workers and rounds, so
        that no path is always the first or the last on a shared link."""
        others = [(self.me + distance) % self.workers for distance in range(1, self.workers)]
        start = number % len(others)
        return others[start:] + others[:start]

    def _read_headers(self, header_messages: Messages, own_header: Tensor) -> list[Header]:
        """Wait for the headers of all workers, check them, and return them with their weights."""
        self._traffic.heard = self.transport.wait(header_messages)
        received = {self.me: own_header, **self._headers}
        content = [received[worker].numpy().tobytes() for worker in range(self.workers)]
        headers = list(map(Header.unpack, content))
        check_headers(headers, self.me)
        return settle_weights(headers)

    def warm_up(self, sizes: Iterable[int]) -> None:
        """Compile the GPU kernels for the full and the last chunk of deltas of these sizes, which
        the first exchange would do while training keeps the GPU busy."""
        lengths = set[int]()
        for size in sizes:
            lengths |= {min(size, self._chunk), size % self._chunk}
        weights = [1.0] * self.workers
        for size in lengths - {0}:
            values = torch.zeros(size, device=self._device)
            chunk = self._chunk_at(0, values)
            self._encode(chunk)
            if self._owners == 1:
                self._average(chunk, weights, out=values)
            else:
                self._encode_mean(chunk, weights)
                self._collect_means(chunk)

    @contextmanager
    def _counted(self, total: str) -> Iterator[None]:
        """Add the seconds of the body to a field of the traffic."""
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":  # gloo is about to read or overwrite the host memory
            torch.cuda.current_stream(self._device).synchronize()
        seconds = time.perf_counter() - started
        setattr(self._traffic, total, getattr(self._traffic, total) + seconds)

    # --- chunks and pieces ------------------------------------------------------------------------

    def _chunk_at(self, start: int, delta: Tensor) -> Chunk:
        """Return the chunk that starts at this value, with the buffers of its slot. Chunks whose
        numbers differ by the window have the same slot."""
        number = start // self._chunk
        values = delta[start : start + self._chunk]
        slot = number % self._window
        workers = range(self.workers)
        size = self._codec.wire_bytes
        payload = self._outgoing[slot].part(0, size(values.numel()))
        if self._codec.is_fp32:
            payload.local = values.view(torch.uint8)
        bounds = [slice_bounds(values.numel(), self._owners, worker) for worker in workers]
        slices = [values[first:last] for first, last in bounds]
        incoming_bytes = size(slices[self.me].numel())
        return Chunk(
            number,
            values,
            payload=payload,
            slices=slices,
            outgoing=[payload.part(size(first), size(last)) for first, last in bounds],
            incoming={
                worker: buffer.part(0, incoming_bytes)
                for worker, buffer in self._incoming[slot].items()
            },
            means=[
                buffer.part(0, size(slices[worker].numel()))
                for worker, buffer in self._means[slot].items()
            ],
        )

    def _pieces(self, values: Tensor, *payloads: Bytes) -> Iterator[list[Tensor]]:
        """Split values and their encoded bytes into pieces that fit the cache."""
        size = self._codec.wire_bytes(self._piece)
        cut = [payload.local.split(size) for payload in payloads]
        if values.numel():
            yield from map(list, zip(values.split(self._piece), *cut, strict=True))

    @contextmanager
    def _on_encoding_device(self, values: Tensor, *, changes: bool = True) -> Iterator[Tensor]:
        """Yield values on the device that encodes. From host memory they are copied there, and back
        if the body changes them."""
        if values.device == self._device:
            yield values
            return
        on_device = values.to(self._device, copy=True, non_blocking=True)
        yield on_device
        if changes:
            values.copy_(on_device, non_blocking=True)

    @contextmanager
    def _replacing(self, piece: Tensor) -> Iterator[None]:
        """Add the dot product of the delta and the mean that the body replaces it with."""
        if not self._is_measured:
            yield
            return
        before = self._before[: piece.numel()].copy_(piece)
        yield
        # Not torch.dot: cuBLAS would allocate a workspace for the background stream.
        self._dot += before.mul_(piece).sum()

    def _tag(self, chunk: Chunk, hop: int) -> int:
        """Return the tag of a chunk's messages. The tag modulo the streams is the number of the
        stream. Each hop has its own tags, because receives of both are posted in advance."""
        return chunk.number % self._streams + hop * self._streams

    # --- first hop: the deltas --------------------------------------------------------------------

    def _receive(self, chunk: Chunk) -> None:
        """Post the receives of the others' values of this worker's slice."""
        buffers = [(worker, buffer.host) for worker, buffer in chunk.incoming.items()]
        chunk.first_hop = self.transport.receive(buffers, tag=self._tag(chunk, 0))

    def _send(self, chunk: Chunk) -> None:
        """Encode this worker's values, and send each other worker those of its slice."""
        self._encode(chunk)
        parts = [(worker, chunk.outgoing[worker].host) for worker in self._others]
        self.transport.send(chunk.first_hop, parts, tag=self._tag(chunk, 0))

    def _encode(self, chunk: Chunk) -> None:
        """Encode this worker's values. The payload of fp32 is their memory."""
        with self._counted("encoding_seconds"):
            if not self._codec.is_fp32:
                for values, encoded in self._pieces(chunk.values, chunk.payload):
                    with self._on_encoding_device(values, changes=False) as on_device:
                        self._codec.encode(on_device, encoded)
            chunk.payload.download()
        self._traffic.encoded = time.perf_counter()

    def _average(self, chunk: Chunk, weights: list[float], *, out: Tensor) -> None:
        """Average this worker's slice. Workers of weight 0 are skipped: they may have sent NaN."""
        weight_of = {worker: weight for worker, weight in enumerate(weights) if weight > 0}
        payloads = {**chunk.incoming, self.me: chunk.outgoing[self.me]}
        with self._counted("decoding_seconds"):
            if not weight_of:
                out.zero_()
                return
            for worker in weight_of.keys() - {self.me}:
                payloads[worker].upload()
            # With a second hop, the delta is replaced later, by the decoded means.
            scope = self._replacing if self._owners == 1 else nullcontext
            for values, *pieces in self._pieces(out, *(payloads[worker] for worker in weight_of)):
                with self._on_encoding_device(values) as on_device, scope(on_device):
                    self._codec.average(pieces, list(weight_of.values()), on_device)

    # --- second hop: the means --------------------------------------------------------------------

    def _receive_means(self, chunk: Chunk) -> None:
        """Post the receives of the means of the others' slices, if there is a second hop."""
        if self._owners > 1:
            buffers = [(worker, chunk.means[worker].host) for worker in self._others]
            chunk.second_hop = self.transport.receive(buffers, tag=self._tag(chunk, 1))

    def _send_mean(self, chunk: Chunk, weights: list[float]) -> None:
        """Send the mean of this worker's slice to all others."""
        self._encode_mean(chunk, weights)
        parts = [(worker, chunk.means[self.me].host) for worker in self._others]
        self.transport.send(chunk.second_hop, parts, tag=self._tag(chunk, 1))

    def _encode_mean(self, chunk: Chunk, weights: list[float]) -> None:
        """Average this worker's slice, and encode the mean."""
        mean = self._mean[: chunk.slices[self.me].numel()]
        encoded = chunk.means[self.me]
        self._average(chunk, weights, out=mean)
        with self._counted("encoding_seconds"):
            for values, payload in self._pieces(mean, encoded):
                self._codec.encode(values, payload)
            encoded.download()

    def _collect_means(self, chunk: Chunk) -> None:
        """Replace the values by the means of all slices. Decode also this worker's own mean, so
        that all workers get the same bits."""
        with self._counted("decoding_seconds"):
            for worker, (values, payload) in enumerate(zip(chunk.slices, chunk.means, strict=True)):
                if worker != self.me:
                    payload.upload()
                for piece, encoded in self._pieces(values, payload):
                    with self._on_encoding_device(piece) as on_device, self._replacing(on_device):
                        self._codec.decode(encoded, on_device)
