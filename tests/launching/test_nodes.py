"""How a node looks for the first one, before torch does."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.machines.test_doctor import answering
from tests.ports import free_port
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.launching import nodes as module
from torchtitan_diloco.launching.launch import main
from torchtitan_diloco.launching.nodes import (
    TWICE,
    Nodes,
    check_endpoint,
    explain_no_meeting,
    wait_for_first_node,
)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TELL_SECONDS", "DIAL_SECONDS"):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_nobody_knows_is_said_at_once(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    variables = {"NNODES": "2", "NODE_RANK": str(rank), "RDZV_ENDPOINT": "nobody:29500"}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert main(["--run.device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: RDZV_ENDPOINT=nobody:29500: Name or service not known: give the")


def test_a_first_node_that_starts_later_is_waited_for(port: int) -> None:
    """With a line now and then, and until torchrun's store listens."""
    said = list[str]()
    stores = list[Any]()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            stores.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))  # type: ignore[attr-defined]

    wait_for_first_node(Nodes(2, 1, f"127.0.0.1:{port}"), 60, say)
    first, *others = said
    assert first == f"node 1 of 2: waiting for the others at 127.0.0.1:{port}"
    assert len(others) == 2
    assert all(f"127.0.0.1:{port} after 0 s: nothing listens there: start" in one for one in others)


def test_a_first_node_that_does_not_start(port: int) -> None:
    with pytest.raises(TimeoutError, match="nothing listens there"):
        wait_for_first_node(Nodes(2, 1, f"127.0.0.1:{port}"), 0, print)


def test_what_listens_is_not_torchrun() -> None:
    with (
        answering(b"SSH-2.0-OpenSSH_9.2") as address,
        pytest.raises(UserError, match=f"RDZV_ENDPOINT={address}: another program uses port"),
    ):
        wait_for_first_node(Nodes(2, 1, address), 60, print)
    with answering(b".") as address, pytest.raises(TimeoutError, match="`doctor` listens there"):
        wait_for_first_node(Nodes(2, 1, address), 0, print)


def test_the_first_node_listens_where_the_others_look(
    port: int, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Nodes(2, 0, f"127.0.0.1:{port}")
    check_endpoint(here)
    check_endpoint(here)  # which leaves nothing behind
    taken = f"127.0.0.1:{listening.getsockname()[1]}"
    check_endpoint(Nodes(2, 1, taken))
    with pytest.raises(
        UserError, match=f"{taken}: port .* is in use on this node: stop.*; {TWICE}"
    ):
        check_endpoint(Nodes(2, 0, taken))
    monkeypatch.setattr(module, "dial", lambda *_: 0.0)  # another machine answers
    other = f"127.0.0.1:{port}: is not an address of this node, which is .*; {TWICE}"
    with pytest.raises(UserError, match=other):
        check_endpoint(here)


def test_two_first_nodes_that_start_at_the_same_time(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    first = Nodes(2, 0, f"127.0.0.1:{port}")
    with pytest.raises(RuntimeError) as taken:
        dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    reason = f"another program listens at RDZV_ENDPOINT=127.0.0.1:{port} on this node; {TWICE}"
    assert explain_no_meeting(first, 60, taken.value) == reason
    reason = explain_no_meeting(first, 60, RuntimeError("1/2 clients joined"))
    assert "each with its own NODE_RANK from 0 to 1, and check the address and firewalls" in reason
