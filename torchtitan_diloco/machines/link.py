"""Round trip and rate of a link, and how many TCP streams it needs.

To measure the link between two machines, `listen` on one, and call `measure(partial(Sender, host,
port))` on the other. `ask(host, port)` returns the text of the one that listens.
"""

import math
import socket
import socketserver
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.reach import PATIENCE
from torchtitan_diloco.diloco.config import MOST_STREAMS, STREAM_BYTES

SHORT_SECONDS = 1e-3
"""Round trips below this need one stream, up to 24 Gbit/s."""
PINGS = 4
ROUND_TRIPS = 12
"""Round trips for which a rate is measured: a new stream doubles its rate with every round trip."""
LEAST_SECONDS = 0.3
MOST_SECONDS = 1.5
"""Minimum and maximum of the seconds that these round trips take."""
LONGEST_SECONDS = 15.0
"""Seconds after which a rate is no longer measured, even if too little has arrived."""
LEAST_ARRIVALS = 2
"""Minimum number of arrivals of each stream that count."""
SETTLED = 0.5
"""Share of this time after which bytes are counted."""
FIRST_BYTES = 2**14
"""Bytes that a stream sends at a time. They double after a prompt answer."""
MOST_BYTES = 2**22
"""Maximum of these bytes."""
PROMPT_SECONDS = 0.02
"""Seconds within which an answer is prompt, even if the round trip is shorter: a busy machine needs
milliseconds for each answer."""
BLOCK = memoryview(bytes(2**19))
QUESTION = 2**64 - 1
"""Asks for the text, in place of a number of bytes."""
MOST_TEXT = 2**16


class Speed(NamedTuple):
    round_trip: float
    """Seconds of a round trip."""
    bits_per_second: float = math.nan
    """Rate of all streams together. NaN: not measured, because one stream is enough."""

    @property
    def streams(self) -> int:
        return streams_needed(self.bits_per_second, self.round_trip)

    def __str__(self) -> str:
        milliseconds = f"{1e3 * self.round_trip:.2g} ms"
        if self.round_trip >= 0.01:
            milliseconds = f"{1e3 * self.round_trip:.0f} ms"
        if math.isnan(self.bits_per_second):
            return milliseconds
        return f"{milliseconds}, {self.bits_per_second / 1e9:.2g} Gbit/s"


def streams_needed(bits_per_second: float, round_trip: float) -> int:
    """Return the number of TCP streams that keep as many bytes in flight as the link can carry."""
    streams = bits_per_second / 8 * round_trip / STREAM_BYTES
    return 1 if math.isnan(streams) else math.ceil(min(max(streams, 1), MOST_STREAMS))


class Stream(Protocol):
    """A connection to the other end of a link."""

    def send(self, size: int) -> None:
        """Send `size` bytes."""

    def wait(self) -> None:
        """Wait until the bytes of the earliest pending send have arrived."""

    def close(self) -> None: ...


class TooSlowError(ConnectionError):
    """So little arrived over several streams that their rate is not known."""


class _Flood:
    """Notes what arrives over several streams while all of them send: for some seconds, and until
    enough has arrived over each."""

    def __init__(self, streams: int, seconds: float) -> None:
        self._seconds = seconds
        self._begun = math.nan
        self._lost = set[int]()
        self._arrived: list[list[tuple[float, int]]] = [[] for _ in range(streams)]
        """When so many bytes had arrived, by stream."""

    def begin(self) -> None:
        self._begun = time.perf_counter()

    @property
    def has_begun(self) -> bool:
        return not math.isnan(self._begun)

    @property
    def is_over(self) -> bool:
        elapsed = time.perf_counter() - self._begun
        if elapsed < self._seconds:
            return False
        return self._has_enough or elapsed >= max(self._seconds, LONGEST_SECONDS)

    def note(self, stream: int, size: int) -> float:
        """Take note of bytes that have just arrived. Return when."""
        moment = time.perf_counter()
        self._arrived[stream].append((moment, size))
        return moment

    def lose(self, stream: int) -> None:
        """Take note that a stream is gone, for which the others do not go on."""
        self._lost.add(stream)

    @property
    def rate(self) -> float:
        """The bytes per second of all streams, from when they are settled until one of them has
        sent its last. Raise a TooSlowError if too little has arrived, and a ConnectionError if all
        streams are lost."""
        streams = len(self._arrived)
        if not self._living:
            raise ConnectionError("the other end has closed all connections")
        if not self._has_enough:
            raise TooSlowError(
                f"the link is too slow to be measured with {counted(streams, 'TCP stream')}"
            )
        end = min(arrived[-1][0] for arrived in self._living)
        counts = (self._count(arrived, end) for arrived in self._arrived)
        return math.fsum(counts) / (end - self._settled)

    @property
    def _settled(self) -> float:
        """When bytes begin to count."""
        return self._begun + SETTLED * self._seconds

    @property
    def _living(self) -> list[list[tuple[float, int]]]:
        """The arrivals of the streams that are not lost."""
        streams = enumerate(self._arrived)
        return [arrived for stream, arrived in streams if stream not in self._lost]

    @property
    def _has_enough(self) -> bool:
        living = self._living
        return bool(living) and all(
            len(arrived) >= LEAST_ARRIVALS and arrived[-LEAST_ARRIVALS][0] > self._settled
            for arrived in living
        )

    def _count(self, arrived: Sequence[tuple[float, int]], end: float) -> float:
        """Return the bytes of a stream since it was settled, as if the bytes of each arrival had
        come evenly since the previous one."""
        moments = [self._begun, *(moment for moment, _ in arrived)]
        sums = list(accumulate((size for _, size in arrived), initial=0))
        before, until = np.interp([self._settled, end], moments, sums)
        return float(until - before)


def measure(
    connect: Callable[[], Stream], streams: int = MOST_STREAMS, seconds: float = 0.0
) -> Speed:
    """Measure the round trip, and the rate over several streams.

    This takes up to two seconds, or longer on a slow link. The rate of a link with a short round
    trip is not measured, unless `seconds` says for how long. Raises an OSError.
    """
    with closing(connect()) as first:
        round_trip = min(ping(first) for _ in range(PINGS))
    if not seconds:
        if round_trip < SHORT_SECONDS:
            return Speed(round_trip)
        seconds = min(max(ROUND_TRIPS * round_trip, LEAST_SECONDS), MOST_SECONDS)
    prompt = max(2 * round_trip, PROMPT_SECONDS)
    flood = _Flood(streams, seconds)
    together = threading.Barrier(streams, flood.begin, PATIENCE)

    def send(number: int) -> None:
        """Send over a stream until all are done."""
        sent = deque[tuple[float, int]]()
        size = FIRST_BYTES
        try:
            with closing(connect()) as stream:
                together.wait()
                while not flood.is_over:
                    while len(sent) < 2:  # one is under way while the answer to the other is
                        sent.append((time.perf_counter(), size))
                        stream.send(size)
                    stream.wait()
                    moment, count = sent.popleft()
                    if flood.note(number, count) - moment < prompt:  # otherwise more waits longer
                        size = min(2 * size, MOST_BYTES)
        except OSError as error:
            if not flood.has_begun:
                together.abort()
                raise
            if not isinstance(error, TimeoutError):  # a slow stream is not lost
                flood.lose(number)

    try:
        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(send, range(streams)))
    except (OSError, threading.BrokenBarrierError):
        raise ConnectionError(f"{streams} simultaneous connections cannot be opened") from None
    return Speed(round_trip, 8 * flood.rate)


def ping(stream: Stream, size: int = 1) -> float:
    """Return the seconds until the other side has answered this number of bytes."""
    started = time.perf_counter()
    stream.send(size)
    stream.wait()
    return time.perf_counter() - started


class Sender:
    """A stream to a machine that listens."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, size: int) -> None:
        self._socket.sendall(struct.pack("!Q", size))
        for start in range(0, size, len(BLOCK)):
            self._socket.sendall(BLOCK[: size - start])

    def wait(self) -> None:
        if not self._socket.recv(1):
            raise ConnectionError("the other end closed the connection")

    def close(self) -> None:
        self._socket.close()


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        room = memoryview(bytearray(2**20))
        while head := self.request.recv(8, socket.MSG_WAITALL):
            [bytes_left] = struct.unpack("!Q", head)
            if bytes_left == QUESTION:
                text = self.server.text  # type: ignore[attr-defined]
                self.request.sendall(struct.pack("!Q", len(text)) + text)
                continue
            while bytes_left:
                bytes_left -= (count := self.request.recv_into(room[:bytes_left]))
                if not count:
                    return
            self.request.sendall(b".")


class Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 512
    text = b""

    def handle_error(self, *_: object) -> None:
        """Ignore that the other end has closed the connection, which is allowed."""


def listen(host: str, port: int = 0, *, text: bytes = b"") -> Listener:
    """Let others measure the link to this address, until `shutdown`. Port 0: a free one.

    `text`: what those get who `ask`.
    """
    listener = Listener((host, port), _Answer)
    listener.text = text
    threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
    return listener


def ask(host: str, port: int) -> bytes:
    """Return the text of the one that listens at an address."""
    with socket.create_connection((host, port), PATIENCE) as other:
        other.sendall(struct.pack("!Q", QUESTION))
        [size] = struct.unpack("!Q", _receive(other, 8))
        if size > MOST_TEXT:
            raise ConnectionError(f"the other end sends {size} bytes of text")
        return _receive(other, size)


def _receive(other: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = other.recv(size - len(content))
        if not part:
            raise ConnectionError("the other end closed the connection")
        content += part
    return bytes(content)
