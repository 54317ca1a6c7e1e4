"""Speed of a link, and the number of streams that it needs."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.config import MOST_STREAMS, STREAM_BYTES
from torchtitan_diloco.machines import doctor, link
from torchtitan_diloco.machines.link import Speed, TooSlowError, streams_needed

UPLINK = 2e6
"""Bits per second of a slow uplink, whose round trip takes 30 ms."""


@given(st.floats(0, 1e13), st.floats(0, 10))
def test_streams_fill_a_link_and_no_more(bits_per_second: float, round_trip: float) -> None:
    streams = streams_needed(bits_per_second, round_trip)
    in_flight = bits_per_second / 8 * round_trip
    assert 1 <= streams <= MOST_STREAMS
    assert streams == MOST_STREAMS or streams * STREAM_BYTES >= in_flight * (1 - 1e-9)
    assert streams == 1 or (streams - 1) * STREAM_BYTES < in_flight * (1 + 1e-9)


def test_what_is_said_of_a_link() -> None:
    assert str(Speed(0.031, 0.9e9)) == "31 ms, 0.9 Gbit/s"
    assert str(Speed(0.1, 1e10)) == "100 ms, 10 Gbit/s"
    assert (str(Speed(0.0003)), Speed(0.0003).streams) == ("0.3 ms", 1)


def test_a_measurement_counts_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = link.listen("127.0.0.1")
    connect = partial(link.Sender, "127.0.0.1", listener.server_address[1])
    monkeypatch.setattr(link, "SHORT_SECONDS", math.inf)
    short = link.measure(connect)
    assert short.round_trip > 0
    assert math.isnan(short.bits_per_second)
    monkeypatch.setattr(link, "SHORT_SECONDS", 0.0)
    assert 0 < link.measure(connect, 3).bits_per_second < math.inf
    made = list[link.Sender]()

    def connect_once() -> link.Sender:
        if made:
            raise OSError("enough")
        made.append(connect())
        return made[0]

    with pytest.raises(OSError, match="3 simultaneous connections cannot be opened"):
        link.measure(connect_once, 3)
    listener.shutdown()
    listener.server_close()
    with pytest.raises(OSError, match="refused"):
        link.measure(connect)


def test_a_short_link_between_busy_machines_is_filled() -> None:
    """An answer takes milliseconds there, as threads wait for a core: more has to be under way."""
    sizes = list[int]()

    class Busy:
        def send(self, size: int) -> None:
            sizes.append(size)

        def wait(self) -> None:
            if sizes[-1] > 1:  # a ping found the machine idle
                time.sleep(link.PROMPT_SECONDS / 10)

        def close(self) -> None: ...

    link.measure(Busy, 1, seconds=0.2)
    assert max(sizes) > 16 * link.FIRST_BYTES


class Throttled:
    """A stream that has a share of a slow uplink. Each thread has a clock of its own."""

    clock = threading.local()

    def __init__(self, share: float) -> None:
        self._share = share
        self._sent = deque[int]()

    @classmethod
    def perf_counter(cls) -> float:
        return getattr(cls.clock, "now", 0.0)

    def send(self, size: int) -> None:
        self._sent.append(size)

    def wait(self) -> None:
        size = self._sent.popleft()
        seconds = 0.03 if size == 1 else 8 * size / (self._share * UPLINK)
        self.clock.now = self.perf_counter() + seconds

    def close(self) -> None: ...


def sharing(*shares: float) -> Callable[[], Throttled]:
    """Return what connects a stream to measure the round trip, and then one of each share."""
    left = deque([1.0, *shares])
    return lambda: Throttled(left.popleft())


@pytest.mark.parametrize(
    "shares",
    [[1.0], [1 / 8] * 8, [number / 36 for number in range(1, 9)]],
    ids=["one stream", "equal streams", "unequal streams"],
)
def test_a_slow_uplink_is_measured_until_enough_has_arrived_over_each_stream(
    shares: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bytes of each of eight streams take longer than many round trips."""
    monkeypatch.setattr(link, "time", Throttled)
    speed = link.measure(sharing(*shares), len(shares))
    assert speed.round_trip == pytest.approx(0.03)
    assert speed.bits_per_second == pytest.approx(UPLINK)


def test_a_link_that_is_too_slow_for_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "time", Throttled)
    with pytest.raises(TooSlowError, match="too slow to be measured with 2 TCP streams"):
        link.measure(sharing(0.999, 0.001), 2)
    told = doctor._rates(sharing(1.0, 1.0, 0.999, 0.001), 2)
    expected = "0.002 Gbit/s with 1 TCP stream, too slow to be measured with 2"
    assert told == f"{expected}: set diloco.link.streams = 1"
    with pytest.raises(UserError, match="with 1 TCP stream: use another link"):
        doctor._rates(sharing(0.0001), 1)


def test_a_stream_that_is_lost_leaves_the_rate_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lost(Throttled):
        def wait(self) -> None:
            raise ConnectionResetError("reset")

    monkeypatch.setattr(link, "time", Throttled)
    connect = sharing(0.5, 0.5)
    streams = deque([connect(), connect(), Lost(0.5)])
    rate = link.measure(streams.popleft, 2).bits_per_second
    assert rate == pytest.approx(UPLINK / 2)


def test_all_streams_that_are_lost_are_no_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end has ended, or a firewall resets connections."""

    class Lost(Throttled):
        def wait(self) -> None:
            if self._sent.popleft() > 1:
                raise ConnectionResetError("reset")

    monkeypatch.setattr(link, "SHORT_SECONDS", 0.0)
    with pytest.raises(ConnectionError, match="the other end has closed all connections"):
        link.measure(lambda: Lost(1.0), 2)


def test_a_link_over_which_nothing_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Throttled):
        def wait(self) -> None:
            if self._sent.popleft() > 1:
                raise TimeoutError("timed out")

    monkeypatch.setattr(link, "SHORT_SECONDS", 0.0)
    with pytest.raises(TooSlowError, match="too slow to be measured with 2 TCP streams"):
        link.measure(lambda: Silent(1.0), 2)
