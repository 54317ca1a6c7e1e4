"""Detection of dead ranks within two seconds, and of silent or slow ones after ten.

When a peer dies, gloo fails a receive at once only if no byte has arrived: a payload in transfer
hangs until its timeout. So heartbeats go over a group of their own, where a receive is always
posted for every peer. A rank that loses a peer tells the others before it exits, so that all report
the first cause and not its consequences.
"""

import atexit
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtitan_diloco.diloco.heartbeat import (
    BEAT,
    GOODBYE,
    HANGS,
    LOST,
    MESSAGE_BYTES,
    Message,
    OwnClock,
    Pace,
    Peer,
)
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.utils import cause_of, logger

Result = TypeVar("Result")
FOREVER = timedelta(days=3650)
LAST_SECONDS = 1.0
"""Seconds for which a rank that leaves waits for the others' goodbyes."""
NO_SIGN = "no sign of life from its process or its link"


class Liveness:
    """Watches other ranks in daemon threads."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        workers: Sequence[int] = (),
        peers: Collection[int] = (),
        pace: Pace | None = None,
    ) -> None:
        """Start the threads.

        Args:
            group: a gloo group that nothing else uses. None: no peers.
            workers: the worker of each rank of the group. Default: each rank is a worker.
            peers: ranks of the group to watch, which also watch this one. Default: all others.
        """
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        self._group, self._pace, self._rank = group, pace or Pace(), rank
        self._workers = list(workers) or list(range(size))
        self.worker = self._workers[rank]
        self._speaks = self._workers.index(self.worker) == rank  # the first rank of a worker
        self.clock = OwnClock(self._pace.beat)
        now = time.perf_counter()
        self._peers: list[Peer] = []
        for one in sorted(peers) or [one for one in range(size) if one != rank]:
            worker = self._workers[one]
            name = f"rank {one} of this worker" if worker == self.worker else f"worker {worker}"
            self._peers.append(Peer(one, worker, name, now))
        self._steps = 0
        self._told: dict[int, str] = {}  # ranks that others have lost, with reasons
        self._lost: dict[int, str] = {}
        """Ranks that were lost first, with reasons. Set by `_decide` at `_decided_at`."""
        self.hanging: set[int] = set()
        """Workers that were given up on a stop request because one of their ranks is silent."""
        self._decided_at = math.inf
        self._changed, self._closed = threading.Condition(), False
        tasks: list[Callable[[], None]] = [partial(self._listen, peer) for peer in self._peers]
        if tasks:
            tasks.append(self._run)
            atexit.register(self.close)
        self._threads = [threading.Thread(target=task, daemon=True) for task in tasks]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def between(group: dist.ProcessGroup | None) -> "Liveness":
        """Watch the ranks of a group over a new gloo group. Collective."""
        if group is None or group.size() == 1:
            return Liveness(None)
        ranks = dist.get_process_group_ranks(group)
        return Liveness(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))

    def close(self) -> None:
        """Send goodbyes, so that peers do not report a death, and end the threads."""
        atexit.unregister(self.close)
        with self._changed:
            for peer in [] if self._closed else self._peers:
                self._send(peer, GOODBYE)
            self._closed = True
            self._changed.notify_all()
        deadline = time.perf_counter() + LAST_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.perf_counter()))

    # --- the training thread ----------------------------------------------------------------------

    def step_done(self, steps: int) -> None:
        self._steps = steps
        self.clock.tick()

    def wait(self, result: "Future[Result]", step: int = 0, where: str = "") -> Result:
        """Return the result of a task of all ranks, or raise WorkerLostError with the first cause.

        `step`: the step that the task follows. `where` is appended to the reason.
        """
        try:
            self.wait_for(result, step)
            return result.result()
        except WorkerLostError as error:
            first = self.first_cause(error)
            reasons = filter(None, [first.reason, where])
            raise WorkerLostError(first.workers, "; ".join(reasons)) from error

    def wait_for(self, result: "Future[Any] | torch.futures.Future[Any]", step: int = 0) -> None:
        """Wait for a future, or raise WorkerLostError."""

        def left() -> list[Peer]:
            """Return peers that ended before the step, and not because of a loss."""
            ended = [peer for peer in self._peers if peer.ended and peer.last.step < step]
            return [] if self._is_deciding else ended

        def notify(_: object) -> None:
            with self._changed:
                self._changed.notify_all()

        result.add_done_callback(notify)
        with self.clock.waiting(), self._changed:
            self._changed.wait_for(lambda: result.done() or self._lost or left())
            if not result.done():
                raise self._loss() if self._lost else self._ended(left())

    @property
    def first_left(self) -> int | None:
        """The first worker that was not given up; None if none was."""
        left = set(self._workers) - self.hanging
        return min(left, default=None) if self.hanging else None

    def wait_for_end(self, worker: int) -> None:
        """Wait until the watched ranks of a worker have ended or are lost."""
        peers = [peer for peer in self._peers if peer.worker == worker]
        with self._changed:
            self._changed.wait_for(lambda: all(one.ended or one.failure for one in peers))

    @property
    def is_lost(self) -> bool:
        return bool(self._lost)

    def check(self, where: str) -> None:
        """Raise WorkerLostError if a worker is lost. `where` is appended to the reason."""
        if self._lost:
            raise self._loss(where)

    def first_cause(self, error: WorkerLostError) -> WorkerLostError:
        """Return the error with the first cause of a failed exchange, and tell the others."""
        with self._changed:
            involved = [peer for peer in self._peers if peer.worker in error.workers]
            ended = [peer for peer in involved if peer.ended]
            if ended and not self._is_deciding and not self._lost:
                return self._ended(ended)
            if not self._wait_for_decision():
                self._lost = {peer.rank: error.reason for peer in involved}
                for rank, reason in self._lost.items():
                    self._tell(rank, reason)
                return error
        return self._loss()

    def give_up(self, ranks: Mapping[int, str]) -> None:
        """Treat silent ranks as lost, and tell the others."""
        with self._changed:
            for rank, reason in ranks.items():
                self._told[rank] = reason
                self.hanging.add(self._workers[rank])
                self._tell(rank, reason, HANGS)

    def lost_ranks(self) -> dict[int, str]:
        """Return the lost or else the silent ranks, with reasons, after a failure elsewhere."""
        with self._changed:
            if self._wait_for_decision():
                return self._lost
            quiet = [peer for peer in self._peers if not math.isnan(peer.quiet_since)]
            silent = self.silent_ranks(3 * self._pace.beat)
            return silent | {peer.rank: peer.quiet_why for peer in quiet}

    def silent_ranks(self, seconds: float | None = None) -> dict[int, str]:
        """Return the ranks without a heartbeat for so many seconds (default: Pace.silence)."""
        limit = self._pace.silence if seconds is None else seconds
        heard = {peer.rank: peer.heard_at for peer in self._peers if not peer.ended}
        now = time.perf_counter()
        return {rank: NO_SIGN for rank, heard_at in heard.items() if now - heard_at >= limit}

    @property
    def _is_deciding(self) -> bool:
        """Whether a loss is known and its cause is not. Peers may already leave because of it."""
        return self._decided_at < math.inf

    def _wait_for_decision(self) -> bool:
        """Wait briefly for the decision who is lost, and return whether anybody is."""
        return self._changed.wait_for(lambda: bool(self._lost), 4 * self._pace.settle)

    def _loss(self, where: str = "") -> WorkerLostError:
        workers = sorted({self._workers[rank] for rank in self._lost})
        reasons = dict.fromkeys([*self._lost.values(), where])
        return WorkerLostError(workers, "; ".join(filter(None, reasons)))

    def _ended(self, peers: list[Peer]) -> WorkerLostError:
        reason = f"it ended after its step {peers[0].last.step}, and this one is at {self._steps}"
        workers = sorted({peer.worker for peer in peers})
        return WorkerLostError(workers, f"{reason}; call step() equally often on all workers")

    # --- messages ---------------------------------------------------------------------------------

    def _listen(self, peer: Peer) -> None:
        """Receive the messages of a peer until its goodbye, or until it is lost."""
        assert self._group is not None
        room = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        while not peer.ended and not peer.failure:
            try:
                self._group.recv([room], peer.rank, 0).wait(FOREVER)
            except RuntimeError as error:
                with self._changed:
                    peer.failure = cause_of(error)
                    self._tell(peer.rank, peer.failure)
            else:
                with self._changed:
                    self._hear(peer, Message.unpack(room))

    def _hear(self, peer: Peer, message: Message) -> None:
        peer.heard_at = time.perf_counter()
        if message.kind in (LOST, HANGS):
            self._told[message.lost] = f"{message.text}; told by {peer.name}"
            if message.kind == HANGS:
                self.hanging.add(self._workers[message.lost])
            self._begin_to_decide()
            return
        peer.last, peer.ended = message, message.kind == GOODBYE
        peer.stopped = max(peer.stopped, message.stopped)
        peer.heard += 1
        if peer.ended:
            self._send(peer, GOODBYE)
            self._changed.notify_all()

    def _tell(self, lost: int, reason: str, kind: int = LOST) -> None:
        """Tell all other peers that a rank is lost."""
        for peer in self._peers:
            if peer.rank != lost:
                self._send(peer, kind, lost, reason)
        self._begin_to_decide()

    def _begin_to_decide(self) -> None:
        if not self._lost:
            self._decided_at = min(self._decided_at, time.perf_counter() + self._pace.settle)
        self._changed.notify_all()

    def _send(self, peer: Peer, kind: int, lost: int = 0, text: str = "") -> None:
        if self._group is None or peer.failure or peer.answered:
            return
        peer.answered = kind == GOODBYE
        idle = 0.0 if self.clock.waiting_for() else self.clock.idle()
        stopped, peer.sent_at = self.clock.stopped_since(peer.sent_at), time.perf_counter()
        gap = self.clock.last_gap
        message = Message(kind, lost, self._steps, idle, gap, stopped, text)
        with suppress(RuntimeError):  # the receive fails as well
            peer.works.append(self._group.send([message.pack()], peer.rank, 0))

    # --- heartbeat, decision, silence -------------------------------------------------------------

    def _run(self) -> None:
        next_beat = time.perf_counter()
        while not self._closed:
            with self._changed:
                wake_at = min(next_beat, self._decided_at)
                self._changed.wait(max(0.0, wake_at - time.perf_counter()))
                now = time.perf_counter()
                if now >= self._decided_at:
                    self._decide()
                if now < next_beat or self._closed:
                    continue
                next_beat = now + self._pace.beat
                stopped = self.clock.beat()
                for peer in self._peers:
                    peer.heard_at += stopped  # this process could not receive
                    if peer.sent <= peer.heard:
                        peer.sent += 1
                        self._send(peer, BEAT)
            if stopped >= self._pace.silence:
                logger.warning(
                    f"this process, of worker {self.worker}, stood still: {stopped:.0f} s"
                )
            for peer in self._peers:
                self._report(peer, now)
            try:
                dist.get_backend(self._group)
            except (ValueError, RuntimeError):  # `dist.destroy_process_group` came before `close`
                self.close()

    def _decide(self) -> None:
        """Decide on the first cause. Reports of others take precedence over failures seen here."""
        failed = {peer.rank: peer.failure for peer in self._peers if peer.failure}
        self._lost, self._decided_at = self._lost or self._told or failed, math.inf
        self._changed.notify_all()
        if self._speaks:  # now, as the training thread may be in a step or save
            logger.warning(str(self._loss()))

    def _report(self, peer: Peer, now: float) -> None:
        """Log that a peer is silent or holds up this rank, and when it goes on."""
        if self._lost or peer.ended or peer.failure:
            return
        if seconds := self._quiet(peer, now):
            if math.isnan(peer.quiet_since):
                peer.quiet_since = now - seconds
            if now - peer.reported_at < self._pace.again:
                return
            peer.reported_at = now
            line = f"waiting for {peer.name} since {seconds:.0f} s: {peer.quiet_why}"
        elif math.isnan(peer.quiet_since):
            peer.stopped = 0.0
            return
        else:
            seconds, stopped = now - peer.quiet_since, peer.stopped
            peer.quiet_since, peer.reported_at = math.nan, -math.inf
            cause = "the link to it was cut" if peer.quiet_why == NO_SIGN else "it made no step"
            cause = "its process stood still" if stopped > seconds / 2 else cause
            line = f"{peer.name} goes on after {seconds:.0f} s: {cause}"
        if self._speaks:
            logger.warning(line)

    def _quiet(self, peer: Peer, now: float) -> float:
        """Return for how long a peer has been silent or has held up this rank, 0 if only briefly.

        It holds up this rank if this rank waits for others while the peer neither waits nor makes
        a step.
        """
        silent, limit = now - peer.heard_at, self._pace.silence
        if silent >= limit:
            peer.quiet_why = NO_SIGN
            return silent
        held_up = min(self.clock.waiting_for(), peer.last.idle and peer.last.idle + silent)
        if held_up < max(limit, 2 * peer.last.gap):
            return 0.0
        peer.quiet_why = f"it is alive, but makes no step after its step {peer.last.step}"
        return held_up
