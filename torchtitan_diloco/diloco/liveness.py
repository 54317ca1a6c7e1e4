"""Detection of dead ranks within two seconds.

When a peer dies, gloo fails a receive at once only if no byte has arrived: a payload in transfer
hangs until its timeout. So a receive from every peer is posted on a group of its own, where the
only message is a goodbye.
"""

import atexit
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.log import cause_of, logger

Result = TypeVar("Result")
FOREVER = timedelta(days=3650)
LATE_SECONDS = 10.0
"""Wait for another worker after which the log names it. Each further report takes twice as long."""
SETTLE_SECONDS = 0.5
"""From a failed exchange to the error: the listeners may know an earlier cause."""
LAST_SECONDS = 1.0
"""For which a rank that leaves waits for the others' goodbyes."""


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
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        self._group, self._workers = group, list(workers) or list(range(size))
        self._peers = sorted(peers) or [one for one in range(size) if one != rank]
        self._speaks = self._workers.index(self._workers[rank]) == rank
        self._others = sorted({self._workers[one] for one in self._peers} - {self._workers[rank]})
        self.steps = 0
        """Of this rank, for messages."""
        self.describe_late: Callable[[], str] = str
        """Describes the workers that an exchange waits for, if there is one and they are known."""
        self._lost: dict[int, str] = {}  # the rank that was lost first, with the reason
        self._ended: dict[int, int] = {}  # steps of the ranks that have said goodbye
        self._goodbyes: dict[int, object] = {}  # sent by this rank; gloo needs them until then
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._listen, args=(one,), daemon=True) for one in self._peers
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

    def wait(self, result: "Future[Result]", step: int = 0, where: str = "") -> Result:
        """Return the result of a task of all workers, or raise WorkerLostError.

        `step`: the step that the task follows. `where` is appended to the reason.
        """
        try:
            self.wait_for(result, step)
            return result.result()
        except WorkerLostError as error:
            self.lost_ranks(step)
            first = self._gone(step) or error
            raise WorkerLostError(first.workers, f"{first.reason}; {where}") from error

    def wait_for(self, result: "Future[Any] | torch.futures.Future[Any]", step: int = 0) -> None:
        """Wait for a future. Raise WorkerLostError if a worker is lost, or has left too early."""

        def notify(_: object) -> None:
            with self._changed:
                self._changed.notify_all()

        result.add_done_callback(notify)
        started, seconds = time.perf_counter(), LATE_SECONDS
        with self._changed:
            while not self._changed.wait_for(
                lambda: result.done() or self._gone(step),
                started + seconds - time.perf_counter(),
            ):
                if self._speaks:
                    others = f"worker {' or '.join(map(str, self._others))}"
                    late = self.describe_late() or others
                    logger.warning(f"waiting since {seconds:.0f} s for {late}")
                seconds *= 2
            if not result.done() and (gone := self._gone(step)):
                raise gone

    def _gone(self, step: int = 0) -> WorkerLostError | None:
        """Return the error if a rank is lost, or has left before this step."""
        for rank, reason in self._lost.items():
            return WorkerLostError([self._workers[rank]], reason)
        for rank, steps in self._ended.items():
            if steps < step:
                why = f"it ended after its step {steps}, and this one is at {self.steps}"
                why += "; call step() equally often on all workers"
                return WorkerLostError([self._workers[rank]], why)
        return None

    def _listen(self, rank: int) -> None:
        """Wait for the goodbye of a peer, or its death."""
        assert self._group is not None
        steps = torch.zeros(1, dtype=torch.int64)
        try:
            self._group.recv([steps], rank, 0).wait(FOREVER)
        except RuntimeError as error:
            with self._changed:
                is_first, self._lost = not self._lost, self._lost or {rank: cause_of(error)}
                self._changed.notify_all()
            if is_first and self._speaks:  # now, as the training thread may be in a step or save
                logger.warning(str(self._gone()))
        else:
            with self._changed:
                self._ended[rank] = int(steps)
                self._say_goodbye(rank)
                self._changed.notify_all()

    def _say_goodbye(self, rank: int) -> None:
        if self._group is None or rank in self._goodbyes or rank in self._lost:
            return
        steps = torch.tensor([self.steps])
        with suppress(RuntimeError):  # the receive fails as well
            self._goodbyes[rank] = self._group.send([steps], rank, 0), steps
