"""Messages between workers: their header, and point-to-point transfers that name a lost worker."""

import math
import struct
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, as_completed
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.round import Traffic
from torchtitan_diloco.utils import cause_of


class WorkerLostError(RuntimeError):
    """One of these workers left, or was silent beyond the timeout."""

    def __init__(self, workers: list[int], reason: str) -> None:
        self.workers, self.reason = workers, reason
        names = " or ".join(map(str, workers))
        super().__init__(f"worker {names} left or did not answer in time ({reason})")


def transports(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend of a process group by type of device."""
    if group is None:
        return {}
    pairs = (part.partition(":") for part in str(dist.get_backend_config(group)).split(","))
    return {device: backend for device, _, backend in pairs}


# --- header ---------------------------------------------------------------------------------------

HEADER_BYTES = 64
MAGIC = b"SDLC"
VERSION = 1
_LAYOUT = struct.Struct("<4sHHQIIQdQ")

NOT_FINITE = 1
"""Flag: the sender's delta has a NaN or an infinity; its weight is 0."""
DROPPED = 2
"""Flag: the sender is left out of this round on purpose; its weight is 0."""


@dataclass(frozen=True)
class Header:
    flags: int
    run: int
    """Identifies the run and its settings: two runs on one process group do not mix."""
    fragment: int
    outer_round: int
    step: int
    """Inner step after which the delta was taken."""
    weight: float
    """Weight of the sender in the mean."""
    checksum: int
    """Checksum of the sender's shared copy of the fragment, which must be equal on all workers."""

    def pack(self) -> bytes:
        return _LAYOUT.pack(MAGIC, VERSION, *astuple(self)).ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def unpack(data: bytes) -> "Header":
        magic, version, *values = _LAYOUT.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise ValueError(
                f"a payload begins with {magic!r} version {version} instead of {MAGIC!r} version "
                f"{VERSION}: some worker runs other code"
            )
        return Header(*values)


def check_headers(headers: list[Header], mine: int) -> None:
    """Raise if a worker exchanges something else than this one."""
    own = headers[mine]
    expected = own.fragment, own.outer_round, own.step
    for worker, other in enumerate(headers):
        if other.run != own.run:
            raise ValueError(
                f"worker {worker} belongs to another run ({other.run:016x}) than worker {mine} "
                f"({own.run:016x}): start all workers with the same settings and their own group"
            )
        if (other.fragment, other.outer_round, other.step) != expected:
            raise ValueError(
                f"worker {worker} sent fragment {other.fragment} of outer round "
                f"{other.outer_round} (its step {other.step}) while worker {mine} sent fragment "
                f"{own.fragment} of outer round {own.outer_round} (its step {own.step}): the "
                "workers' schedules differ"
            )
        if other.checksum != own.checksum:
            raise ValueError(
                f"fragment {own.fragment} differs between workers before outer round "
                f"{own.outer_round}: its checksum is {other.checksum:016x} on worker {worker} and "
                f"{own.checksum:016x} on worker {mine}; restart from the last checkpoint"
            )


# --- transfers ------------------------------------------------------------------------------------

Parts = Iterable[tuple[int, Tensor]]
"""(other worker, buffer to send to it or to receive from it)."""
Operation = Callable[..., dist.Work | None]
"""dist.isend or dist.irecv."""


@dataclass
class Messages:
    """Messages in flight between this worker and the others for one purpose."""

    receives: list[dist.P2POp] = field(default_factory=list)
    """Receives that NCCL posts together with the sends."""
    works: dict[int, list[dist.Work]] = field(default_factory=dict)
    """By worker. Receives come first: their time must not depend on what this worker sends."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes to receive from each worker."""
    arrivals: "dict[int, Future[float]]" = field(default_factory=dict)
    """When they arrived, if threads wait for them."""


class Transport:
    """Sends and receives from one thread. Messages of one tag meet in the order they are posted.

    Receives are posted as early as possible: gloo announces them over the connection that carries
    what is sent, and behind a large message the two directions of a slow link would take turns.
    NCCL gets a send and its receive as one operation, as either alone would block the other side.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout_seconds: float, device: torch.device
    ) -> None:
        self.workers, self.me = group.size(), group.rank()
        self.others = [worker for worker in range(self.workers) if worker != self.me]
        self._group, self._timeout = group, timedelta(seconds=timeout_seconds)
        self._is_nccl = transports(group).get(device.type) == "nccl"
        self._waiters = {one: BackgroundThread(f"diloco-wait-{one}") for one in self.others}
        # Waiting for NCCL blocks the current stream, which must not be the one that trains.
        streams = self.others if self._is_nccl else []
        self._streams = {worker: torch.cuda.Stream(device) for worker in streams}
        self.begin()

    def begin(self) -> None:
        """Start counting for a new exchange."""
        self.traffic = Traffic(moments_are_known=not self._is_nccl or self.workers == 2)

    def receive(self, parts: Parts, tag: int = 0) -> Messages:
        """Post receives into buffers. Empty messages are not sent."""
        messages = Messages()
        for worker, buffer in parts:
            if buffer.numel():
                messages.sizes[worker] = buffer.numel()
                room = self._whole_buffer(buffer)
                messages.receives.append(self._operation(dist.irecv, worker, room, tag))
        if not self._is_nccl:
            self._post(messages, [])
        return messages

    def send(
        self, messages: Messages, parts: Parts, tag: int = 0, *, watched: bool = False
    ) -> None:
        """Send buffers in return for what `messages` receive.

        `watched`: threads wait for the arrivals, so that their moments are known. With more than
        two workers they always do, as the first to fail is the lost one.
        """
        operations = []
        for worker, buffer in parts:
            if buffer.numel():
                operations.append(self._operation(dist.isend, worker, buffer, tag))
                self.traffic.bytes_sent += buffer.numel()
        self._post(messages, operations)
        self.traffic.bytes_received += sum(messages.sizes.values())
        if watched or self.workers > 2:
            for worker, waiter in self._waiters.items():
                works = messages.works.get(worker, [])
                messages.arrivals[worker] = waiter.submit(partial(self._watch, worker, works))

    def wait(self, messages: Messages) -> dict[int, float]:
        """Wait for all messages and return when each worker's arrived, or raise WorkerLostError."""
        started = time.perf_counter()
        if messages.arrivals:
            for finished in as_completed(messages.arrivals.values()):
                finished.result()
            moments = {worker: arrival.result() for worker, arrival in messages.arrivals.items()}
        else:
            moments = {one: self._wait_for(one, messages.works.get(one, [])) for one in self.others}
        self.traffic.received = time.perf_counter()
        self.traffic.waiting_seconds += self.traffic.received - started
        return moments

    def close(self) -> None:
        for waiter in self._waiters.values():
            waiter.close(timeout=0.0)

    def _watch(self, worker: int, works: list[dist.Work]) -> float:
        with torch.cuda.stream(self._streams[worker]) if self._streams else nullcontext():
            return self._wait_for(worker, works)

    def _wait_for(self, worker: int, works: list[dist.Work]) -> float:
        """Return when the first was complete. NCCL does not know whom of a batch it lost."""
        first = math.nan
        for number, work in enumerate(works):
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                lost = self.others if self._is_nccl else [worker]
                raise WorkerLostError(lost, cause_of(error)) from error
            if number == 0:
                first = time.perf_counter()
        return first

    def _post(self, messages: Messages, sends: list[dist.P2POp]) -> None:
        """Post one by one with gloo, so that a failure names its worker, as one batch with NCCL."""
        operations, messages.receives = messages.receives + sends, []
        batches = [operations] if self._is_nccl else [[operation] for operation in operations]
        for batch in filter(None, batches):
            workers = [operation.group_peer for operation in batch]
            try:
                works = dist.batch_isend_irecv(batch)
            except RuntimeError as error:
                raise WorkerLostError(sorted(set(workers)), cause_of(error)) from error
            for number, worker in enumerate(workers):  # NCCL returns one work for the whole batch
                work = works[min(number, len(works) - 1)]
                messages.works.setdefault(worker, []).append(work)

    def _operation(self, kind: Operation, worker: int, buffer: Tensor, tag: int) -> dist.P2POp:
        return dist.P2POp(kind, buffer, group=self._group, tag=tag, group_peer=worker)

    def _whole_buffer(self, message: Tensor) -> Tensor:
        """Return all memory of the buffer, for a worker that sends more than expected.

        Gloo aborts the process on a message that does not fit, before its header can be checked.
        """
        if self._is_nccl:
            return message
        assert message.storage_offset() == 0, "the message would be written elsewhere"
        return message.as_strided((message.untyped_storage().nbytes(),), (1,), 0)
