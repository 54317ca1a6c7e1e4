"""Server and state of a run of islands.

.venv/bin/torchtitan-diloco islands serve --folder DIR
.venv/bin/torchtitan-diloco islands status --join STRING
.venv/bin/torchtitan-diloco islands leave NAME --join STRING
"""

import argparse
import asyncio
import json
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.inbox import Leave
from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import Member
from torchtitan_diloco.islands.records import name_of
from torchtitan_diloco.islands.server import make_streams, open_folder
from torchtitan_diloco.islands.session import check_installed
from torchtitan_diloco.log import STOP_SIGNALS, USER_ERROR, UserError, command_line, markdown_table

LISTEN_SECONDS = 3.0
"""Time to receive heartbeats before the first output."""
REFRESH_SECONDS = 2.0
LEAVE_SECONDS = 60.0
READ_SECONDS = 30.0
TABLES = {"islands": "islands", "rounds of fragments": "fragments", "samples of slots": "slots"}
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "serve":
            return _serve(options)
        check_installed()
        join = Join.parse(options.join)
        if options.command == "status":
            print_status(join, as_json=options.json, once=options.once)
        elif options.command == "leave":
            ask_to_leave(join, options.name)
        else:
            asyncio.run(make_streams(join, options.keep_gb, options.replicas))
            print(f"the streams of the run {join.run} are there")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _parser() -> argparse.ArgumentParser:
    keep = "GB of parts, and as much of snapshots, that the server keeps on its disk"
    parser = argparse.ArgumentParser(
        prog=command_line("islands"), description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run a server, and print the join string of its run")
    serve.add_argument("--folder", type=Path, required=True, help="new, or that of the same run")
    serve.add_argument("--run", help="name of the run (default: a random one)")
    serve.add_argument("--host", help="address to listen on (default: 0.0.0.0; :: for IPv6, too)")
    serve.add_argument("--port", type=int, help="default: 4222")
    serve.add_argument("--address", help="name or address that islands dial (default: this host's)")
    serve.add_argument("--keep-gb", type=float, help=f"{keep} (default: 20)")
    status = commands.add_parser("status", help="print islands, rounds and what became of samples")
    status.add_argument("--json", action="store_true")
    status.add_argument("--once", action="store_true", help="do not refresh")
    leave = commands.add_parser("leave", help="ask an island to send its work and to leave")
    leave.add_argument("name", help="islands.name of the island")
    make = commands.add_parser("make", help="make the streams of a run on servers of your own")
    replicas = "servers that have each stream"
    make.add_argument("--replicas", type=int, choices=range(1, 6), default=1, help=replicas)
    make.add_argument("--keep-gb", type=float, default=20.0, help=f"{keep} (default: 20)")
    for command in (status, leave, make):
        command.add_argument(
            "--join", required=True, help="join string of `serve`, or a file with it"
        )
    return parser


def _serve(options: argparse.Namespace) -> int:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: sys.exit())
    names = "run", "host", "port", "address", "keep_gb"
    chosen = {name: getattr(options, name) for name in names}
    server = open_folder(options.folder, say=partial(print, flush=True), **chosen)
    try:
        process = server.start()
        print(server.join)
        print(
            f"Give this line, which contains a password, to each island: --islands.join '...', or "
            f"the path of a file with it, such as {server.join_file}. Islands dial "
            f"{server.join.addresses[0]}. Ctrl-C ends the server.",
            flush=True,
        )
        code = process.wait()
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        server.stop()
    print(f"error: nats-server ended by itself, with code {code}", file=sys.stderr)
    return 1


# --- status and leave -----------------------------------------------------------------------------


class Reader:
    """Reader of the log that does not take part in the run."""

    def __init__(
        self, connection: Connection, state: State, note: Callable[[Outcome], object]
    ) -> None:
        self.connection, self.state, self._note = connection, state, note

    def read(self, seconds: float = 0.0) -> None:
        """Read incoming records for at least this long."""
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
    """Yield a reader that has read the log since the latest stored state, or since its beginning.

    `note` receives the outcome of each record that is read.
    """
    connection = Connection(join, f"status/{secrets.token_hex(4)}")
    connection.connect()
    try:
        stored = connection.newest_state()
        state = State.decode(stored) if stored else State()
        state.verifies = False
        connection.follow(state.sequence, state.newest)
        connection.receive_log(READ_SECONDS)
        reader = Reader(connection, state, note)
        reader.read()
        yield reader
    finally:
        connection.close()


def summary(reader: Reader, run: str) -> dict[str, Any]:
    state, heard = reader.state, reader.connection.members.heard.copy()
    owned = {owner: slot for slot, owner in state.owners().items()}
    names = sorted({*owned, *heard}, key=lambda name: owned.get(name, len(state.slots)))
    phase = "ended" if state.ended else "running" if state.begun else "waits for islands"
    fragments = [
        {"fragment": number, "version": one.version, "open": one.open is not None}
        | {"waiting": len(one.waiting)}
        for number, one in enumerate(state.fragments)
    ]
    return {
        "run": run,
        "phase": phase if state.facts else "nothing has been written yet",
        "connection": reader.connection.problem or "ok",
        "total_tokens": state.facts.total_tokens if state.facts else None,
        "tokens_merged": max((fragment.clock for fragment in state.fragments), default=0),
        "islands": [_island(heard.get(name), name, owned.get(name)) for name in names],
        "fragments": fragments,
        "slots": [_slot(state, number) for number in range(len(state.slots))],
    }


def _island(member: Member | None, name: str, slot: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"incarnation": name, "slot": slot, "heard_seconds_ago": None}
    if member is not None:
        hint = member.hint
        seconds = hint.step * hint.step_seconds
        row |= {
            "heard_seconds_ago": round(time.monotonic() - member.heard, 1),
            "step": hint.step,
            "tokens": hint.tokens,
            "tokens_per_second": round(hint.tokens / seconds) if seconds else None,
            "caught_up": hint.caught_up,
            "leaving": hint.leaving,
        }
    return row


def _slot(state: State, number: int) -> dict[str, Any]:
    """Count the samples of a slot by their fate, averaged over the fragments."""
    slot, counts = state.slots[number], Counter(merged=0, lost=0, waiting=0)
    rounds, entries, behind = 0, 0, 0
    for fragment, ledger in zip(state.fragments, slot.ledgers, strict=True):
        counts.update(merged=ledger.merged, lost=ledger.lost)
        if (part := fragment.waiting_of(number)) is not None:
            counts["waiting"] += part.end - part.start
        rounds, entries = rounds + fragment.version - ledger.since, entries + ledger.entries
        behind = max(behind, fragment.version - max(ledger.merged_in, ledger.since))
    means = {name: round(count / len(state.fragments)) for name, count in counts.items()}
    share = f"{entries / rounds:.0%}" if slot.owner and rounds else None
    row = {"slot": number, "owner": slot.owner, **means, "read_twice": slot.read_twice}
    return row | {"part_in_rounds": share, "rounds_since_last_part": behind}


def render(found: dict[str, Any]) -> str:
    merged, total = found["tokens_merged"], found["total_tokens"]
    lines = [f"run {found['run']}: {found['phase']}; server: {found['connection']}"]
    if total:
        lines.append(f"tokens merged: {merged:,} of {total:,} ({merged / total:.1%})")
    for title, key in TABLES.items():
        names = list({name: None for row in found[key] for name in row})
        cells = [[_cell(row.get(name)) for name in names] for row in found[key]]
        table = markdown_table([name.replace("_", " ") for name in names], cells)
        lines += ["", title, table if cells else "none"]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def print_status(join: Join, *, as_json: bool, once: bool) -> None:
    """Print the status once, or repeatedly on a terminal."""
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
    """Ask an island to leave and wait until its slot is free."""
    with open_reader(join) as reader:
        owners = reader.state.owners().values()
        asked = {owner for owner in owners if name_of(owner) == name}
        if not asked:
            names = ", ".join(sorted({name_of(owner) for owner in owners})) or "none"
            raise UserError(f"no island {name!r} is in the run; there are: {names}")
        for incarnation in asked:
            reader.connection.ask(incarnation, Leave(sender="status"))
        print(f"{name} has been asked to leave", flush=True)
        end = time.monotonic() + LEAVE_SECONDS
        while asked.intersection(reader.state.owners().values()):
            if time.monotonic() > end:
                raise UserError(
                    f"{name} has not left within {LEAVE_SECONDS:g} s: if it is dead, its slot is "
                    "free for another island; if not, it may still be sending its work"
                )
            reader.read(0.2)
        print(f"{name} has left")


if __name__ == "__main__":
    sys.exit(main())
