"""The weighted mean of every worker's delta over the inter-worker group.

Every value is encoded once by its sender and averaged in fp32 in the order of the workers. All workers decode the same bytes,
their own included, so they end with the same bits. Two ways, by what they cost: with two workers each sends all it has to
the other (one hop); with more, each worker owns a slice, gets everybody's part of it, and sends the mean of it to all.

Messages go from worker to worker, not through collectives: when one is silent, it is known which. The headers go first,
then the delta in chunks, several of which are under way while others are encoded and decoded. On a CPU chunks are worked
on in pieces that stay in cache, and fp32 is sent from where it lies: the passes over memory are what a sync costs.
"""

import time
from collections.abc import Iterable
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.codecs import Codec
from torchtitan_diloco.diloco.codecs.base import UNIT
from torchtitan_diloco.diloco.header import HEADER_BYTES, Header, check_headers
from torchtitan_diloco.diloco.outer_optimizer import BLOCK

CHUNK = 16 * BLOCK
"""Values in one message (2 MB in fp32)."""
IN_FLIGHT = 2**23
"""Bytes in chunks under way at once: long links need as many as they carry in a round trip."""

assert BLOCK % UNIT == 0, "codecs can be fed in blocks"


class WorkerLostError(RuntimeError):
    """A worker left or was silent beyond the timeout."""

    def __init__(self, workers: list[int], reason: str) -> None:
        self.workers, self.reason = workers, reason
        names = " and ".join(map(str, workers))
        super().__init__(f"worker {names} left or did not answer in time ({reason})")


@dataclass
class Traffic:
    """What the buffers that were really sent and received add up to, and where the time went."""

    bytes_sent: int = 0
    bytes_received: int = 0
    coding_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """Of the exchange thread for other workers' messages."""


@dataclass
class _Messages:
    """What is under way for one chunk: (other worker, send to it or receive from it)."""

    works: list[tuple[int, dist.Work]] = field(default_factory=list)


class Exchange:
    """One at a time, in the same order on every worker, from one thread."""

    def __init__(
        self, group: dist.ProcessGroup, codec: Codec, *, largest: int, device: torch.device, timeout_seconds: float
    ) -> None:
        self.workers, self.me = group.size(), group.rank()
        assert self.workers > 1
        self.traffic = Traffic()
        self._failure: Exception | None = None
        self._group, self._codec = group, codec
        self._timeout = timedelta(seconds=timeout_seconds)
        self._chunk = min(CHUNK, max(1, largest))
        self._others = [worker for worker in range(self.workers) if worker != self.me]
        self._waiters = {worker: BackgroundThread(f"diloco-wait-{worker}") for worker in self._others}
        self._exact_sizes = dist.get_backend(group) == "nccl"
        self._window = max(1, min(-(-largest // self._chunk), IN_FLIGHT // codec.wire_bytes(self._chunk)))
        values = self._slice_size(self._chunk)
        pair = self.workers == 2

        def buffers(workers: Iterable[int], room: int) -> dict[int, Tensor]:
            return {worker: torch.zeros(room, dtype=torch.uint8, device=device) for worker in workers}

        def window(workers: Iterable[int]) -> list[dict[int, Tensor]]:
            """By slot of the window and worker."""
            return [buffers(workers, codec.wire_bytes(values)) for _ in range(self._window)]

        self._headers = buffers(range(self.workers), HEADER_BYTES)
        self._incoming = window(self._others)
        self._outgoing = window([] if codec.is_fp32 else [self.me] if pair else range(self.workers))
        self._means = window([] if pair else range(self.workers))
        self._mean = torch.zeros(0 if pair else values, dtype=torch.float32, device=device)
        self._piece = BLOCK if device.type == "cpu" else values
        self._running, self._decoded = torch.zeros(2, self._piece, dtype=torch.float32, device=device).unbind()

    def average(self, delta: Tensor, header: Header) -> list[Header]:
        """Turns `delta` into the mean over workers and returns everybody's header. With all weights 0 it becomes 0.
        After a failure there is no other exchange on this group: messages of the failed one may still be under way."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._average(delta, header)
        except Exception as error:
            self._failure = error
            raise

    def _average(self, delta: Tensor, header: Header) -> list[Header]:
        chunks = delta.split(self._chunk)
        greetings = self._send_header(header)
        headers: list[Header] = []
        first_hop: dict[int, _Messages] = {}
        second_hop: dict[int, _Messages] = {}
        last = self._window - 1
        middle = last if self.workers == 2 else self._window // 2
        for step in range(len(chunks) + last):  # every worker runs the same programme, so messages meet their receivers
            if step < len(chunks):
                first_hop[step] = self._send(step, chunks[step])
            if 0 <= step - middle < len(chunks):
                number = step - middle
                headers = headers or self._read_headers(greetings, header)
                self._wait(first_hop.pop(number))
                if self.workers == 2:
                    self._average_slice(number, headers, chunks[number], out=chunks[number])
                else:
                    second_hop[number] = self._send_mean(number, headers, chunks[number])
            if self.workers > 2 and 0 <= step - last < len(chunks):
                number = step - last
                self._wait(second_hop.pop(number))
                self._collect_means(number, chunks[number])
        return headers

    def take_traffic(self) -> Traffic:
        """What has been exchanged since the last call."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    # --- headers ---------------------------------------------------------------------------------------------------

    def _send_header(self, header: Header) -> _Messages:
        mine = self._headers[self.me].copy_(torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8))
        return self._post([(worker, mine, self._headers[worker]) for worker in self._others])

    def _read_headers(self, greetings: _Messages, header: Header) -> list[Header]:
        self._wait(greetings)
        headers = [
            header if worker == self.me else Header.unpack(received.cpu().numpy().tobytes())
            for worker, received in self._headers.items()
        ]
        check_headers(headers, self.me)
        return headers

    # --- the slices of a chunk, and their bytes ----------------------------------------------------------------------

    def _slice_size(self, values: int) -> int:
        """Values of a chunk that one worker averages: all of it with two workers, an equal part with more."""
        return values if self.workers == 2 else -(-values // self.workers)

    def _slice(self, chunk: Tensor, worker: int) -> Tensor:
        """The part of a chunk that a worker averages; the last ones may be short or empty."""
        if self.workers == 2:
            return chunk
        size = self._slice_size(chunk.numel())
        return chunk[min(worker * size, chunk.numel()) : (worker + 1) * size]

    def _encoded(self, slot: int, chunk: Tensor, worker: int) -> Tensor:
        """Where the bytes of a worker's slice of this worker's delta lie. With two workers both are sent the same."""
        part = self._slice(chunk, worker)
        if self._codec.is_fp32:
            return part.view(torch.uint8)
        return self._bytes_of(self._outgoing[slot][self.me if self.workers == 2 else worker], part)

    def _bytes_of(self, buffer: Tensor, values: Tensor) -> Tensor:
        """What of a buffer so many values fill."""
        return buffer[: self._codec.wire_bytes(values.numel())]

    def _cut(self, payload: Tensor) -> tuple[Tensor, ...]:
        """The bytes of one piece of values after the other."""
        pieces: tuple[Tensor, ...] = payload.split(self._codec.wire_bytes(self._piece))
        return pieces

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        for piece, encoded in zip(values.split(self._piece), self._cut(payload), strict=True):
            self._codec.encode(piece, encoded)

    # --- first hop: everybody's delta ------------------------------------------------------------------------------

    def _send(self, number: int, chunk: Tensor) -> _Messages:
        started = time.perf_counter()
        slot, own = number % self._window, self._slice(chunk, self.me)
        if not self._codec.is_fp32:
            for worker in [self.me] if self.workers == 2 else range(self.workers):
                self._encode(self._slice(chunk, worker), self._encoded(slot, chunk, worker))
        self.traffic.coding_seconds += time.perf_counter() - started
        return self._post(
            [
                (worker, self._encoded(slot, chunk, worker), self._bytes_of(self._incoming[slot][worker], own))
                for worker in self._others
            ]
        )

    def _average_slice(self, number: int, headers: list[Header], chunk: Tensor, *, out: Tensor) -> None:
        """The weighted mean of this worker's slice, in the order of the workers. A worker of weight 0 is passed over:
        its values may be anything."""
        started = time.perf_counter()
        slot = number % self._window
        heard = [(worker, header.weight) for worker, header in enumerate(headers) if header.weight > 0]
        payloads = [
            self._encoded(slot, chunk, worker) if worker == self.me else self._bytes_of(self._incoming[slot][worker], out)
            for worker, _ in heard
        ]
        if payloads:
            for piece, *encoded in zip(out.split(self._piece), *map(self._cut, payloads), strict=True):
                self._average_piece([weight for _, weight in heard], encoded, out=piece)
        else:
            out.zero_()
        self.traffic.coding_seconds += time.perf_counter() - started

    def _average_piece(self, weights: list[float], payloads: list[Tensor], *, out: Tensor) -> None:
        """A running mean: one pass over memory for each worker after the first. `out` may be where one of the payloads
        lies, so it is written last."""
        mean, total = self._decode(payloads[0], self._running[: out.numel()]), weights[0]
        for number, (weight, payload) in enumerate(zip(weights[1:], payloads[1:], strict=True), start=2):
            values, total = self._decode(payload, self._decoded[: out.numel()]), total + weight
            target = out if number == len(payloads) else self._running[: out.numel()]
            mean = torch.lerp(mean, values, weight / total, out=target)
        if len(payloads) == 1:
            out.copy_(mean)

    def _decode(self, payload: Tensor, room: Tensor) -> Tensor:
        """The values, in `room` unless they can be read where they are."""
        if self._codec.is_fp32:
            return payload.view(torch.float32)
        self._codec.decode(payload, room)
        return room

    # --- second hop: the means -------------------------------------------------------------------------------------

    def _send_mean(self, number: int, headers: list[Header], chunk: Tensor) -> _Messages:
        slot, own = number % self._window, self._slice(chunk, self.me)
        mean = self._mean[: own.numel()]
        self._average_slice(number, headers, chunk, out=mean)
        started = time.perf_counter()
        encoded = self._bytes_of(self._means[slot][self.me], own)
        self._encode(mean, encoded)
        self.traffic.coding_seconds += time.perf_counter() - started
        return self._post(
            [
                (worker, encoded, self._bytes_of(self._means[slot][worker], self._slice(chunk, worker)))
                for worker in self._others
            ]
        )

    def _collect_means(self, number: int, chunk: Tensor) -> None:
        started = time.perf_counter()
        slot = number % self._window
        for worker in range(self.workers):
            part = self._slice(chunk, worker)
            payload = self._bytes_of(self._means[slot][worker], part)
            for piece, encoded in zip(part.split(self._piece), self._cut(payload), strict=True):
                self._codec.decode(encoded, piece)
        self.traffic.coding_seconds += time.perf_counter() - started

    # --- messages --------------------------------------------------------------------------------------------------

    def _post(self, pairs: list[tuple[int, Tensor, Tensor]]) -> _Messages:
        """(other worker, what it gets, where what it sends goes); an empty message is not sent."""
        operations: list[dist.P2POp] = []
        others: list[int] = []
        for worker, sent, received in pairs:
            if sent.numel():
                operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=worker))
                others.append(worker)
            if received.numel():
                operations.append(dist.P2POp(dist.irecv, self._room_for(received), group=self._group, group_peer=worker))
                others.append(worker)
            self.traffic.bytes_sent += sent.numel()
            self.traffic.bytes_received += received.numel()
        if not operations:
            return _Messages()
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise WorkerLostError(sorted(set(others)), _first_line(error)) from error
        if len(works) == 1:  # NCCL makes one work of a batch
            works = works * len(others)
        return _Messages(list(zip(others, works, strict=True)))

    def _room_for(self, message: Tensor) -> Tensor:
        """All of the message's buffer. A worker with another schedule may send a larger message than is expected:
        gloo aborts the process over one that does not fit, before its header could be read and told."""
        if self._exact_sizes:
            return message
        return message.as_strided((message.untyped_storage().nbytes(),), (1,), 0)

    def _wait(self, messages: _Messages) -> None:
        """Returns when all have arrived; raises with the worker that failed first."""
        started = time.perf_counter()
        if len(self._others) == 1:
            self._wait_for(self._others[0], messages.works)
        else:  # for all at the same time: the first to fail is the one to blame, the others leave because of it
            waits = []
            for worker in self._others:
                works = [pair for pair in messages.works if pair[0] == worker]
                waits.append(self._waiters[worker].submit(partial(self._wait_for, worker, works)))
            for finished in as_completed(waits):
                finished.result()
        self.traffic.waiting_seconds += time.perf_counter() - started

    def _wait_for(self, worker: int, works: list[tuple[int, dist.Work]]) -> None:
        for _, work in works:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise WorkerLostError([worker], _first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
