"""Detection of dead ranks within two seconds, and of ranks that hang.

When a peer dies, gloo fails a receive at once only if no byte has arrived: a payload in transfer
hangs until its timeout. Therefore, a receive from each peer is posted on a separate group, for
messages without payloads. A daemon thread answers there even if training hangs.
"""

import atexit
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from torchtitan_diloco.base.hardware import memory_kills
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.messages import TransferError, transfers
from torchtitan_diloco.base.user import cause_of
from torchtitan_diloco.diloco.transport import WorkerLostError

Result = TypeVar("Result")
FOREVER = timedelta(days=3650)
LATE_SECONDS = 10.0
"""Seconds of waiting for a worker after which the log names it. Each further message takes twice as
long."""
SETTLE_SECONDS = 0.5
"""Seconds from a failed exchange to the error: the listeners may know an earlier cause."""
LAST_SECONDS = 1.0
"""Seconds for which a rank that leaves waits for the others' goodbyes."""
ANSWER_SECONDS = 2.0
"""Seconds to wait for an answer."""


class Message(IntEnum):
    """Message between ranks, with their steps and the milliseconds since the last step."""

    GOODBYE = 0
    QUESTION = 1
    ANSWER = 2
    ANSWER_IN_A_WAIT = 3
    """The rank is itself waiting for others."""


class Answer(NamedTuple):
    steps: int
    seconds: float
    """Seconds since the last step."""
    waits: bool
    """Whether the rank is itself waiting for others."""


class Liveness:
    """Watches other ranks, with a daemon thread for each."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        workers: Sequence[int] = (),
        peers: Collection[int] = (),
    ) -> None:
        """Start the threads.

        Args:
            group: a gloo group that nothing else uses. None: no peers.
            workers: the worker of each rank of the group. Default: each rank is a worker.
            peers: ranks of the group to watch, which also watch this one. Default: all others.
        """
        size = 1 if group is None else group.size()
        rank = 0 if group is None else group.rank()
        self._group = group
        self._workers = list(workers) or list(range(size))
        self._peers = sorted(peers) or [peer for peer in range(size) if peer != rank]
        self.speaks = self._workers.index(self._workers[rank]) == rank
        """Whether this rank is the first one of its worker, which logs what all of them see."""
        self.others = sorted({self._workers[peer] for peer in self._peers} - {self._workers[rank]})
        """Other workers with ranks to watch."""
        self._memory_kills = memory_kills()
        self._steps = 0  # of this rank, for messages
        self._stepped = time.perf_counter()  # the time of the last of them
        self._awaited: Future[Any] | torch.futures.Future[Any] | None = None
        self._lost: dict[int, str] = {}  # the rank that was lost first, with the reason
        self._ended: dict[int, int] = {}  # steps of the ranks that have said goodbye
        self._answers: dict[int, Answer] = {}
        self._goodbyes = set[int]()  # peers that this rank has said goodbye to
        self._sent: list[object] = []  # as gloo needs the messages until they are read
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in self._peers
        ]
        for thread in self._threads:
            thread.start()
        if self._peers:
            atexit.register(self.close)

    @staticmethod
    def between(group: dist.ProcessGroup | None) -> "Liveness":
        """Watch the ranks of a group over a new gloo group. Collective."""
        if group is None or group.size() == 1:
            return Liveness(None)
        ranks = dist.get_process_group_ranks(group)
        return Liveness(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))

    def close(self) -> None:
        """Say goodbye, so that peers do not report a death, and end the threads."""
        atexit.unregister(self.close)
        with self._changed:
            for rank in self._peers:
                self._say_goodbye(rank)
        deadline = time.perf_counter() + LAST_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.perf_counter()))

    def finish_step(self, steps: int) -> None:
        """Note that this rank has completed so many steps in all."""
        self._steps = steps
        self._stepped = time.perf_counter()

    def ask(self, workers: Collection[int]) -> dict[int, Answer]:
        """Ask the ranks of these workers for their steps. Ranks that do not answer are omitted."""
        peer_of = {self._workers[rank]: rank for rank in reversed(self._peers)}
        asked = {worker: peer_of[worker] for worker in workers if worker in peer_of}
        with self._changed:
            for rank in asked.values():
                self._answers.pop(rank, None)
                self._say(rank, Message.QUESTION)
            ranks = set(asked.values())
            self._changed.wait_for(
                lambda: self._answers.keys() >= ranks or self._gone(), ANSWER_SECONDS
            )
            known = {worker: self._answers.get(rank) for worker, rank in asked.items()}
        return {worker: answer for worker, answer in known.items() if answer is not None}

    @property
    def is_lost(self) -> bool:
        return bool(self._lost)

    def check(self, where: str) -> None:
        """Raise WorkerLostError if a worker is lost. `where` is appended to the reason."""
        if gone := self._gone():
            raise WorkerLostError(gone.workers, f"{gone.reason}; {where}")

    def lost_ranks(self, step: int = 0) -> dict[int, str]:
        """Return the rank that was lost first, with the reason, after a failure elsewhere."""
        with self._changed:
            self._changed.wait_for(lambda: self._gone(step), SETTLE_SECONDS)
        return self._lost

    def wait(
        self,
        result: "Future[Result]",
        step: int = 0,
        where: str = "",
        onlooker: Callable[[float], None] | None = None,
    ) -> Result:
        """Return the result of a task of all workers, or raise WorkerLostError.

        `step`: the step that the task follows. `where` is appended to the reason. `onlooker` is
        called with the seconds of a long wait, without a lock: peers are answered even if it hangs.
        """
        try:
            self.wait_for(result, step, onlooker=onlooker)
            return result.result()
        except WorkerLostError as error:
            self.lost_ranks(step)
            first = self._gone(step) or error
            raise WorkerLostError(first.workers, f"{first.reason}; {where}") from error

    def wait_for(
        self,
        result: "Future[Any] | torch.futures.Future[Any]",
        step: int = 0,
        onlooker: Callable[[float], None] | None = None,
    ) -> None:
        """Wait for a future. Raise WorkerLostError if a worker is lost, or has left too early."""

        def notify(_: object) -> None:
            with self._changed:
                self._changed.notify_all()

        result.add_done_callback(notify)
        started = time.perf_counter()
        seconds = LATE_SECONDS
        self._awaited = result
        try:
            while not self._is_over(result, step, started + seconds):
                if onlooker is not None:
                    onlooker(seconds)
                seconds *= 2
        finally:
            self._awaited = None
        if not result.done() and (gone := self._gone(step)):
            raise gone

    def _is_over(
        self, result: "Future[Any] | torch.futures.Future[Any]", step: int, deadline: float
    ) -> bool:
        """Wait until the result is there or its worker is gone. Return False at the deadline."""
        with self._changed:
            return self._changed.wait_for(
                lambda: result.done() or self._gone(step) is not None,
                deadline - time.perf_counter(),
            )

    def _gone(self, step: int = 0) -> WorkerLostError | None:
        """Return the error if a rank is lost, or has left before this step."""
        for rank, reason in self._lost.items():
            return WorkerLostError([self._workers[rank]], reason)
        for rank, steps in self._ended.items():
            if steps < step:
                why = f"it ended after its step {steps}, and this one is at {self._steps}"
                why += "; call step() equally often on all workers"
                return WorkerLostError([self._workers[rank]], why)
        return None

    def _listen(self, rank: int) -> None:
        """Answer the questions of a peer until its goodbye, or its death."""
        assert self._group is not None
        try:
            while rank not in self._ended:
                received = torch.zeros(3, dtype=torch.int64)
                with transfers():
                    self._group.recv([received], rank, 0).wait(FOREVER)
                kind = Message(int(received[0]))
                steps, milliseconds = received[1:].tolist()
                with self._changed:
                    if kind is Message.GOODBYE:
                        self._ended[rank] = steps
                        self._say_goodbye(rank)
                    elif kind is Message.QUESTION:
                        self._say(rank, self._answer())
                    else:
                        waits = kind is Message.ANSWER_IN_A_WAIT
                        self._answers[rank] = Answer(steps, milliseconds / 1000, waits)
                    self._changed.notify_all()
        except TransferError as error:
            reason = cause_of(error)
            if memory_kills() > self._memory_kills:
                reason = f"memory has run out on this machine; {reason}"
            with self._changed:
                is_first = not self._lost
                if is_first:
                    self._lost = {rank: reason}
                self._changed.notify_all()
            if is_first and self.speaks:  # now, as the training thread may be in a step or save
                logger.warning(str(self._gone()))

    def _answer(self) -> Message:
        awaited = self._awaited
        if awaited is None or awaited.done():  # it may still write a line about the wait
            return Message.ANSWER
        return Message.ANSWER_IN_A_WAIT

    def _say_goodbye(self, rank: int) -> None:
        if rank not in self._goodbyes:
            self._goodbyes.add(rank)
            self._say(rank, Message.GOODBYE)

    def _say(self, rank: int, kind: Message) -> None:
        if self._group is None or rank in self._lost:
            return
        milliseconds = int(1000 * (time.perf_counter() - self._stepped))
        message = torch.tensor([kind, self._steps, milliseconds])
        with suppress(RuntimeError):  # the receive fails as well
            self._sent.append((self._group.send([message], rank, 0), message))
