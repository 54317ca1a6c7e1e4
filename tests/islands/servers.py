"""A nats-server for tests, and what a connection to it hears."""

import queue
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.server import Server, find_server, open_folder
from torchtitan_diloco.islands.session import Connected, Event, LogRecord

E = TypeVar("E", bound=Event)
PATIENCE = 150
"""Seconds after which a test hangs."""


def need_server() -> None:
    """Skip the tests of a module if something is missing here."""
    pytest.importorskip("nats", reason="needs nats-py (pip install -e .[islands])")
    try:
        find_server()
    except ValueError as error:
        pytest.skip(str(error), allow_module_level=True)
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command", allow_module_level=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def running_server(folder: Path, run: str = "test") -> Iterator[Server]:
    server = open_folder(
        folder, run=run, host="127.0.0.1", port=free_port(), address="127.0.0.1", keep_gb=0.1
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Listener:
    """A connection, and all that it has heard."""

    def __init__(self, join: Join, name: str, after: int = 0) -> None:
        self.join = join
        self.connection = Connection(join, name)
        self.connection.start(after)
        self.heard: list[Event] = []

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def wait(self, kind: type[E], matches: Callable[[E], bool] = lambda _: True) -> E:
        """Return the next event of a kind."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                event = self.connection.events.get(timeout=end - time.monotonic())
            except (queue.Empty, ValueError):
                pytest.fail(f"nothing like {kind.__name__} after {self.heard[-9:]}")
            self.heard.append(event)
            if isinstance(event, kind) and matches(event):
                return event

    def hear_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with suppress(queue.Empty):
                self.heard.append(self.connection.events.get(timeout=left))

    def wait_connected(self) -> int:
        return self.wait(Connected).last

    def read_to(self, sequence: int) -> list[LogRecord]:
        """Return all records heard so far, at least up to this one."""
        if not any(record.sequence == sequence for record in self.records):
            self.wait(LogRecord, lambda record: record.sequence >= sequence)
        return self.records

    @property
    def records(self) -> list[LogRecord]:
        return [event for event in self.heard if isinstance(event, LogRecord)]
