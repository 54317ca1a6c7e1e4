"""The weighted mean of every worker's delta over the inter-worker group.

Every value is encoded once by its sender and summed in fp32 in the order of the workers. All workers decode the same bytes,
their own included, so they end with the same bits. Two ways, by what they cost: with two workers each sends all it has to
the other (one hop); with more, each worker owns a slice, gets everybody's part of it, and sends the mean of it to all.

Messages go from worker to worker, not through collectives: when one is silent, it is known which. A delta goes in chunks,
several of which are under way while others are encoded and decoded.
"""

import time
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.codecs import Codec
from torchtitan_diloco.diloco.header import HEADER_BYTES, Header, check_headers
from torchtitan_diloco.diloco.outer_optimizer import BLOCK

CHUNK = 16 * BLOCK
"""Values in one message (2 MB in fp32)."""
WINDOW = 4
"""Chunks under way at once: long links need several messages in flight to fill."""


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
        self._group, self._codec = group, codec
        self._timeout = timedelta(seconds=timeout_seconds)
        self._chunk = min(CHUNK, max(1, largest))
        self._others = [worker for worker in range(self.workers) if worker != self.me]
        self._waiters = {worker: BackgroundThread(f"diloco-wait-{worker}") for worker in self._others}
        self._room = HEADER_BYTES + codec.wire_bytes(self._slice_size(self._chunk))
        self._exact_sizes = dist.get_backend(group) != "gloo"

        def buffers() -> list[list[Tensor]]:
            """By slot of the window and worker."""
            empty = torch.zeros(WINDOW, self.workers, self._room, dtype=torch.uint8, device=device)
            return [list(slot.unbind()) for slot in empty.unbind()]

        self._outgoing, self._incoming = buffers(), buffers()
        self._means = buffers() if self.workers > 2 else []
        self._decoded = torch.zeros(self._slice_size(self._chunk), device=device)
        self._sum = torch.zeros_like(self._decoded)

    def average(self, delta: Tensor, header: Header) -> list[Header]:
        """Turns `delta` into the mean over workers and returns everybody's header. With all weights 0 it becomes 0."""
        chunks = [delta[start : start + self._chunk] for start in range(0, delta.numel(), self._chunk)] or [delta]
        first_hop: dict[int, _Messages] = {}
        second_hop: dict[int, _Messages] = {}
        headers: list[Header] = []
        last = WINDOW - 1
        middle = last if self.workers == 2 else WINDOW // 2
        for step in range(len(chunks) + last):  # every worker runs the same programme, so messages meet their receivers
            if step < len(chunks):
                first_hop[step] = self._send(step, chunks[step], header)
            if 0 <= step - middle < len(chunks):
                number = step - middle
                self._wait(first_hop.pop(number))
                headers = headers or self._read_headers(header)
                if self.workers == 2:
                    self._average_slice(number, headers, chunks[number])
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

    # --- the slices of a chunk -------------------------------------------------------------------------------------

    def _slice_size(self, values: int) -> int:
        """Values of a chunk that one worker averages: all of it with two workers, an equal part with more."""
        return values if self.workers == 2 else -(-values // self.workers)

    def _slice(self, chunk: Tensor, worker: int) -> Tensor:
        """The part of a chunk that a worker averages; the last ones may be short or empty."""
        if self.workers == 2:
            return chunk
        size = self._slice_size(chunk.numel())
        return chunk[min(worker * size, chunk.numel()) : (worker + 1) * size]

    def _message(self, buffer: Tensor, number: int, values: int) -> Tensor:
        """What of a buffer travels: the values, and in the first chunk the header before them."""
        end = HEADER_BYTES + self._codec.wire_bytes(values)
        return buffer[0 if number == 0 else HEADER_BYTES : end]

    def _values(self, buffer: Tensor, values: int) -> Tensor:
        return buffer[HEADER_BYTES : HEADER_BYTES + self._codec.wire_bytes(values)]

    # --- first hop: everybody's delta ------------------------------------------------------------------------------

    def _send(self, number: int, chunk: Tensor, header: Header) -> _Messages:
        started = time.perf_counter()
        slot = number % WINDOW
        packed = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8) if number == 0 else None
        pairs = []
        for worker in range(self.workers):
            if self.workers == 2 and worker != self.me:
                continue  # the other gets what this worker has encoded for itself
            part, buffer = self._slice(chunk, worker), self._outgoing[slot][worker]
            self._codec.encode(part, self._values(buffer, part.numel()))
            if packed is not None:
                buffer[:HEADER_BYTES].copy_(packed)
        own = self._slice(chunk, self.me).numel()
        for worker in self._others:
            source = self._outgoing[slot][self.me if self.workers == 2 else worker]
            sent = self._message(source, number, self._slice(chunk, worker).numel())
            pairs.append((worker, sent, self._message(self._incoming[slot][worker], number, own)))
        self.traffic.coding_seconds += time.perf_counter() - started
        return self._post(pairs)

    def _read_headers(self, header: Header) -> list[Header]:
        headers = [
            header if worker == self.me else Header.unpack(self._incoming[0][worker][:HEADER_BYTES].cpu().numpy().tobytes())
            for worker in range(self.workers)
        ]
        check_headers(headers, self.me)
        return headers

    def _average_slice(self, number: int, headers: list[Header], out: Tensor) -> None:
        """The weighted mean of this worker's slice, in the order of the workers. A worker of weight 0 is passed over:
        its values may be anything."""
        started = time.perf_counter()
        slot = number % WINDOW
        out.zero_()
        total = sum(header.weight for header in headers)
        decoded = self._decoded[: out.numel()]
        for worker, header in enumerate(headers):
            if header.weight > 0:
                buffer = self._outgoing[slot][worker] if worker == self.me else self._incoming[slot][worker]
                self._codec.decode(self._values(buffer, out.numel()), decoded)
                out.add_(decoded, alpha=header.weight / total)
        self.traffic.coding_seconds += time.perf_counter() - started

    # --- second hop: the means -------------------------------------------------------------------------------------

    def _send_mean(self, number: int, headers: list[Header], chunk: Tensor) -> _Messages:
        slot = number % WINDOW
        own = self._slice(chunk, self.me).numel()
        mean = self._sum[:own]
        self._average_slice(number, headers, mean)
        started = time.perf_counter()
        encoded = self._values(self._means[slot][self.me], own)
        self._codec.encode(mean, encoded)
        self.traffic.coding_seconds += time.perf_counter() - started
        return self._post(
            [
                (worker, encoded, self._values(self._means[slot][worker], self._slice(chunk, worker).numel()))
                for worker in self._others
            ]
        )

    def _collect_means(self, number: int, chunk: Tensor) -> None:
        started = time.perf_counter()
        slot = number % WINDOW
        for worker in range(self.workers):
            part = self._slice(chunk, worker)
            self._codec.decode(self._values(self._means[slot][worker], part.numel()), part)
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
        """The message's buffer to its end. A worker with another schedule may send a larger message than is expected:
        gloo aborts the process over one that does not fit, before its header could be read and told."""
        if self._exact_sizes:
            return message
        rest = self._room - message.storage_offset() % self._room  # buffers of this size lie one after the other
        return message.as_strided((rest,), (1,))

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
