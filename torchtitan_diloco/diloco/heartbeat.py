"""Heartbeat messages between ranks, and the clock that measures gaps between a rank's steps."""

import math
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.utils import SILENCE_SECONDS


@dataclass(frozen=True)
class Pace:
    """Seconds. These are not settings: they only control when something is reported."""

    beat: float = 1.0  # between two heartbeats
    silence: float = SILENCE_SECONDS
    again: float = 30.0  # between two reports of one silence
    settle: float = 0.5
    """From the first sign of a loss to the decision: others may know an earlier cause."""


BEAT, LOST, HANGS, GOODBYE = range(4)
"""Kinds of messages. LOST: a rank is dead. HANGS: a rank was given up on a stop request. GOODBYE is
the last message to a peer."""
MESSAGE_BYTES = 256
_NUMBERS = struct.Struct("<BIIddd")


class Message(NamedTuple):
    kind: int = BEAT
    lost: int = 0  # rank that is lost for the reason in `text`
    step: int = 0  # of the sender
    idle: float = 0.0  # OwnClock.idle() of the sender, 0 if it waits for others
    gap: float = 0.0  # OwnClock.last_gap of the sender
    stopped: float = 0.0
    """Longest time since the last message in which the sender's process did not run."""
    text: str = ""

    def pack(self) -> Tensor:
        data = _NUMBERS.pack(*self[:-1]) + self.text.encode()[: MESSAGE_BYTES - _NUMBERS.size]
        return torch.frombuffer(bytearray(data.ljust(MESSAGE_BYTES, b"\0")), dtype=torch.uint8)

    @staticmethod
    def unpack(packed: Tensor) -> "Message":
        data = packed.numpy().tobytes()
        text = data[_NUMBERS.size :].rstrip(b"\0").decode(errors="replace")
        return Message._make((*_NUMBERS.unpack_from(data), text))


@dataclass
class Peer:
    rank: int
    worker: int
    name: str
    heard_at: float  # time of its last message, on this rank's clock
    last: Message = field(default_factory=Message)
    failure: str = ""  # why the connection to it failed
    ended: bool = False  # it has sent GOODBYE
    answered: bool = False  # this rank has sent it GOODBYE
    sent: int = 0
    heard: int = 0
    """Heartbeats. The next is sent after a reply to the last, so that few are in flight."""
    sent_at: float = 0.0
    works: "deque[dist.Work]" = field(default_factory=lambda: deque(maxlen=4))
    """Keeps works alive: gloo drops a message if its work is dropped before it is sent."""
    quiet_since: float = math.nan
    """Since when it has been silent or has held up this rank; NaN if it does neither."""
    quiet_why: str = ""
    stopped: float = 0.0  # longest stop of its process since it was last fine
    reported_at: float = -math.inf


class OwnClock:
    """Measures gaps: time between two steps of this rank without waiting for other ranks.

    A thread calls `beat` every `every` seconds. If a call comes much later, the process was
    stopped. Times are those of `time.perf_counter`.
    """

    def __init__(self, every: float) -> None:
        self._every, self._lock = every, threading.Lock()
        self._beaten = math.nan  # stays NaN without peers
        self._stops = deque[tuple[float, float]](maxlen=64)  # ends and lengths
        self._ticked = self._waiting_since = math.nan
        self._waited = self._longest = self._asked = 0.0
        self.last_gap = 0.0  # between the latest two steps

    def tick(self, *, counts: bool = True) -> None:
        """End a gap. One that was spent on validation or a save does not count."""
        with self._lock:
            self.last_gap = self.idle() * counts
            self._longest = max(self._longest, self.last_gap)
            self._ticked, self._waited = time.perf_counter(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the body as waiting for other ranks."""
        self._waiting_since = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._waited += self.waiting_for()
                self._waiting_since = math.nan

    def waiting_for(self) -> float:
        """Return the seconds for which this rank has been waiting for others, 0 if it is not."""
        since = self._waiting_since
        return 0.0 if math.isnan(since) else time.perf_counter() - since

    def idle(self) -> float:
        """Return the seconds since the last step, without those of waiting for others."""
        if math.isnan(self._ticked):
            return 0.0
        return max(0.0, time.perf_counter() - self._ticked - self._waited - self.waiting_for())

    def beat(self) -> float:
        """Return for how long the process was stopped until now, 0 if it was not."""
        stopped, self._beaten = self._stop(), time.perf_counter()
        if stopped:
            self._stops.append((self._beaten, stopped))
        return stopped

    def stopped_since(self, moment: float) -> float:
        """Return the longest stop of the process since a moment."""
        return max([self._stop(), *(length for end, length in list(self._stops) if end > moment)])

    def longest_gap(self) -> float:
        """Return the longest gap or stop of the process since the last call."""
        with self._lock:
            longest = max(self._longest, self.idle(), self.stopped_since(self._asked))
            self._longest, self._asked = 0.0, time.perf_counter()
        return longest

    def _stop(self) -> float:
        seconds = time.perf_counter() - self._beaten
        return seconds if seconds > 2 * self._every else 0.0
