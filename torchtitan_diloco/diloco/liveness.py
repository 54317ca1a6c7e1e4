"""Who is alive: deaths within a second or two, silence after ten, and who held up the others.

Gloo fails a receive at once when its peer dies, but only one that still waits for its first byte: a
payload that has begun to arrive hangs until its timeout. So one receive is always posted for every
peer here, on a group that nothing else uses, and a small heartbeat keeps it busy. Whoever loses a
peer tells the others before it leaves, so that the first cause is named and not its consequences.
"""

import atexit
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.utils import cause_of, logger


@dataclass(frozen=True)
class Pace:
    """Seconds. Not settings: nothing in a run depends on them but when a message is printed."""

    beat: float = 1.0
    """Between two heartbeats."""
    silence: float = 10.0
    """Without a heartbeat, or without a step that others wait for, until it is reported."""
    again: float = 30.0
    """Between two reports of the same silence."""
    settle: float = 0.5
    """From the first sign of a loss until it is named: others may know an earlier cause."""


FOREVER = timedelta(days=3650)
BEAT, LOST, GOODBYE = range(3)
"""Kinds of messages. After its goodbye a rank sends nothing more to this peer."""
MESSAGE_BYTES = 256
NO_SIGN = "no sign of life from its process or its link"
_LAYOUT = struct.Struct("<BIIIdd")


@dataclass(frozen=True)
class Message:
    kind: int = BEAT
    lost: int = 0
    """The rank that is lost, for a message of that kind; `text` says why."""
    step: int = 0
    """Steps of the sender."""
    exchanges: int = 0
    """Exchanges that the sender has completed."""
    idle: float = 0.0
    """Seconds since its last step, without those in which it waited for others."""
    stopped: float = 0.0
    """Longest time since the heartbeat before in which the sender's threads did not run."""
    text: str = ""

    def pack(self) -> torch.Tensor:
        *numbers, text = astuple(self)
        packed = _LAYOUT.pack(*numbers) + text.encode()[: MESSAGE_BYTES - _LAYOUT.size]
        return torch.frombuffer(bytearray(packed.ljust(MESSAGE_BYTES, b"\0")), dtype=torch.uint8)

    @staticmethod
    def unpack(data: bytes) -> "Message":
        text = data[_LAYOUT.size :].rstrip(b"\0").decode(errors="replace")
        kind, lost, step, exchanges, idle, stopped = _LAYOUT.unpack_from(data)
        return Message(kind, lost, step, exchanges, idle, stopped, text)


@dataclass
class Peer:
    rank: int
    worker: int
    heard_at: float
    """When its last message came, on this rank's clock."""
    last: Message = field(default_factory=Message)
    sent: int = 0
    heard: int = 0
    """Heartbeats. One is sent after the one before was answered, so a few are in flight at most."""
    works: "deque[Any]" = field(default_factory=lambda: deque(maxlen=4))
    """Sends with their buffers: gloo drops a message whose work is gone before it has left."""
    failure: str = ""
    """Why it is lost, as seen here."""
    ended: bool = False
    """It has said goodbye."""
    said_goodbye: bool = False
    """This rank has, to it."""
    sent_at: float = 0.0
    quiet_since: float = math.nan
    """Since when it has been silent or has held up this rank; NaN while all is well."""
    quiet_why: str = ""
    reported_at: float = -math.inf

    @property
    def present(self) -> bool:
        return not self.failure and not self.ended


class Liveness:
    """Watches other ranks from threads of its own, which never keep the process alive."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        workers: Sequence[int] = (),
        peers: Collection[int] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Start to watch.

        Args:
            group: a gloo group that nothing else uses. None: there is nobody to watch.
            workers: the worker of each rank of the group. Default: every rank is one.
            peers: ranks of the group to watch, who watch this one. Default: all others.
        """
        size, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self.workers = list(workers) or list(range(size))
        self._group, self._pace = group, pace or Pace()
        now = time.perf_counter()
        ranks = [one for one in peers or range(size) if one != self.rank]
        self._peers = [Peer(rank, self.workers[rank], now) for rank in ranks]
        self.worker = self.workers[self.rank]
        self._reports = self.workers.index(self.worker) == self.rank
        self.on_silence: Callable[[int, float], None] | None = None
        """Called with a worker and its seconds of silence whenever they are reported."""
        self._changed = threading.Condition()
        self._closed = False
        self._told: dict[int, str] = {}
        """Ranks that others have lost, and why."""
        self._lost: dict[int, str] | None = None
        """Who was lost first, and why, once it is decided: at `settled_at`."""
        self._settled_at = math.inf
        self._step, self._exchanges = 0, 0
        self._ticked = self._waiting_since = math.nan
        self._waited = self._longest_gap = self._gap_asked = 0.0
        self._woke, self._pauses = now, deque[tuple[float, float]](maxlen=64)
        """When this object's thread ran last; the ends and lengths of times when it could not."""
        self._threads = [
            threading.Thread(target=partial(self._listen, peer), name="liveness", daemon=True)
            for peer in self._peers
        ]
        if self._peers:
            self._threads.append(threading.Thread(target=self._run, name="liveness", daemon=True))
            atexit.register(self.close)
        for thread in self._threads:
            thread.start()

    @staticmethod
    def between(group: dist.ProcessGroup | None) -> "Liveness":
        """Watch the ranks of a group over a new gloo group; all its ranks call this together."""
        if group is None or group.size() == 1:
            return Liveness(None)
        ranks = dist.get_process_group_ranks(group)
        return Liveness(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))

    def close(self) -> None:
        """Say goodbye, so that leaving is not taken for a death, and end the threads."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for peer in self._peers:
                self._send(peer, GOODBYE)
            self._changed.notify_all()
        atexit.unregister(self.close)
        deadline = time.perf_counter() + 1.0  # they end when the peers have answered
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.perf_counter()))

    # --- what the training thread says and asks ---------------------------------------------------

    def tick(self, step: int) -> None:
        """Note that a training step was made."""
        now = time.perf_counter()
        with self._changed:
            self._longest_gap = max(self._longest_gap, self._idle(now))
            self._step, self._ticked, self._waited = step, now, 0.0

    def excuse(self) -> None:
        """Do not count the time since the last step as a gap, such as that of a validation."""
        with self._changed:
            self._ticked, self._waited = time.perf_counter(), 0.0

    def exchanged(self) -> None:
        """Count an exchange that is complete."""
        self._exchanges += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The body waits for other workers: its time is theirs and no gap of this rank."""
        self._waiting_since = time.perf_counter()
        try:
            yield
        finally:
            with self._changed:
                self._waited += time.perf_counter() - self._waiting_since
                self._waiting_since = math.nan

    def wait(self, result: "Future[Any]", exchange: int = 0) -> None:
        """Wait for the result of an exchange of this number, or raise WorkerLostError."""
        result.add_done_callback(self._wake)
        with self.waiting(), self._changed:
            self._changed.wait_for(
                lambda: result.done() or self._lost is not None or self._ended_before(exchange)
            )
            if result.done():
                return
            raise self._loss() if self.is_lost else self._ended(self._ended_before(exchange))

    @property
    def is_lost(self) -> bool:
        """Whether a worker is lost."""
        return self._lost is not None

    def check(self, where: str) -> None:
        """Raise WorkerLostError if a worker is lost; `where` completes its reason."""
        if self.is_lost:
            loss = self._loss()
            raise WorkerLostError(loss.workers, f"{loss.reason}; {where}")

    def first_cause(self, error: WorkerLostError) -> WorkerLostError:
        """Return the error that names the first cause of a failed exchange, and tell the others."""
        if ended := [peer for peer in self._peers if peer.ended and peer.worker in error.workers]:
            return self._ended(ended)
        with self._changed:
            if not self._decided():
                self._lost = {
                    peer.rank: error.reason for peer in self._peers if peer.worker in error.workers
                }
                for rank in self._lost:
                    self._tell(rank, error.reason)
                return error
        return self._loss()

    def lost_ranks(self) -> dict[int, str]:
        """Return the ranks that are lost, or else silent, and why, after a failure elsewhere."""
        with self._changed:
            if self._decided():
                return self._lost or {}
        now = time.perf_counter()
        return {
            peer.rank: f"silent for {now - peer.heard_at:.0f} s"
            for peer in self._peers
            if peer.present and now - peer.heard_at > self._pace.silence
        }

    def longest_gap(self) -> float:
        """Return the longest gap between two steps of this rank since the last call.

        Its own time only: it did not wait for others, or its process did not run at all.
        """
        now = time.perf_counter()
        with self._changed:
            longest = max(self._longest_gap, self._idle(now), self.stopped_since(self._gap_asked))
            self._longest_gap, self._gap_asked = 0.0, now
        return longest

    def stopped_since(self, moment: float) -> float:
        """Return the longest time since a moment in which this process did not run."""
        recent = [length for end, length in self._pauses if end > moment]
        return max([*recent, self._pause(time.perf_counter())])

    def _idle(self, now: float) -> float:
        """Return the seconds since the last step in which this rank did not wait for others."""
        if math.isnan(self._ticked):
            return 0.0
        waiting = 0.0 if math.isnan(self._waiting_since) else now - self._waiting_since
        return max(0.0, now - self._ticked - self._waited - waiting)

    def _pause(self, now: float) -> float:
        """Return how much longer than two heartbeats this object's thread has slept, or 0."""
        slept = now - self._woke
        return slept if self._threads and slept > 2 * self._pace.beat else 0.0

    def _decided(self) -> bool:
        """Wait a moment until it is known who is lost; return False if nobody is."""
        return self._changed.wait_for(lambda: self._lost is not None, 4 * self._pace.settle)

    def _loss(self) -> WorkerLostError:
        lost = self._lost or {}
        workers = sorted({self.workers[rank] for rank in lost})
        return WorkerLostError(workers, "; ".join(dict.fromkeys(lost.values())))

    def _ended(self, peers: list[Peer]) -> WorkerLostError:
        workers = sorted({peer.worker for peer in peers})
        reason = (
            f"it ended its run after its step {peers[0].last.step}, this one is at {self._step}"
        )
        return WorkerLostError(workers, f"{reason}; all workers must call step() equally often")

    def _ended_before(self, exchange: int) -> list[Peer]:
        """Return peers that said goodbye without completing an exchange."""
        return [p for p in self._peers if p.ended and p.last.exchanges < exchange]

    def _wake(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- threads ----------------------------------------------------------------------------------

    def _listen(self, peer: Peer) -> None:
        """Receive the messages of a peer until its goodbye, or until it is lost."""
        room = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        while peer.present:
            try:
                assert self._group is not None
                self._group.recv([room], peer.rank, 0).wait(FOREVER)
                message = Message.unpack(room.numpy().tobytes())
            except RuntimeError as error:
                with self._changed:
                    peer.failure = cause_of(error)
                    self._tell(peer.rank, peer.failure)
            else:
                with self._changed:
                    self._hear(peer, message)

    def _hear(self, peer: Peer, message: Message) -> None:
        peer.heard_at = time.perf_counter()
        if message.kind == LOST:
            if message.lost == self.rank:
                self._told[peer.rank] = f"it gave up this worker: {message.text}"
            else:
                self._told[message.lost] = f"{message.text}; told by worker {peer.worker}"
            self._note_loss()
            return
        peer.last, peer.ended = message, message.kind == GOODBYE
        peer.heard += 1
        if peer.ended:
            self._send(peer, GOODBYE)  # it waits for this before it leaves
        self._changed.notify_all()

    def _tell(self, rank: int, reason: str) -> None:
        """Tell the others that a rank is lost."""
        for peer in self._peers:
            if peer.rank != rank:
                self._send(peer, LOST, rank, reason)
        self._note_loss()

    def _note_loss(self) -> None:
        if self._lost is None:
            self._settled_at = min(self._settled_at, time.perf_counter() + self._pace.settle)
        self._changed.notify_all()

    def _send(self, peer: Peer, kind: int, lost: int = 0, text: str = "") -> None:
        if self._group is None or peer.failure or peer.said_goodbye:
            return
        peer.said_goodbye = kind == GOODBYE
        now = time.perf_counter()
        numbers = self._step, self._exchanges, self._idle(now), self.stopped_since(peer.sent_at)
        message = Message(kind, lost, *numbers, text).pack()
        peer.sent_at = now
        with suppress(RuntimeError):  # its receive has failed too, or will
            peer.works.append(self._group.send([message], peer.rank, 0))

    def _run(self) -> None:
        """Send heartbeats, report silence, and decide who was lost first."""
        next_beat = self._woke
        while not self._closed:
            with self._changed:
                wake_at = min(next_beat, self._settled_at)
                self._changed.wait(max(0.0, wake_at - time.perf_counter()))
                now = time.perf_counter()
                self._note_pause(now)
                if now >= self._settled_at and self._lost is None:
                    self._decide()
                if now < next_beat or self._closed:
                    continue
                next_beat = now + self._pace.beat
                for peer in self._peers:
                    if peer.sent <= peer.heard:
                        peer.sent += 1
                        self._send(peer, BEAT)
                reports = [found for peer in self._peers if (found := self._look_at(peer, now))]
            if self._group_is_destroyed():
                self.close()
            for worker, seconds, line in reports if self._reports else []:
                logger.warning(line)
                if self.on_silence is not None:
                    self.on_silence(worker, seconds)

    def _group_is_destroyed(self) -> bool:
        """Return whether somebody has called dist.destroy_process_group() without close()."""
        try:
            dist.get_backend(self._group)
        except (ValueError, RuntimeError):
            return True
        return False

    def _note_pause(self, now: float) -> None:
        """Note that this process did not run, and that it could not have heard the others."""
        pause = self._pause(now)
        self._woke = now
        if pause:
            self._pauses.append((now, pause))
            for peer in self._peers:
                peer.heard_at += pause
        if pause > self._pace.silence:
            logger.warning(f"this process (worker {self.worker}) stood still for {pause:.0f} s")

    def _decide(self) -> None:
        """Name the first cause: what others have told comes before what was seen here."""
        failed = {peer.rank: peer.failure for peer in self._peers if peer.failure}
        self._lost, self._settled_at = self._told or failed, math.inf
        self._changed.notify_all()

    def _look_at(self, peer: Peer, now: float) -> tuple[int, float, str] | None:
        """Return what there is to report about a peer: its worker, seconds, and a line."""
        seconds, why = self._quiet(peer, now)
        name = f"worker {peer.worker}"
        if peer.worker == self.worker:
            name = f"rank {peer.rank} of this worker"
        if not seconds:
            if math.isnan(peer.quiet_since):
                return None
            length, stopped = now - peer.quiet_since, peer.last.stopped
            peer.quiet_since, peer.reported_at = math.nan, -math.inf
            cause = peer.quiet_why
            if stopped > length / 2:
                cause = "its process stood still"
            elif cause == NO_SIGN:
                cause = "the link to it was cut, or it was too busy to answer"
            return peer.worker, length, f"{name} goes on after {length:.0f} s: {cause}"
        peer.quiet_why = why
        if math.isnan(peer.quiet_since):
            peer.quiet_since = now - seconds
        if now - peer.reported_at < self._pace.again:
            return None
        peer.reported_at = now
        return peer.worker, seconds, f"waiting for {name} since {seconds:.0f} s: {why}"

    def _quiet(self, peer: Peer, now: float) -> tuple[float, str]:
        """Return for how long a peer has been silent or has held up this rank, and which of both.

        The seconds are 0 until it is worth a report.
        """
        if not peer.present or self._lost is not None:
            return 0.0, ""
        silent = now - peer.heard_at
        if silent >= self._pace.silence:
            return silent, NO_SIGN
        waited = 0.0 if math.isnan(self._waiting_since) else now - self._waiting_since
        held_up = min(waited, peer.last.idle + silent if peer.last.idle else 0.0)
        if held_up >= self._pace.silence:
            return (
                held_up,
                f"it is alive, but its training stands still after step {peer.last.step}",
            )
        return 0.0, ""
