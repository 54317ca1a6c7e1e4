"""Speed of a link, and the number of streams that it needs."""

import math
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.diloco.config import MOST_STREAMS, STREAM_BYTES
from torchtitan_diloco.machines import link
from torchtitan_diloco.machines.link import Speed, streams_needed


@given(st.floats(0, 1e13), st.floats(0, 10))
def test_streams_fill_a_link_and_no_more(bits_per_second: float, round_trip: float) -> None:
    streams, in_flight = (
        streams_needed(bits_per_second, round_trip),
        bits_per_second / 8 * round_trip,
    )
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
