"""What a run is doing, from its log and its heartbeats: the commands `status` and `leave`."""

import json
import queue
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.events import (
    LEAVE,
    Connected,
    Disconnected,
    Event,
    Heard,
    Hint,
    LogRecord,
)
from torchtitan_diloco.islands.join import Join
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.utils import markdown_table

LISTEN_SECONDS = 3.0
"""Time to hear heartbeats before the first answer."""
REFRESH_SECONDS = 2.0
LEAVE_SECONDS = 60.0
READ_SECONDS = 30.0
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


class Watcher:
    """A reader of the log that takes no part in the run."""

    def __init__(self, connection: Connection, run: str) -> None:
        self.connection, self._run = connection, run
        self.state = State(None)
        self.heard = dict[str, tuple[Hint, float]]()
        """What each island told last, and when."""
        self.problem = ""
        self._last: int | None = None

    def watch(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                self._take(self.connection.events.get(timeout=left))
            except queue.Empty:
                return

    def catch_up(self) -> None:
        """Read what is in the log now."""
        end = time.monotonic() + READ_SECONDS
        while self._last is None or self.state.sequence < self._last:
            self.watch(0.1)
            if time.monotonic() > end:
                raise ValueError(f"the server does not send its log {self.problem}".strip())

    def owners(self, name: str) -> set[str]:
        """Return the incarnations of an island that own a slot."""
        owners = self.state.owners().values()
        return {owner for owner in owners if owner.partition("/")[0] == name}

    def _take(self, event: Event) -> None:
        match event:
            case LogRecord(sequence, subject, raw):
                self.state.read(sequence, subject, raw)
            case Heard(hint):
                self.heard[hint.incarnation] = hint, time.monotonic()
            case Connected(last):
                self._last, self.problem = last, ""
            case Disconnected(reason):
                self.problem = f"(no connection: {reason})"

    def summary(self) -> dict[str, Any]:
        state, now = self.state, time.monotonic()
        owned = {owner: slot for slot, owner in state.owners().items()}
        return {
            "run": self._run,
            "phase": _phase(state),
            "connection": self.problem or "ok",
            "total_tokens": state.facts.total_tokens if state.facts else None,
            "tokens_merged": max((fragment.clock for fragment in state.fragments), default=0),
            "islands": [
                _island(name, owned.get(name), self.heard.get(name), now)
                for name in sorted({*owned, *self.heard}, key=lambda one: owned.get(one, 1e9))
            ],
            "fragments": [
                {"version": one.version, "open": one.open is not None, "waiting": len(one.waiting)}
                for one in state.fragments
            ],
            "slots": [_slot(state, number) for number in range(len(state.slots))],
        }


def _phase(state: State) -> str:
    if state.facts is None:
        return "nothing has been written yet"
    return "ended" if state.ended else "running" if state.begun else "waits for islands"


def _island(
    name: str, slot: int | None, heard: tuple[Hint, float] | None, now: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"incarnation": name, "slot": slot, "heard_seconds_ago": None}
    if heard is not None:
        hint, at = heard
        seconds = hint.step * hint.step_seconds
        row |= {
            "heard_seconds_ago": round(now - at, 1),
            "step": hint.step,
            "tokens": hint.tokens,
            "tokens_per_second": round(hint.tokens / seconds) if seconds else None,
            "caught_up": hint.caught_up,
            "leaving": hint.leaving,
        }
    return row


def _slot(state: State, number: int) -> dict[str, Any]:
    """Return what became of a slot's samples, in the mean over the fragments."""
    slot, counts = state.slots[number], {"merged": 0, "lost": 0, "waiting": 0}
    for fragment, ledger in zip(state.fragments, slot.ledgers, strict=True):
        for span in ledger.spans:
            counts[span.fate] += span.end - span.start
        if (part := fragment.waiting_of(number)) is not None:
            counts["waiting"] += part.end - part.start
    means = {name: round(count / len(state.fragments)) for name, count in counts.items()}
    return {"slot": number, "owner": slot.owner, **means, "read_twice": slot.read_twice}


def render(found: dict[str, Any]) -> str:
    merged, total = found["tokens_merged"], found["total_tokens"]
    lines = [f"run {found['run']}: {found['phase']}; server: {found['connection']}"]
    if total:
        lines.append(f"tokens merged: {merged:,} of {total:,} ({merged / total:.1%})")
    lines += _table("islands", found["islands"], "no island is there")
    rows = [{"fragment": number, **row} for number, row in enumerate(found["fragments"])]
    lines += _table("rounds of fragments", rows, "none")
    return "\n".join(lines + _table("samples of slots", found["slots"], "none"))


def _table(title: str, rows: list[dict[str, Any]], empty: str) -> list[str]:
    if not rows:
        return ["", f"{title}: {empty}"]
    names = list({name: None for row in rows for name in row})
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    return ["", title, markdown_table([name.replace("_", " ") for name in names], cells)]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


@contextmanager
def _watching(join: Join) -> Iterator[Watcher]:
    connection = Connection(join, f"status/{secrets.token_hex(4)}")
    connection.start(0)
    try:
        watcher = Watcher(connection, join.run)
        watcher.catch_up()
        yield watcher
    finally:
        connection.close()


def print_status(join: Join, *, as_json: bool, once: bool) -> None:
    """Print once, or again and again on a terminal."""
    repeat = sys.stdout.isatty() and not once
    with _watching(join) as watcher:
        watcher.watch(LISTEN_SECONDS)
        while True:
            found = watcher.summary()
            text = json.dumps(found) if as_json else render(found)
            print(CLEAR * (repeat and not as_json) + text, flush=True)
            if not repeat:
                return
            watcher.watch(REFRESH_SECONDS)


def ask_to_leave(join: Join, name: str) -> None:
    """Ask an island to leave, and wait until its slot is free."""
    with _watching(join) as watcher:
        asked = watcher.owners(name)
        if not asked:
            names = {owner.partition("/")[0] for owner in watcher.state.owners().values()}
            raise ValueError(f"no island {name!r} is in the run; there are: {sorted(names)}")
        for incarnation in asked:
            watcher.connection.ask(incarnation, LEAVE)
        print(f"{name} has been asked to leave", flush=True)
        end = time.monotonic() + LEAVE_SECONDS
        while asked & watcher.owners(name):
            if time.monotonic() > end:
                raise ValueError(
                    f"{name} has not left within {LEAVE_SECONDS:g} s: if it is dead, its slot is "
                    "free for another island; if not, it may still be sending its work"
                )
            watcher.watch(0.2)
        print(f"{name} has left")
