"""Read the log of a run without taking part in it, and show its numbers."""

import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.overview import History, overview
from torchtitan_diloco.islands.stays import append_thinned
from torchtitan_diloco.islands.tables import render

LISTEN_SECONDS = 3.0
"""Seconds to receive heartbeats before the first output."""
REFRESH_SECONDS = 1.0
READ_SECONDS = 30.0
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


class Reader:
    """Reader of the log, with a separate connection. It does not take part in the run."""

    def __init__(
        self, connection: Connection, state: State, run: str, note: Callable[[Outcome], object]
    ) -> None:
        self.connection, self.state, self._run, self._note = connection, state, run, note
        self.history = History()
        self._validated = dict[str, tuple[int, float]]()

    def read(self, seconds: float = 0.0) -> None:
        """Read incoming records for at least this long."""
        end = time.monotonic() + seconds
        while True:
            while self.connection.records:
                record = self.connection.records.popleft()
                outcome = self.state.read(record.sequence, record.raw)
                stored = datetime.fromisoformat(record.stored) if record.stored else datetime.now()
                self.history.note(outcome, stored.timestamp())
                self._note(outcome)
            self._note_heartbeats()
            if time.monotonic() >= end:
                return
            self.connection.receive()

    def _note_heartbeats(self) -> None:
        members, now, news = self.connection.members, time.monotonic(), self.history.news
        for incarnation, one in members.heard.copy().items():
            if stay := self.history.stays.get(incarnation):
                stay.see(time.time() - (now - one.heard))
            pair = one.hint.numbers.validated
            if pair and pair != self._validated.get(incarnation) and math.isfinite(pair[1]):
                self._validated[incarnation] = pair
                append_thinned(self.history.losses, pair)
        silent, heard = members.changes(self.state, "", now)
        news.extend((time.time(), f"{name} is silent") for name in silent)
        news.extend((time.time(), f"{name} sends heartbeats again") for name in heard)

    def overview(self) -> dict[str, Any]:
        state, members, now = self.state, self.connection.members, time.monotonic()
        about = {"run": self._run, "connection": self.connection.problem or "ok"}
        return about | overview(state, members, self.history, now, time.time())


@contextmanager
def open_reader(
    join: Join, note: Callable[[Outcome], object] = lambda _: None, *, whole: bool = False
) -> Iterator[Reader]:
    """Yield a reader that has read the log since the latest stored state.

    Args:
        note: receives the outcome of each record that is read.
        whole: read the log from its first record on, if the server still has it.
    """
    connection = Connection(join, f"status/{secrets.token_hex(4)}")
    connection.connect()
    try:
        stored = None if whole and connection.first <= 1 else connection.newest_state()
        state = State.decode(stored) if stored else State()
        state.verifies = False
        connection.follow(state.sequence, state.newest)
        connection.receive_log(READ_SECONDS)
        reader = Reader(connection, state, join.run, note)
        reader.read()
        yield reader
    finally:
        connection.close()


def print_status(join: Join, *, as_json: bool, repeat: bool) -> None:
    """Print the numbers of a run once, or refresh them on a terminal until Ctrl-C."""
    with open_reader(join) as reader:
        reader.read(LISTEN_SECONDS)
        while True:
            found = reader.overview()
            clear = CLEAR * (repeat and sys.stdout.isatty())
            print(clear + (json.dumps(found) if as_json else render(found, "server")), flush=True)
            if not repeat:
                return
            reader.read(REFRESH_SECONDS)
