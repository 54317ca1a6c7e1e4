"""Two machines meet, tell each other values and errors, and measure their link."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from tests.machines.test_doctor import answering
from tests.ports import free_port
from tests.processes import ProcessPool
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.launching import nodes
from torchtitan_diloco.machines import pair
from torchtitan_diloco.machines.link import TooSlowError
from torchtitan_diloco.machines.pair import (
    Message,
    Pair,
    measure_all_reduce,
    measure_link,
    meet,
    slower,
)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "DIAL_SECONDS", 0.02)
    monkeypatch.setattr(nodes, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(pair, "PATIENCE", 0.5)
    monkeypatch.setattr(pair, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(pair, "RATE_SECONDS", 0.1)


def both(function: Callable[[int], Any]) -> list[Any]:
    """Call a function as each machine, in two threads."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, range(2)))


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    endpoint = f"127.0.0.1:{free_port()}"
    found: list[Pair] = both(lambda rank: meet(endpoint, rank, 60, lambda _: None))
    with found[0], found[1]:
        yield found


def test_both_get_the_values_of_both_in_the_same_order(pairs: list[Pair]) -> None:
    for values in ([["a"], ["b"] * 100_000], [1, 2], [{"x": 1.5}, {}]):
        assert both(lambda rank: pairs[rank].exchange(values[rank])) == [values, values]  # noqa: B023


def test_what_is_done_while_waiting(pairs: list[Pair]) -> None:
    times = list[None]()
    enough = threading.Event()

    def meanwhile() -> None:
        times.append(None)
        if len(times) == 3:
            enough.set()

    def tell(rank: int) -> None:
        if rank:
            enough.wait()
        pairs[rank].exchange(rank, (lambda: None) if rank else meanwhile)

    both(tell)
    assert len(times) >= 3
    with pytest.raises(ZeroDivisionError):  # it may also give up
        pairs[0].exchange(0, lambda: print(1 / 0))


def test_an_error_of_one_ends_the_other(pairs: list[Pair]) -> None:
    with pytest.raises(UserError), pairs[1]:
        raise UserError("it does not fit into memory")
    with pytest.raises(UserError, match="machine 1: it does not fit into memory"):
        pairs[0].exchange(1)


def test_what_was_said_before_an_error_is_heard_first(pairs: list[Pair]) -> None:
    with suppress(UserError), pairs[1]:
        pairs[1]._send(Message(value=msgspec.Raw(b"2")))
        raise UserError("found at the same time")
    assert pairs[0].exchange(1) == [1, 2]
    with pytest.raises(UserError, match="machine 1: found at the same time"):
        pairs[0].check(60)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("no room")])
def test_what_the_other_hears(pairs: list[Pair], error: BaseException) -> None:
    with pytest.raises(type(error)), pairs[1]:
        raise error
    heard = "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else "no room"
    with pytest.raises(UserError, match=f"machine 1: {heard}"):
        pairs[0].check(60)


def test_a_machine_that_goes_without_a_word(pairs: list[Pair]) -> None:
    with pairs[0]:
        pass
    with pytest.raises(UserError, match="machine 0 has ended: its console says why"):
        pairs[1].check(60)
    pairs[1].tell_error("which nobody hears")


def test_other_code_answers_with_another_value(pairs: list[Pair]) -> None:
    pairs[1]._send(Message(value=msgspec.Raw(b'"text"')))
    with pytest.raises(UserError, match="machine 1 has different code: install the same"):
        pairs[0].exchange(1.5)
    pairs[1]._connection.sendall(b"nothing of this kind\n")
    with pytest.raises(UserError, match="machine 1 has different code"):
        pairs[0].exchange(1.5)


def test_the_link_is_measured_both_ways(pairs: list[Pair]) -> None:
    first, second = both(lambda rank: measure_link(pairs[rank], (1, 3), lambda _: None))
    assert first == second
    assert [sorted(way.bits_per_second) for way in first] == [[1, 3], [1, 3]]
    assert slower(first, 3) == min(way.bits_per_second[3] for way in first) > 0
    assert all(0 < way.round_trip < 1 for way in first)


def test_a_way_that_is_closed(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ConnectionRefusedError("Connection refused")

    monkeypatch.setattr(pair, "measure", refused)
    with pytest.raises(UserError, match=r"cannot reach machine \d at 127\.0\.0\.1, port \d+, wh"):
        both(lambda rank: measure_link(pairs[rank], (1, 3), lambda _: None))


@pytest.mark.parametrize(
    ("count", "remedy"), [(1, "use another link"), (8, "set --diloco.link.streams 1 on both")]
)
def test_a_way_that_is_too_slow(
    pairs: list[Pair], monkeypatch: pytest.MonkeyPatch, count: int, remedy: str
) -> None:
    def measure(*_: object) -> None:
        raise TooSlowError("the link is too slow")

    monkeypatch.setattr(pair, "measure", measure)
    with pytest.raises(UserError, match=rf"machine \d: the link is too slow: {remedy}"):
        both(lambda rank: measure_link(pairs[rank], (count,), lambda _: None))


def _all_reduce(endpoint: str) -> list[float]:
    rank = int(os.environ["RANK"])
    pair.RATE_SECONDS = 0.05
    with meet(endpoint, rank, 60, lambda _: None) as own:
        measure = partial(measure_all_reduce, own, bits_per_second=1e9, say=lambda _: None)
        kinds = ((1, torch.float32), (10**6, torch.float32), (10**6, torch.bfloat16))
        rates = [measure(parameters=size, dtype=dtype, interface="") for size, dtype in kinds]
        with pytest.raises(UserError, match="gloo cannot connect the two machines over nothing0"):
            measure(parameters=1, dtype=torch.float32, interface="nothing0")
    return rates


def test_all_reduces_are_measured(processes: ProcessPool) -> None:
    first, second = processes.run(_all_reduce, 2, f"127.0.0.1:{free_port()}")
    assert first == second, "the rate of the slower one"
    assert 0 < first[0] < min(first[1:])


# --- the meeting ----------------------------------------------------------------------------------


def test_strangers_are_left_out() -> None:
    """A port scanner, a doctor and others that connect first do not end the wait."""
    port = free_port()
    endpoint = f"127.0.0.1:{port}"

    def come(rank: int) -> Pair:
        if rank:
            for words in (b"GET / HTTP/1.1\r\n\r\n", b"", b"torchtitan-diloco comp", b"\0" * 9):
                with closing(connect(port)) as stranger, suppress(OSError):
                    stranger.sendall(words)
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(1) == b""
        return meet(endpoint, rank, 60, lambda _: None)

    first, second = both(come)
    with first, second:
        assert both(lambda rank: (first, second)[rank].exchange(rank)) == [[0, 1], [0, 1]]


def connect(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            continue


def test_nobody_comes_and_nobody_is_there() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        UserError, match=f"{endpoint}: the other machine did not connect within 0.1 s: run"
    ):
        meet(endpoint, 0, 0.1, lambda _: None)
    with pytest.raises(UserError, match=f"{endpoint}: machine 0 did not answer within 0.1 s "):
        meet(endpoint, 1, 0.1, lambda _: None)


def test_an_address_of_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        silent = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match=f"--endpoint {silent}: port .* is in use on this node"):
            meet(silent, 0, 0.1, lambda _: None)
        with pytest.raises(UserError, match=f"{silent}: another program listens there"):
            meet(silent, 1, 0.1, lambda _: None)
    with (
        answering(b"SSH-2.0-OpenSSH_9.2") as address,
        pytest.raises(UserError, match=f"--endpoint {address}: another program uses port"),
    ):
        meet(address, 1, 0.1, lambda _: None)
    with answering(b".") as address, pytest.raises(UserError, match="`doctor` listens there: stop"):
        meet(address, 1, 0.1, lambda _: None)

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for rank in range(2):
        with pytest.raises(UserError, match="--endpoint nobody:29500: Name or service not known"):
            meet("nobody:29500", rank, 0.1, lambda _: None)
