"""The weighted mean of every worker's delta over the inter-worker group.

Every value is encoded once by its sender and averaged in fp32 in the order of the workers. All workers decode the same bytes,
their own included, so they end with the same bits. Two ways, by what they cost: with two workers each sends all it has to
the other (one hop); with more, each worker owns a slice, gets everybody's part of it, and sends the mean of it to all, which
is encoded a second time.

Messages go from worker to worker, not through collectives: when one is silent, it is known which. The headers go first,
then the delta in chunks, several of which are under way while others are encoded and decoded. On a CPU chunks are worked
on in pieces that stay in cache, and fp32 is sent from where it lies: the passes over memory are what a sync costs.
"""

import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.codecs import UNIT, Codec, Place
from torchtitan_diloco.diloco.header import HEADER_BYTES, Header, check_headers
from torchtitan_diloco.diloco.outer_optimizer import BLOCK
from torchtitan_diloco.diloco.round import Traffic

CHUNK = 16 * BLOCK
"""Values in one message (2 MB in fp32)."""
IN_FLIGHT = 2**23
"""Bytes in chunks under way at once: long links need as many as they carry in a round trip."""

CODED_PIECE = 4 * BLOCK
"""Values encoded or decoded at once on a CPU. A format takes a dozen passes over a piece: with smaller ones the time goes into
calling them, with larger ones into memory."""

assert BLOCK % UNIT == 0, "codecs can be fed in blocks"


class WorkerLostError(RuntimeError):
    """A worker left or was silent beyond the timeout."""

    def __init__(self, workers: list[int], reason: str) -> None:
        self.workers, self.reason = workers, reason
        names = " and ".join(map(str, workers))
        super().__init__(f"worker {names} left or did not answer in time ({reason})")


@dataclass
class _Messages:
    """What is under way for one chunk, by other worker."""

    received: list[tuple[int, dist.Work]] = field(default_factory=list)
    sent: list[tuple[int, dist.Work]] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes that come from a worker."""
    arrivals: "dict[int, Future[float]]" = field(default_factory=dict)
    """When they came, told by the threads that look after one worker each."""

    def of(self, worker: int) -> list[dist.Work]:
        """What is received stands first: how long it took must not depend on what this worker sends."""
        return [work for other, work in self.received + self.sent if other == worker]


class Exchange:
    """One at a time, in the same order on every worker, from one thread."""

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
        """`gather_codec` encodes the means that go back with more than two workers; `largest`: values of a fragment."""
        self.workers, self.me = group.size(), group.rank()
        assert self.workers > 1
        self._traffic = Traffic()
        self._failure: Exception | None = None
        self._group, self._codec, self._gather_codec = group, codec, gather_codec
        self._timeout = timedelta(seconds=timeout_seconds)
        self._chunk = min(CHUNK, max(1, largest))
        self._others = [worker for worker in range(self.workers) if worker != self.me]
        self._waiters = {worker: BackgroundThread(f"diloco-wait-{worker}") for worker in self._others}
        self._exact_sizes = dist.get_backend(group) == "nccl"
        self._window = max(1, min(-(-largest // self._chunk), IN_FLIGHT // codec.wire_bytes(self._chunk)))
        values = min(self._chunk, self._slice_size(self._chunk))
        pair = self.workers == 2

        def buffers(workers: Iterable[int], room: int) -> dict[int, Tensor]:
            return {worker: torch.zeros(room, dtype=torch.uint8, device=device) for worker in workers}

        self._headers = buffers(range(self.workers), HEADER_BYTES)
        # By slot of the window and worker:
        self._incoming = [buffers(self._others, codec.wire_bytes(values)) for _ in range(self._window)]
        means = [] if pair else range(self.workers)
        self._means = [buffers(means, gather_codec.wire_bytes(values)) for _ in range(self._window)]
        # By slot of the window:
        sent = 0 if codec.is_fp32 else codec.wire_bytes(self._chunk)
        self._outgoing = list(torch.zeros(self._window, sent, dtype=torch.uint8, device=device).unbind())
        self._mean = torch.zeros(0 if pair else values, dtype=torch.float32, device=device)
        self._piece = self._chunk
        if device.type == "cpu":
            self._piece = BLOCK if codec.is_fp32 else CODED_PIECE
        self._before = torch.zeros(min(self._piece, self._chunk), dtype=torch.float32, device=device)
        self._dot = torch.zeros((), dtype=torch.float64, device=device)

    def average(
        self, delta: Tensor, header: Header, residual: Tensor | None = None, keys: tuple[int, int] = (0, 0)
    ) -> tuple[list[Header], Traffic]:
        """Turns `delta` into the mean over workers, or into 0 if all weigh 0; returns everybody's header and what it took.
        After a failure there is no other exchange on this group: messages of the failed one may still be under way.

        `residual`: what encoding lost of this fragment so far; it is sent along, and becomes what is lost now. `keys`: of the
        random numbers that stochastic rounding draws for this delta, and of those for the mean, which are everybody's."""
        if self._failure is not None:
            raise self._failure
        if not header.weight:
            residual = None  # nobody takes anything of this delta, so nothing of the residual is sent either
        self._traffic, self._dot = Traffic(), self._dot.zero_()
        try:
            headers = self._average(delta, header, residual, *keys)
            self._traffic.dot = self._dot.item()
            return headers, self._traffic
        except Exception as error:
            self._failure = error
            raise

    def _average(self, delta: Tensor, header: Header, residual: Tensor | None, key: int, mean_key: int) -> list[Header]:
        chunks = delta.split(self._chunk)
        residuals = [None] * len(chunks) if residual is None else residual.split(self._chunk)
        mine, means = Place(key), Place(mean_key)
        greetings = self._send_header(header)
        headers: list[Header] = []
        first_hop: dict[int, _Messages] = {}
        second_hop: dict[int, _Messages] = {}
        last = self._window - 1
        middle = last if self.workers == 2 else self._window // 2
        for step in range(len(chunks) + last):  # every worker runs the same programme, so messages meet their receivers
            if step < len(chunks):
                first_hop[step] = self._send(step, chunks[step], residuals[step], mine.after(step * self._chunk))
            if 0 <= step - middle < len(chunks):
                number = step - middle
                headers = headers or self._read_headers(greetings, header)
                messages = first_hop.pop(number)
                moments = self._wait(messages)
                if number <= middle:  # later ones wait for what has to be worked on before
                    self._traffic.note_arrivals(messages.sizes, moments)
                if self.workers == 2:
                    self._average_slice(number, headers, chunks[number], out=chunks[number])
                else:
                    second_hop[number] = self._send_mean(number, headers, chunks[number], means.after(number * self._chunk))
            if self.workers > 2 and 0 <= step - last < len(chunks):
                number = step - last
                self._wait(second_hop.pop(number))
                self._collect_means(number, chunks[number])
        return headers

    # --- headers ---------------------------------------------------------------------------------------------------

    def _send_header(self, header: Header) -> _Messages:
        mine = self._headers[self.me].copy_(torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8))
        self._traffic.arrived = time.perf_counter()
        messages = self._post([(worker, mine, self._headers[worker]) for worker in self._others])
        if not messages.arrivals:  # the moment is to be known while this thread is encoding
            self._watch(messages)
        return messages

    def _read_headers(self, greetings: _Messages, header: Header) -> list[Header]:
        self._traffic.heard = self._wait(greetings)
        headers = [
            header if worker == self.me else Header.unpack(received.cpu().numpy().tobytes())
            for worker, received in self._headers.items()
        ]
        check_headers(headers, self.me)
        return headers

    # --- the slices of a chunk, and their bytes ----------------------------------------------------------------------

    def _slice_size(self, values: int) -> int:
        """Values of a chunk that one worker averages: all of it with two workers, an equal part in whole units with more,
        so that a slice's bytes are a stretch of the chunk's."""
        return values if self.workers == 2 else -(-values // (self.workers * UNIT)) * UNIT

    def _bounds(self, chunk: Tensor, worker: int) -> tuple[int, int]:
        """Of the part of a chunk that a worker averages; the last ones may be short or empty."""
        values = chunk.numel()
        if self.workers == 2:
            return 0, values
        size = self._slice_size(values)
        return min(worker * size, values), min((worker + 1) * size, values)

    def _slice(self, chunk: Tensor, worker: int) -> Tensor:
        start, end = self._bounds(chunk, worker)
        return chunk[start:end]

    def _encoded(self, slot: int, chunk: Tensor) -> Tensor:
        """Where the bytes of this worker's chunk lie."""
        if self._codec.is_fp32:
            return chunk.view(torch.uint8)
        return self._outgoing[slot][: self._codec.wire_bytes(chunk.numel())]

    def _encoded_slice(self, slot: int, chunk: Tensor, worker: int) -> Tensor:
        start, end = (self._codec.wire_bytes(bound) for bound in self._bounds(chunk, worker))
        return self._encoded(slot, chunk)[start:end]

    def _received(self, slot: int, worker: int, values: int) -> Tensor:
        """What a worker sends of this worker's slice."""
        return self._incoming[slot][worker][: self._codec.wire_bytes(values)]

    def _mean_of(self, slot: int, chunk: Tensor, worker: int) -> Tensor:
        """The bytes of the mean of a worker's slice."""
        start, end = self._bounds(chunk, worker)
        return self._means[slot][worker][: self._gather_codec.wire_bytes(end - start)]

    def _pieces(self, codec: Codec, values: Tensor, payload: Tensor, place: Place) -> Iterator[tuple[Tensor, Tensor, Place]]:
        """Values and bytes of what is worked on at once, one after the other."""
        cuts = zip(values.split(self._piece), payload.split(codec.wire_bytes(self._piece)), strict=True)
        for number, (piece, encoded) in enumerate(cuts):
            yield piece, encoded, place.after(number * self._piece)

    # --- first hop: everybody's delta ------------------------------------------------------------------------------

    def _send(self, number: int, chunk: Tensor, residual: Tensor | None, place: Place) -> _Messages:
        started = time.perf_counter()
        slot = number % self._window
        if not self._codec.is_fp32:
            lost = repeat(None) if residual is None else residual.split(self._piece)
            pieces = self._pieces(self._codec, chunk, self._encoded(slot, chunk), place)
            for (values, encoded, where), left in zip(pieces, lost, strict=False):
                if left is None:
                    self._codec.encode(values, encoded, where)
                else:
                    self._codec.encode_with_feedback(values, left, encoded, where)
        self._traffic.encoded = time.perf_counter()
        self._traffic.encoding_seconds += self._traffic.encoded - started
        own = self._slice(chunk, self.me).numel()
        return self._post(
            [(worker, self._encoded_slice(slot, chunk, worker), self._received(slot, worker, own)) for worker in self._others]
        )

    def _average_slice(self, number: int, headers: list[Header], chunk: Tensor, *, out: Tensor) -> None:
        """The weighted mean of this worker's slice, in the order of the workers. A worker of weight 0 is passed over:
        its values may be anything. `out` is the chunk itself with two workers."""
        started = time.perf_counter()
        slot = number % self._window
        heard = [(worker, header.weight) for worker, header in enumerate(headers) if header.weight > 0]
        payloads = [
            self._encoded_slice(slot, chunk, worker) if worker == self.me else self._received(slot, worker, out.numel())
            for worker, _ in heard
        ]
        if payloads:
            piece_bytes = self._codec.wire_bytes(self._piece)
            cut = [payload.split(piece_bytes) for payload in payloads]
            for piece, *encoded in zip(out.split(self._piece), *cut, strict=True):
                with self._compared(piece) if self.workers == 2 else nullcontext():
                    self._codec.average(encoded, [weight for _, weight in heard], piece)
        else:
            out.zero_()
        self._traffic.decoding_seconds += time.perf_counter() - started

    @contextmanager
    def _compared(self, piece: Tensor) -> Iterator[None]:
        """Around what puts the mean in the place of this worker's delta: adds up their scalar product. On a CPU both are in
        cache at this moment, which spares a pass over memory."""
        before = self._before[: piece.numel()].copy_(piece)
        yield
        self._dot += torch.dot(before, piece)

    # --- second hop: the means -------------------------------------------------------------------------------------

    def _send_mean(self, number: int, headers: list[Header], chunk: Tensor, place: Place) -> _Messages:
        slot = number % self._window
        start, end = self._bounds(chunk, self.me)
        mean = self._mean[: end - start]
        self._average_slice(number, headers, chunk, out=mean)
        started = time.perf_counter()
        encoded = self._mean_of(slot, chunk, self.me)
        for values, payload, where in self._pieces(self._gather_codec, mean, encoded, place.after(start)):
            self._gather_codec.encode(values, payload, where)
        self._traffic.encoding_seconds += time.perf_counter() - started
        return self._post([(worker, encoded, self._mean_of(slot, chunk, worker)) for worker in self._others])

    def _collect_means(self, number: int, chunk: Tensor) -> None:
        started = time.perf_counter()
        slot = number % self._window
        for worker in range(self.workers):
            mean = self._mean_of(slot, chunk, worker)
            for values, payload, _ in self._pieces(self._gather_codec, self._slice(chunk, worker), mean, Place()):
                with self._compared(values):
                    self._gather_codec.decode(payload, values)
        self._traffic.decoding_seconds += time.perf_counter() - started

    # --- messages --------------------------------------------------------------------------------------------------

    def _post(self, pairs: list[tuple[int, Tensor, Tensor]]) -> _Messages:
        """(other worker, what it gets, where what it sends goes); an empty message is not sent. Receives are posted first: gloo
        tells the other side that there is room over the connection that carries what is sent, so behind a large message the
        two directions would take turns."""
        operations: list[dist.P2POp] = []
        messages = _Messages()
        places: list[tuple[list[tuple[int, dist.Work]], int]] = []
        for worker, _, received in pairs:
            if received.numel():
                operations.append(dist.P2POp(dist.irecv, self._room_for(received), group=self._group, group_peer=worker))
                places.append((messages.received, worker))
                messages.sizes[worker] = received.numel()
                self._traffic.bytes_received += received.numel()
        for worker, sent, _ in pairs:
            if sent.numel():
                operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=worker))
                places.append((messages.sent, worker))
                self._traffic.bytes_sent += sent.numel()
        if not operations:
            return messages
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise WorkerLostError(sorted({worker for _, worker in places}), _first_line(error)) from error
        if len(works) == 1:  # NCCL makes one work of a batch
            works = works * len(places)
        for (kept, worker), work in zip(places, works, strict=True):
            kept.append((worker, work))
        if self.workers > 2:
            self._watch(messages)
        return messages

    def _room_for(self, message: Tensor) -> Tensor:
        """All of the message's buffer. A worker with another schedule may send a larger message than is expected:
        gloo aborts the process over one that does not fit, before its header could be read and told."""
        if self._exact_sizes:
            return message
        return message.as_strided((message.untyped_storage().nbytes(),), (1,), 0)

    def _watch(self, messages: _Messages) -> None:
        """From now on threads wait for these, one thread for each worker."""
        for worker in self._others:
            waiting = partial(self._wait_for, worker, messages.of(worker))
            messages.arrivals[worker] = self._waiters[worker].submit(waiting)

    def _wait(self, messages: _Messages) -> dict[int, float]:
        """Returns when all have arrived, with the moment of each; raises with the worker that failed first."""
        started = time.perf_counter()
        if messages.arrivals:
            for finished in as_completed(messages.arrivals.values()):  # the others leave because of the first that fails
                finished.result()
            moments = {worker: arrival.result() for worker, arrival in messages.arrivals.items()}
        else:
            moments = {worker: self._wait_for(worker, messages.of(worker)) for worker in self._others}
        self._traffic.received = time.perf_counter()
        self._traffic.waiting_seconds += self._traffic.received - started
        return moments

    def _wait_for(self, worker: int, works: list[dist.Work]) -> float:
        """When the first of these was there."""
        first = math.nan
        for number, work in enumerate(works):
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise WorkerLostError([worker], _first_line(error)) from error
            if number == 0:
                first = time.perf_counter()
        return first


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
