"""Round trip and rate of a link, and how many TCP streams it needs.

A stream has at most its window in flight, which Linux limits to about 3 MB by default. On a long
link, several streams carry what one cannot. Socket buffers are never set by hand, as this would
switch off the kernel's own tuning of the window.

`listen` at one end, `measure` at the other.
"""

import asyncio
import math
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple, cast

STREAM_BYTES = 3_000_000
"""Bytes that a stream carries in a round trip."""
MOST_STREAMS = 32
SHORT_SECONDS = 1e-3
"""Round trips below this need one stream, up to 24 Gbit/s."""
PINGS, PATIENCE = 4, 5.0
ROUND_TRIPS, LEAST_SECONDS, MOST_SECONDS = 12, 0.3, 1.5
"""Time in which a rate is measured: a new stream doubles its rate with every round trip."""
SETTLED = 0.6
"""Share of this time after which bytes are counted."""
BLOCK = bytes(2**18)
ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER: drop what was not sent when a socket is closed."""


class Speed(NamedTuple):
    round_trip: float
    """Seconds."""
    bits_per_second: float = math.nan
    """Of all streams together. NaN: not measured, as one stream will do."""

    @property
    def streams(self) -> int:
        return streams_needed(self.bits_per_second, self.round_trip)

    def __str__(self) -> str:
        milliseconds = f"{1e3 * self.round_trip:.2g} ms"
        if math.isnan(self.bits_per_second):
            return milliseconds
        return f"{milliseconds}, {self.bits_per_second / 1e9:.2g} Gbit/s"


def streams_needed(bits_per_second: float, round_trip: float) -> int:
    """Return the number of TCP streams that have a link's bytes of a round trip in flight."""
    streams = bits_per_second / 8 * round_trip / STREAM_BYTES
    return 1 if math.isnan(streams) else math.ceil(min(max(streams, 1), MOST_STREAMS))


async def rate(arrived: Callable[[], int], round_trip: float) -> float:
    """Return the bits per second at which a count of bytes grows once streams have settled."""
    seconds = min(max(ROUND_TRIPS * round_trip, LEAST_SECONDS), MOST_SECONDS)
    await asyncio.sleep(SETTLED * seconds)
    before, started = arrived(), time.perf_counter()
    await asyncio.sleep((1 - SETTLED) * seconds)
    return 8 * (arrived() - before) / (time.perf_counter() - started)


class _Counting(asyncio.BufferedProtocol):
    """Answer with the number of bytes that have arrived."""

    _room = bytearray(2**20)  # nobody reads it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._count = cast(asyncio.Transport, transport), 0

    def get_buffer(self, _: int) -> bytearray:
        return self._room

    def buffer_updated(self, count: int) -> None:
        self._count += count
        self._transport.write(struct.pack("!Q", self._count))


async def listen(host: str, port: int = 0) -> asyncio.Server:
    """Let others measure the link to this address. Port 0: a free one."""
    return await asyncio.get_running_loop().create_server(_Counting, host, port)


class _Stream:
    """A connection to somebody who listens."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self.arrived = reader, writer, 0
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)

    async def ping(self) -> float:
        started = time.perf_counter()
        self._writer.write(b".")
        await self._hear()
        return time.perf_counter() - started

    async def flood(self) -> None:
        """Send until cancelled, and count what has arrived."""

        async def send() -> None:
            while True:
                self._writer.write(BLOCK)
                await self._writer.drain()

        async def hear() -> None:
            while True:
                await self._hear()

        await asyncio.gather(send(), hear())

    async def _hear(self) -> None:
        [self.arrived] = struct.unpack("!Q", await self._reader.readexactly(8))

    def close(self) -> None:
        self._writer.transport.abort()


async def measure(host: str, port: int, *, streams: int = MOST_STREAMS) -> Speed:
    """Measure the round trip, and unless it is short the rate to an address in about a second.

    Raises an OSError, a TimeoutError or an EOFError.
    """
    opened, tasks = list[_Stream](), list[asyncio.Task[None]]()

    async def open_stream() -> None:
        opened.append(_Stream(*await asyncio.open_connection(host, port)))

    try:
        async with asyncio.timeout(PATIENCE):
            await open_stream()
            round_trip = min([await opened[0].ping() for _ in range(PINGS)])
            if round_trip < SHORT_SECONDS:
                return Speed(round_trip)
            await asyncio.gather(*(open_stream() for _ in range(streams - 1)))
        tasks = [asyncio.create_task(stream.flood()) for stream in opened]
        found = await rate(lambda: sum(stream.arrived for stream in opened), round_trip)
        for task in tasks:
            if task.done():
                task.result()
        return Speed(round_trip, found)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in opened:
            stream.close()
