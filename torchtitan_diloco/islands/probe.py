"""How many TCP streams the link to the server needs."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from torchtitan_diloco.diloco.link import (
    MOST_STREAMS,
    PATIENCE,
    PINGS,
    SHORT_SECONDS,
    Speed,
    settling_and_counting,
)
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.session import subject_of
from torchtitan_diloco.islands.wire import Wire
from torchtitan_diloco.log import logger

FIRST_BYTES, MOST_BYTES = 2**14, 2**22
"""Bytes that a stream sends at a time, twice as many after a prompt answer."""
MESSAGE = memoryview(bytes(2**19))


def streams_to_server(join: Join, name: str) -> int:
    """Measure the link to the server, say what was found, and return the streams that it needs."""
    try:
        speed = _measure(join, name)
    except (OSError, ValueError, threading.BrokenBarrierError) as error:
        reason = str(error) or "not all connections could be made"
        logger.warning(
            f"the link to the server could not be measured ({reason}): 1 stream; set "
            "diloco.link.streams if the link is long"
        )
        return 1
    plural = "s" * (speed.streams > 1)
    logger.info(f"link to the server: {speed}, {speed.streams} stream{plural}")
    return speed.streams


def _measure(join: Join, name: str) -> Speed:
    """Measure the round trip, and unless it is short the rate, with messages to nobody."""
    subject = subject_of(join.run, "probe")
    arrived, over = [0] * MOST_STREAMS, threading.Event()
    begin = threading.Barrier(MOST_STREAMS + 1, timeout=PATIENCE)

    def open_wire() -> Wire:
        return Wire(join, join.addresses[0], f"{name} probe")

    def send(wire: Wire, size: int) -> float:
        """Return the seconds until the server has received so many bytes."""
        started = time.perf_counter()
        for start in range(0, size, len(MESSAGE)):
            wire.publish(subject, 0, MESSAGE[: size - start])
        wire.ping()
        return time.perf_counter() - started

    def flood(number: int) -> None:
        try:
            with closing(open_wire()) as wire:
                begin.wait()
                size = FIRST_BYTES
                while not over.is_set():
                    seconds = send(wire, size)
                    arrived[number] += size
                    if seconds < 2 * round_trip:  # otherwise a larger one only waits longer
                        size = min(2 * size, MOST_BYTES)
        except OSError:
            begin.abort()

    with closing(open_wire()) as first:
        round_trip = min(send(first, 0) for _ in range(PINGS))
    if round_trip < SHORT_SECONDS:
        return Speed(round_trip)
    with ThreadPoolExecutor(MOST_STREAMS) as pool:
        try:
            for number in range(MOST_STREAMS):
                pool.submit(flood, number)
            begin.wait()
            settling, counting = settling_and_counting(round_trip)
            time.sleep(settling)
            before, started = sum(arrived), time.perf_counter()
            time.sleep(counting)
            return Speed(round_trip, 8 * (sum(arrived) - before) / (time.perf_counter() - started))
        finally:
            over.set()  # each stream waits for its last answer
