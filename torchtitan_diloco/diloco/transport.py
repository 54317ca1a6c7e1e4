"""Headers of messages between workers, and point-to-point transfers that detect lost workers."""

import dataclasses
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.base.background import BackgroundThread
from torchtitan_diloco.base.messages import TransferError, transfers
from torchtitan_diloco.base.user import PeersLostError, UserError, cause_of
from torchtitan_diloco.diloco.round import Traffic
from torchtitan_diloco.diloco.vitals import NOTHING_SAID, Vitals


class WorkerLostError(PeersLostError):
    """One of these workers left or timed out."""

    def __init__(self, workers: list[int], reason: str) -> None:
        self.workers = workers
        self.reason = reason
        names = " or ".join(map(str, workers))
        super().__init__(f"worker {names} left or did not answer in time ({reason})")


# --- header ---------------------------------------------------------------------------------------

MAGIC = b"SDLC"
VERSION = 6
_LAYOUT = struct.Struct("<4sHHQIIQdQ6e4x")
MOST_SECONDS = 60_000.0  # in a float of 16 bits


def header_bytes(workers: int) -> int:
    return _LAYOUT.size + 2 * workers


@dataclass(frozen=True)
class Header:
    flags: int
    run: int
    """Identifies the run and its settings, to detect two runs on one process group."""
    fragment: int
    outer_round: int
    step: int  # inner step after which the delta was taken
    weight: float  # of the sender in the mean, if it has no flags
    checksum: int
    """Checksum of the sender's shared copy, which must be equal on all workers."""
    vitals: Vitals = NOTHING_SAID

    def pack(self) -> bytes:
        *fields, vitals = (getattr(self, field.name) for field in dataclasses.fields(self))
        *times, transfers = vitals
        times = [min(seconds, MOST_SECONDS) for seconds in times]
        links = [min(seconds, MOST_SECONDS) for seconds in transfers]
        head = _LAYOUT.pack(MAGIC, VERSION, *fields, *times)
        return head + struct.pack(f"<{len(links)}e", *links)

    @staticmethod
    def unpack(data: bytes) -> "Header":
        magic, version, *values = _LAYOUT.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise UserError(
                f"a payload starts with {magic!r} version {version} instead of "
                f"{MAGIC!r} version {VERSION}: a worker runs different code, so "
                "install the same commit on all machines"
            )
        size = len(Vitals._fields) - 1
        links = struct.unpack_from(f"<{(len(data) - _LAYOUT.size) // 2}e", data, _LAYOUT.size)
        fields: list[Any] = [*values[:-size], Vitals._make([*values[-size:], links])]
        return Header(*fields)


def check_headers(headers: list[Header], mine: int) -> None:
    """Raise if workers differ in run, fragment, round or shared copy."""
    header = headers[mine]
    expected = header.fragment, header.outer_round, header.step
    for worker, other in enumerate(headers):
        if other.run != header.run:
            raise UserError(
                f"worker {worker} belongs to a different run ({other.run:016x}) "
                f"than worker {mine} ({header.run:016x}): start all workers with the "
                "same settings, and give each run its own group"
            )
        if (other.fragment, other.outer_round, other.step) != expected:
            raise UserError(
                f"worker {worker} sent fragment {other.fragment} of outer round "
                f"{other.outer_round} (its step {other.step}) while worker {mine} sent fragment "
                f"{header.fragment} of outer round {header.outer_round} (its step {header.step}): "
                "the workers' schedules differ"
            )
    checksums = [other.checksum for other in headers]
    [(usual, count), *others] = Counter(checksums).most_common()
    if not others:
        return
    odd = [f"worker {worker}" for worker, checksum in enumerate(checksums) if checksum != usual]
    culprit = f"{' and '.join(odd)} differs from the {count} others"
    if 2 * count <= len(headers):
        culprit = "it is unknown which worker is right"
    each = [f"{checksum:016x} on worker {worker}" for worker, checksum in enumerate(checksums)]
    raise UserError(
        f"fragment {header.fragment} has different bits on some workers before outer round "
        f"{header.outer_round}: {culprit} (checksums: {', '.join(each)}); test the memory there, "
        "and restart from the last checkpoint"
    )


# --- transfers ------------------------------------------------------------------------------------

Parts = Iterable[tuple[int, Tensor]]
"""(other worker, buffer in host memory to send or to receive into)."""


@dataclass
class Bytes:
    """Encoded bytes on the device of the codec, with a pinned copy for gloo if that is a GPU."""

    local: Tensor
    pinned: Tensor | None = None

    @property
    def host(self) -> Tensor:
        """Memory that gloo sends from and receives into."""
        return self.local if self.pinned is None else self.pinned

    def part(self, start: int, end: int) -> "Bytes":
        pinned = None if self.pinned is None else self.pinned[start:end]
        return Bytes(self.local[start:end], pinned)

    def download(self) -> None:
        """Queue a copy to the host."""
        if self.pinned is not None:
            self.pinned.copy_(self.local, non_blocking=True)

    def upload(self) -> None:
        """Queue a copy from the host."""
        if self.pinned is not None:
            self.local.copy_(self.pinned, non_blocking=True)


@dataclass
class Messages:
    """Messages in flight between this worker and the others, by worker."""

    works: dict[int, list[dist.Work]] = field(default_factory=dict)
    """Receives come first, so that their time does not depend on sends."""
    sizes: dict[int, int] = field(default_factory=dict)  # bytes to receive
    arrivals: "dict[int, Future[float]]" = field(default_factory=dict)
    """Times of arrival, recorded if threads wait for them."""


@dataclass
class Arrivals:
    """Messages that have arrived in an exchange so far. Threads write this: copy it before a
    loop."""

    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of the awaited messages, by sender."""
    are_means: bool = False
    """Whether these are the messages of the second hop."""
    pending: dict[int, bool] = field(default_factory=dict)
    """Workers for which the exchange waits, and whether to receive from them."""
    latest: dict[int, float] = field(default_factory=dict)
    """Time of arrival of the latest message of each worker."""


class Transport:
    """Sends and receives over gloo, from one thread. Messages of one tag match in order.

    Receives are posted as early as possible. Gloo announces them over the connection of the sends;
    after a large message, the two directions of a slow link would alternate.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self.workers = group.size()
        self.me = group.rank()
        self.others = [worker for worker in range(self.workers) if worker != self.me]
        self._group = group
        self._timeout = timedelta(seconds=timeout_seconds)
        self._waiters = {
            worker: BackgroundThread(f"diloco-wait-{worker}") for worker in self.others
        }
        self.start(Traffic())

    def start(self, traffic: Traffic) -> None:
        """Begin an exchange, which is measured in `traffic`."""
        self.traffic = traffic
        self.arrivals = Arrivals()

    def receive(self, parts: Parts, tag: int = 0) -> Messages:
        """Post receives into buffers, skipping empty ones."""
        messages = Messages()
        for worker, buffer in parts:
            if buffer.numel():
                messages.sizes[worker] = buffer.numel()
                # Receive into the whole storage, as a worker may send more than expected: gloo
                # aborts the process if a message does not fit, before headers can be checked.
                assert buffer.storage_offset() == 0, "the message would be written elsewhere"
                whole = buffer.as_strided((buffer.untyped_storage().nbytes(),), (1,), 0)
                start = partial(dist.irecv, whole, group_src=worker)
                self._post(messages, worker, start=start, tag=tag)
        return messages

    def send(
        self, messages: Messages, parts: Parts, tag: int = 0, *, watched: bool = False
    ) -> None:
        """Send buffers, and add them to the receives in `messages`.

        `watched`: let threads wait for the arrivals to record their times. With more than two
        workers they always do, as the first transfer to fail names the lost worker.
        """
        for worker, buffer in parts:
            if buffer.numel():
                start = partial(dist.isend, buffer, group_dst=worker)
                self._post(messages, worker, start=start, tag=tag)
                self.traffic.bytes_sent += buffer.numel()
        self.traffic.bytes_received += sum(messages.sizes.values())
        if watched or self.workers > 2:
            for worker, waiter in self._waiters.items():
                messages.arrivals[worker] = waiter.submit(partial(self._wait_for, worker, messages))

    def wait(self, messages: Messages, *, are_means: bool = False) -> dict[int, float]:
        """Wait for all messages and return their times of arrival, or raise WorkerLostError."""
        started = time.perf_counter()
        self.arrivals.sizes = messages.sizes
        self.arrivals.are_means = are_means
        if messages.arrivals:
            for finished in as_completed(messages.arrivals.values()):
                finished.result()
            moments = {worker: arrival.result() for worker, arrival in messages.arrivals.items()}
        else:
            moments = {worker: self._wait_for(worker, messages) for worker in self.others}
        self.traffic.received = time.perf_counter()
        self.traffic.waiting_seconds += self.traffic.received - started
        return moments

    def close(self) -> None:
        for waiter in self._waiters.values():
            waiter.close(timeout=0.0)

    def _wait_for(self, worker: int, messages: Messages) -> float:
        """Wait for all messages of a worker and return when the first was complete."""
        first = math.nan
        arrivals = self.arrivals
        arrivals.pending[worker] = worker in messages.sizes
        for number, work in enumerate(messages.works.get(worker, [])):
            try:
                with transfers():
                    work.wait(self._timeout)
            except TransferError as error:
                raise WorkerLostError([worker], cause_of(error)) from error
            if number == 0:
                first = time.perf_counter()
                arrivals.latest[worker] = first
                arrivals.pending[worker] = False
        arrivals.pending.pop(worker, None)
        return first

    def _post(
        self, messages: Messages, worker: int, *, start: Callable[..., dist.Work | None], tag: int
    ) -> None:
        """Start a transfer, and add it to the messages of a worker."""
        try:
            with transfers():
                work = start(group=self._group, tag=tag)
        except TransferError as error:
            raise WorkerLostError([worker], cause_of(error)) from error
        assert work is not None, "this rank is in the group"
        messages.works.setdefault(worker, []).append(work)
