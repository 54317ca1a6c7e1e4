"""What a run is doing, from its log and its heartbeats: the commands `status` and `leave`."""

import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.log import Outcome, State
from torchtitan_diloco.islands.members import Members, name_of
from torchtitan_diloco.islands.session import Leave
from torchtitan_diloco.utils import markdown_table

LISTEN_SECONDS = 3.0
"""Time to hear heartbeats before the first answer."""
REFRESH_SECONDS = 2.0
LEAVE_SECONDS = 60.0
READ_SECONDS = 30.0
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


class Reader:
    """A reader of the log that takes no part in the run."""

    def __init__(self, connection: Connection, note: Callable[[Outcome], object]) -> None:
        self.connection, self.state, self._note = connection, State(None), note

    def read(self, seconds: float = 0.0) -> None:
        """Read what comes in, at least for so long."""
        end = time.monotonic() + seconds
        while True:
            while self.connection.records:
                record = self.connection.records.popleft()
                self._note(self.state.read(record.sequence, record.raw))
            if time.monotonic() >= end:
                return
            self.connection.receive()


@contextmanager
def open_reader(join: Join, note: Callable[[Outcome], object] = lambda _: None) -> Iterator[Reader]:
    """Yield a reader that has read the whole log. `note` is given what became of each record."""
    connection = Connection(join, f"status/{secrets.token_hex(4)}")
    connection.start(0)
    try:
        connection.receive_log(READ_SECONDS)
        reader = Reader(connection, note)
        reader.read()
        yield reader
    finally:
        connection.close()


def summary(reader: Reader, run: str) -> dict[str, Any]:
    state, members = reader.state, reader.connection.members
    owned = {owner: slot for slot, owner in state.owners().items()}
    names = sorted({*owned, *members.heard}, key=lambda name: owned.get(name, len(state.slots)))
    phase = "ended" if state.ended else "running" if state.begun else "waits for islands"
    return {
        "run": run,
        "phase": phase if state.facts else "nothing has been written yet",
        "connection": reader.connection.problem or "ok",
        "total_tokens": state.facts.total_tokens if state.facts else None,
        "tokens_merged": max((fragment.clock for fragment in state.fragments), default=0),
        "islands": [_island(members, name, owned.get(name)) for name in names],
        "fragments": [
            {"version": one.version, "open": one.open is not None, "waiting": len(one.waiting)}
            for one in state.fragments
        ],
        "slots": [_slot(state, number) for number in range(len(state.slots))],
    }


def _island(members: Members, name: str, slot: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"incarnation": name, "slot": slot, "heard_seconds_ago": None}
    if name in members.heard:
        hint, ago = members.heard[name].hint, time.monotonic() - members.heard[name].heard
        seconds = hint.step * hint.step_seconds
        row |= {
            "heard_seconds_ago": round(ago, 1),
            "step": hint.step,
            "tokens": hint.tokens,
            "tokens_per_second": round(hint.tokens / seconds) if seconds else None,
            "caught_up": hint.caught_up,
            "leaving": hint.leaving,
        }
    return row


def _slot(state: State, number: int) -> dict[str, Any]:
    """Return what became of a slot's samples, in the mean over the fragments."""
    slot, counts = state.slots[number], Counter(merged=0, lost=0, waiting=0)
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
    fragments = [{"fragment": number, **row} for number, row in enumerate(found["fragments"])]
    tables = {"islands": found["islands"], "rounds of fragments": fragments}
    for title, rows in (tables | {"samples of slots": found["slots"]}).items():
        names = list({name: None for row in rows for name in row})
        cells = [[_cell(row.get(name)) for name in names] for row in rows]
        table = markdown_table([name.replace("_", " ") for name in names], cells)
        lines += ["", title, table if rows else "none"]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def print_status(join: Join, *, as_json: bool, once: bool) -> None:
    """Print once, or again and again on a terminal."""
    repeat = sys.stdout.isatty() and not once
    with open_reader(join) as reader:
        reader.read(LISTEN_SECONDS)
        while True:
            found = summary(reader, join.run)
            text = json.dumps(found) if as_json else render(found)
            print(CLEAR * (repeat and not as_json) + text, flush=True)
            if not repeat:
                return
            reader.read(REFRESH_SECONDS)


def ask_to_leave(join: Join, name: str) -> None:
    """Ask an island to leave, and wait until its slot is free."""
    with open_reader(join) as reader:
        owners = reader.state.owners().values()
        asked = {owner for owner in owners if name_of(owner) == name}
        if not asked:
            names = sorted({name_of(owner) for owner in owners})
            raise ValueError(f"no island {name!r} is in the run; there are: {names}")
        for incarnation in asked:
            reader.connection.ask(incarnation, Leave(sender="status"))
        print(f"{name} has been asked to leave", flush=True)
        end = time.monotonic() + LEAVE_SECONDS
        while asked.intersection(reader.state.owners().values()):
            if time.monotonic() > end:
                raise ValueError(
                    f"{name} has not left within {LEAVE_SECONDS:g} s: if it is dead, its slot is "
                    "free for another island; if not, it may still be sending its work"
                )
            reader.read(0.2)
        print(f"{name} has left")
