"""The weighted mean of every worker's delta over the inter-worker group.

Every value is encoded once by its sender and averaged in fp32 in the order of the workers. All
workers decode the same bytes, their own included, so they end with the same bits. With two workers
each sends all it has to the other. With more, each worker owns a slice of every chunk: it receives
the others' values of it, and sends the mean to all, encoded a second time.

Messages go from worker to worker and not through collectives, so that a lost worker is known by
name. The headers go first, then the delta in chunks: some are in flight while others are encoded
and decoded. On a CPU chunks are processed in pieces that fit the cache, and fp32 is sent from where
it lies.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.diloco.chunks import (
    Task,
    chunk_and_window,
    pipeline_schedule,
    send_lead,
    slice_bounds,
    slice_size,
)
from torchtitan_diloco.diloco.codecs import Codec, Position
from torchtitan_diloco.diloco.outer_optimizer import BLOCK
from torchtitan_diloco.diloco.round import Traffic
from torchtitan_diloco.diloco.transport import (
    HEADER_BYTES,
    Header,
    Messages,
    Transport,
    check_headers,
)

PIECE = 2 * BLOCK
"""Values encoded, decoded or averaged at once on a CPU. A format takes a dozen passes over a piece:
smaller pieces cost calls, larger ones do not fit the cache."""

MEANS = 1
"""Tag of the second hop: receives of both hops are posted ahead, and must not be confused."""


@dataclass
class Chunk:
    """A part of the delta on its way, in a slot of the window."""

    slot: int
    start: int
    values: Tensor
    residual: Tensor | None
    parts: Messages = field(default_factory=Messages)
    """First hop: everybody's values of this worker's slice."""
    means: Messages = field(default_factory=Messages)
    """Second hop."""


class Exchange:
    """Averages one delta at a time, in the same order on every worker, from one thread."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        codec: Codec,
        gather_codec: Codec,
        *,
        largest: int,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        """`gather_codec` encodes the means of the second hop; `largest`: values of a fragment."""
        self._transport = Transport(group, timeout_seconds, device)
        self.workers, self.me = self._transport.workers, self._transport.me
        self._others = self._transport.others
        assert self.workers > 1
        self._failure: Exception | None = None
        self._codec, self._gather_codec = codec, gather_codec
        self._chunk, self._window = chunk_and_window(largest, codec)
        self._piece = min(PIECE, self._chunk) if device.type == "cpu" else self._chunk
        part = min(self._chunk, slice_size(self._chunk, self.workers))
        meaning = range(self.workers if self.workers > 2 else 0)

        def buffers(workers: Iterable[int], size: int) -> dict[int, Tensor]:
            return {one: torch.zeros(size, dtype=torch.uint8, device=device) for one in workers}

        window = range(self._window)
        self._headers = buffers(range(self.workers), HEADER_BYTES)
        self._incoming = [buffers(self._others, codec.wire_bytes(part)) for _ in window]
        self._means = [buffers(meaning, gather_codec.wire_bytes(part)) for _ in window]
        self._outgoing = buffers(window, 0 if codec.is_fp32 else codec.wire_bytes(self._chunk))
        mean = part if self.workers > 2 else 0
        self._mean = torch.zeros(mean, dtype=torch.float32, device=device)
        self._before = torch.zeros(self._piece, dtype=torch.float32, device=device)
        self._dot = torch.zeros((), dtype=torch.float64, device=device)
        self._is_measured = False

    def average(
        self,
        delta: Tensor,
        header: Header,
        residual: Tensor | None = None,
        keys: tuple[int, int] = (0, 0),
        *,
        measured: bool = False,
    ) -> tuple[list[Header], Traffic]:
        """Replace `delta` by the weighted mean over workers, or by 0 if all weigh 0.

        Return all headers and the traffic. After a failure there is no other exchange on this
        group: messages of the failed one may still be in flight.

        Args:
            residual: what encoding has lost of this fragment so far; it is sent along, and becomes
                what is lost now. A worker of weight 0 sends nothing of it.
            keys: of the random numbers of stochastic rounding, for this delta and for the mean.
            measured: compute the scalar product of the delta and the mean.
        """
        if self._failure is not None:
            raise self._failure
        self._transport.begin()
        self._is_measured = measured
        self._dot.zero_()
        values = delta.split(self._chunk)
        lost = (
            repeat(None) if residual is None or not header.weight else residual.split(self._chunk)
        )
        chunks = [
            Chunk(number % self._window, number * self._chunk, *both)
            for number, both in enumerate(zip(values, lost, strict=False))
        ]
        try:
            headers = self._run(header, chunks, Position(keys[0]), Position(keys[1]))
        except Exception as error:
            self._failure = error
            raise
        if measured:
            self._traffic.dot = self._dot.item()
        return headers, self._traffic

    def _run(
        self, header: Header, chunks: list[Chunk], mine: Position, mean: Position
    ) -> list[Header]:
        greeting = self._send_header(header)
        for chunk in chunks[: self._window]:
            self._receive_parts(chunk)
            self._receive_means(chunk)
        headers: list[Header] = []
        lead = send_lead(self._window, self.workers)
        for task, number in pipeline_schedule(len(chunks), self._window, self.workers):
            chunk = chunks[number]
            next_in_slot = chunks[number + self._window : number + self._window + 1]
            if task is Task.SEND:
                self._send_parts(chunk, mine.after(chunk.start))
            elif task is Task.AVERAGE:
                headers = headers or self._read_headers(greeting, header)
                moments = self._transport.wait(chunk.parts)
                if number <= lead:  # later chunks wait for what this worker has to do before
                    self._traffic.note_arrivals(chunk.parts.sizes, moments)
                if self.workers == 2:
                    self._average(chunk, headers, out=chunk.values)
                else:
                    self._send_mean(chunk, headers, mean.after(chunk.start))
                for following in next_in_slot:
                    self._receive_parts(following)
            else:
                self._transport.wait(chunk.means)
                self._collect_means(chunk)
                for following in next_in_slot:
                    self._receive_means(following)
        return headers

    def close(self) -> None:
        self._transport.close()

    @property
    def _traffic(self) -> Traffic:
        return self._transport.traffic

    # --- headers ----------------------------------------------------------------------------------

    def _send_header(self, header: Header) -> Messages:
        packed = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        mine = self._headers[self.me].copy_(packed)
        self._traffic.header_sent = time.perf_counter()
        messages = self._transport.receive([(one, self._headers[one]) for one in self._others])
        self._transport.send(messages, [(one, mine) for one in self._others], watched=True)
        return messages

    def _read_headers(self, greeting: Messages, header: Header) -> list[Header]:
        self._traffic.heard = self._transport.wait(greeting)
        headers = [
            header if worker == self.me else Header.unpack(received.cpu().numpy().tobytes())
            for worker, received in self._headers.items()
        ]
        check_headers(headers, self.me)
        return headers

    # --- buffers ----------------------------------------------------------------------------------

    def _slice(self, chunk: Chunk, worker: int) -> Tensor:
        """Return the values of a chunk that a worker averages."""
        start, end = slice_bounds(chunk.values.numel(), self.workers, worker)
        return chunk.values[start:end]

    def _payload(self, chunk: Chunk) -> Tensor:
        """Return the buffer of this worker's encoded chunk."""
        if self._codec.is_fp32:
            return chunk.values.view(torch.uint8)
        return self._outgoing[chunk.slot][: self._codec.wire_bytes(chunk.values.numel())]

    def _payload_for(self, chunk: Chunk, worker: int) -> Tensor:
        """Return the bytes of the slice that a worker averages."""
        bounds = slice_bounds(chunk.values.numel(), self.workers, worker)
        start, end = map(self._codec.wire_bytes, bounds)
        return self._payload(chunk)[start:end]

    def _payload_from(self, chunk: Chunk, worker: int) -> Tensor:
        """Return the buffer for a worker's values of this worker's slice."""
        size = self._codec.wire_bytes(self._slice(chunk, self.me).numel())
        return self._incoming[chunk.slot][worker][:size]

    def _mean_of(self, chunk: Chunk, worker: int) -> Tensor:
        """Return the buffer for the encoded mean of a worker's slice."""
        size = self._gather_codec.wire_bytes(self._slice(chunk, worker).numel())
        return self._means[chunk.slot][worker][:size]

    def _pieces(self, codec: Codec, values: Tensor, *payloads: Tensor) -> Iterator[list[Tensor]]:
        """Yield values and their bytes in pieces that fit the cache."""
        size = codec.wire_bytes(self._piece)
        cut = [payload.split(size) for payload in payloads]
        if values.numel():
            yield from map(list, zip(values.split(self._piece), *cut, strict=True))

    @contextmanager
    def _replacing(self, piece: Tensor) -> Iterator[None]:
        """Add up the scalar product of the delta and of the mean that replaces it in the body."""
        if not self._is_measured:
            yield
            return
        before = self._before[: piece.numel()].copy_(piece)
        yield
        self._dot += torch.dot(before, piece)

    # --- first hop: everybody's delta -------------------------------------------------------------

    def _receive_parts(self, chunk: Chunk) -> None:
        rooms = [(worker, self._payload_from(chunk, worker)) for worker in self._others]
        chunk.parts = self._transport.receive(rooms)

    def _send_parts(self, chunk: Chunk, place: Position) -> None:
        started = time.perf_counter()
        if not self._codec.is_fp32:
            pieces = self._pieces(self._codec, chunk.values, self._payload(chunk))
            for number, (values, encoded) in enumerate(pieces):
                start = number * self._piece
                if chunk.residual is None:
                    self._codec.encode(values, encoded, place.after(start))
                else:
                    residual = chunk.residual[start : start + self._piece]
                    self._codec.encode_with_feedback(values, residual, encoded, place.after(start))
        self._traffic.encoded = time.perf_counter()
        self._traffic.encoding_seconds += self._traffic.encoded - started
        parts = [(worker, self._payload_for(chunk, worker)) for worker in self._others]
        self._transport.send(chunk.parts, parts)

    def _average(self, chunk: Chunk, headers: list[Header], *, out: Tensor) -> None:
        """Average this worker's slice in the order of the workers.

        A worker of weight 0 is skipped: its values may be anything.
        """
        started = time.perf_counter()
        payloads, weights = [], []
        for worker, header in enumerate(headers):
            if header.weight > 0:
                find = self._payload_for if worker == self.me else self._payload_from
                payloads.append(find(chunk, worker))
                weights.append(header.weight)
        if payloads:
            scope = self._replacing if self.workers == 2 else nullcontext
            for values, *encoded in self._pieces(self._codec, out, *payloads):
                with scope(values):
                    self._codec.average(encoded, weights, values)
        else:
            out.zero_()
        self._traffic.decoding_seconds += time.perf_counter() - started

    # --- second hop: the means --------------------------------------------------------------------

    def _receive_means(self, chunk: Chunk) -> None:
        if self.workers > 2:
            rooms = [(worker, self._mean_of(chunk, worker)) for worker in self._others]
            chunk.means = self._transport.receive(rooms, MEANS)

    def _send_mean(self, chunk: Chunk, headers: list[Header], place: Position) -> None:
        start, end = slice_bounds(chunk.values.numel(), self.workers, self.me)
        mean, encoded = self._mean[: end - start], self._mean_of(chunk, self.me)
        self._average(chunk, headers, out=mean)
        started = time.perf_counter()
        for number, (values, payload) in enumerate(self._pieces(self._gather_codec, mean, encoded)):
            self._gather_codec.encode(values, payload, place.after(start + number * self._piece))
        self._traffic.encoding_seconds += time.perf_counter() - started
        self._transport.send(chunk.means, [(worker, encoded) for worker in self._others], MEANS)

    def _collect_means(self, chunk: Chunk) -> None:
        started = time.perf_counter()
        for worker in range(self.workers):
            values, payload = self._slice(chunk, worker), self._mean_of(chunk, worker)
            for piece, encoded in self._pieces(self._gather_codec, values, payload):
                with self._replacing(piece):
                    self._gather_codec.decode(encoded, piece)
        self._traffic.decoding_seconds += time.perf_counter() - started
