"""Speed of a link, and the number of streams that it needs."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.diloco import link
from torchtitan_diloco.diloco.link import MOST_STREAMS, STREAM_BYTES, Speed, streams_needed


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
    assert (str(Speed(0.0003)), Speed(0.0003).streams) == ("0.3 ms", 1)


def test_a_measurement_counts_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    async def both() -> tuple[Speed, Speed, int]:
        server = await link.listen("127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(link, "SHORT_SECONDS", math.inf)
        short = await link.measure("127.0.0.1", port)
        monkeypatch.setattr(link, "SHORT_SECONDS", 0.0)
        measured = await link.measure("127.0.0.1", port, streams=3)
        server.close()
        return short, measured, port

    short, measured, port = asyncio.run(both())
    assert short.round_trip > 0
    assert math.isnan(short.bits_per_second)
    assert 0 < measured.bits_per_second < math.inf
    with pytest.raises(OSError, match=str(port)):
        asyncio.run(link.measure("127.0.0.1", port))
