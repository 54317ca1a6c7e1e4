"""Messages between workers: sent, received, waited for, and every failure with the name of the worker behind it."""

import math
import time
from collections.abc import Iterable
from concurrent.futures import Future, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.round import Traffic
from torchtitan_diloco.diloco.transport import transports
from torchtitan_diloco.utils import cause_of

Parts = Iterable[tuple[int, Tensor]]
"""(other worker, what it gets, or where what it sends goes)."""


class WorkerLostError(RuntimeError):
    """A worker left or was silent beyond the timeout: one of these."""

    def __init__(self, workers: list[int], reason: str) -> None:
        self.workers, self.reason = workers, reason
        names = " or ".join(map(str, workers))
        super().__init__(f"worker {names} left or did not answer in time ({reason})")


@dataclass
class Messages:
    """What is under way between this worker and the others for one thing."""

    received: list[tuple[int, dist.Work]] = field(default_factory=list)
    sent: list[tuple[int, dist.Work]] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes that come from a worker."""
    arrivals: "dict[int, Future[float]]" = field(default_factory=dict)
    """When they came, told by the threads that look after one worker each."""
    held: list[tuple[int, dist.P2POp]] = field(default_factory=list)
    """Receives that are posted together with what is sent."""

    def of(self, worker: int) -> list[dist.Work]:
        """What is received stands first: how long it took must not depend on what this worker sends."""
        return [work for other, work in self.received + self.sent if other == worker]


class Messenger:
    """From one thread. Messages between two workers meet in the order in which they are posted, those of a tag for themselves.

    Receives are posted as early as there is room. Gloo tells the other side that there is over the connection that carries
    what is sent: behind a large message the two directions of a slow link would take turns. NCCL makes a send and a receive
    one operation, as either alone would keep the other side's stream waiting.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout_seconds: float, device: torch.device
    ) -> None:
        self.workers, self.me = group.size(), group.rank()
        self.others = [worker for worker in range(self.workers) if worker != self.me]
        self.traffic = Traffic()
        self._group, self._timeout = group, timedelta(seconds=timeout_seconds)
        self._waiters = {
            worker: BackgroundThread(f"diloco-wait-{worker}") for worker in self.others
        }
        self._is_nccl = transports(group).get(device.type) == "nccl"
        # To wait for NCCL is to make the current stream wait, too: of another thread that is the one that trains.
        self._streams = (
            {worker: torch.cuda.Stream(device) for worker in self.others} if self._is_nccl else {}
        )

    def begin(self) -> None:
        """A new exchange."""
        self.traffic = Traffic(moments_are_known=not self._is_nccl or self.workers == 2)

    def expect(self, parts: Parts, tag: int = 0) -> Messages:
        """Where messages go when they come; an empty one is not sent."""
        messages, operations = Messages(), []
        for worker, buffer in parts:
            if buffer.numel():
                messages.sizes[worker] = buffer.numel()
                room = self._room_for(buffer)
                operations.append(
                    (
                        worker,
                        dist.P2POp(dist.irecv, room, group=self._group, tag=tag, group_peer=worker),
                    )
                )
        if self._is_nccl:
            messages.held = operations
        else:
            messages.received = self._post(operations)
        return messages

    def send(self, messages: Messages, parts: Parts, tag: int = 0) -> None:
        """What goes to the others in return for `messages`; an empty part is not sent."""
        operations = []
        for worker, buffer in parts:
            if buffer.numel():
                operations.append(
                    (
                        worker,
                        dist.P2POp(
                            dist.isend, buffer, group=self._group, tag=tag, group_peer=worker
                        ),
                    )
                )
                self.traffic.bytes_sent += buffer.numel()
        held, messages.held = messages.held, []
        works = self._post(held + operations)
        messages.received += works[: len(held)]
        messages.sent += works[len(held) :]
        self.traffic.bytes_received += sum(messages.sizes.values())
        if self.workers > 2:
            self.watch(messages)

    def watch(self, messages: Messages) -> None:
        """From now on threads wait for these, one thread for each worker, so that the moments are known."""
        if not messages.arrivals:
            for worker in self.others:
                waiting = partial(self._wait_aside, worker, messages.of(worker))
                messages.arrivals[worker] = self._waiters[worker].submit(waiting)

    def wait(self, messages: Messages) -> dict[int, float]:
        """Returns when all have arrived, with the moment of each; raises with the worker that failed first."""
        started = time.perf_counter()
        if messages.arrivals:
            for finished in as_completed(
                messages.arrivals.values()
            ):  # the others leave because of the first that fails
                finished.result()
            moments = {worker: arrival.result() for worker, arrival in messages.arrivals.items()}
        else:
            moments = {
                worker: self._wait_for(worker, messages.of(worker)) for worker in self.others
            }
        self.traffic.received = time.perf_counter()
        self.traffic.waiting_seconds += self.traffic.received - started
        return moments

    def close(self) -> None:
        """Ends the threads that wait for nothing."""
        for waiter in self._waiters.values():
            waiter.close(timeout=0.0)

    def _wait_aside(self, worker: int, works: list[dist.Work]) -> float:
        with torch.cuda.stream(self._streams[worker]) if worker in self._streams else nullcontext():
            return self._wait_for(worker, works)

    def _wait_for(self, worker: int, works: list[dist.Work]) -> float:
        """When the first of these was there. NCCL makes one of a batch, and does not know which of several others was lost."""
        first = math.nan
        for number, work in enumerate(works):
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise WorkerLostError(
                    self.others if self._is_nccl else [worker], cause_of(error)
                ) from error
            if number == 0:
                first = time.perf_counter()
        return first

    def _post(self, operations: list[tuple[int, dist.P2POp]]) -> list[tuple[int, dist.Work]]:
        """NCCL makes one work of a batch. Gloo's are posted one by one: the first that fails is the lost worker's."""
        if not operations:
            return []
        batches = [operations] if self._is_nccl else [[operation] for operation in operations]
        works: list[tuple[int, dist.Work]] = []
        for batch in batches:
            try:
                posted = dist.batch_isend_irecv([operation for _, operation in batch])
            except RuntimeError as error:
                raise WorkerLostError(
                    sorted({worker for worker, _ in batch}), cause_of(error)
                ) from error
            works += [
                (worker, posted[min(number, len(posted) - 1)])
                for number, (worker, _) in enumerate(batch)
            ]
        return works

    def _room_for(self, message: Tensor) -> Tensor:
        """All of the message's buffer. A worker with another schedule may send a larger message than is expected:
        gloo aborts the process over one that does not fit, before its header could be read and told."""
        if self._is_nccl:
            return message
        assert message.storage_offset() == 0, "or it would be written elsewhere"
        return message.as_strided((message.untyped_storage().nbytes(),), (1,), 0)
