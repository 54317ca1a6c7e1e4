"""Server and state of a run of islands.

.venv/bin/torchtitan-diloco islands serve --folder DIR
.venv/bin/torchtitan-diloco islands site NAME --folder DIR
.venv/bin/torchtitan-diloco islands check DIR
.venv/bin/torchtitan-diloco islands status --join STRING
.venv/bin/torchtitan-diloco islands watch --join STRING
.venv/bin/torchtitan-diloco islands leave NAME --join STRING
.venv/bin/torchtitan-diloco islands change KEY VALUE --join STRING
"""

import argparse
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from torchtitan_diloco.islands.changes import CHANGEABLE, parse_change, parse_value, settings_of
from torchtitan_diloco.islands.check import check_log
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.inbox import Leave
from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.page import PageServer
from torchtitan_diloco.islands.reader import open_reader, print_status
from torchtitan_diloco.islands.records import encode, name_of
from torchtitan_diloco.islands.server import Server, make_streams, open_folder
from torchtitan_diloco.islands.server_folder import (
    ISLAND,
    LOOPBACK,
    SiteChange,
    change_site,
    files_of,
    join_file,
    read_settings,
)
from torchtitan_diloco.log import STOP_SIGNALS, USER_ERROR, Parser, UserError, command_line

LEAVE_SECONDS, CHANGE_SECONDS = 60.0, 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "serve":
            _serve(options)
        elif options.command == "check":
            return _check(options.folder)
        elif options.command == "site":
            _change_site(options)
        else:
            _use_join(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _use_join(options: argparse.Namespace) -> None:
    join = Join.parse(options.join)
    if options.command in ("status", "watch"):
        repeat = options.command == "watch"
        print_status(join, as_json=not repeat and options.json, repeat=repeat)
    elif options.command == "leave":
        ask_to_leave(join, options.name)
    elif options.command == "change":
        change(join, options.key, options.value)
    else:
        make_streams(join, options.keep_gb, options.replicas)
        print(f"the streams of the run {join.run} are there")


def _parser() -> argparse.ArgumentParser:
    keep = "GB of parts, and as much of snapshots, that the server keeps on its disk"
    parser = Parser(prog=command_line("islands"), description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run a server, and print the join string of its run")
    serve.add_argument("--folder", type=Path, required=True, help="new, or that of the same run")
    serve.add_argument("--run", help="name of the run (default: a random one)")
    serve.add_argument("--host", help="address to listen on (default: 0.0.0.0; :: for IPv6, too)")
    serve.add_argument("--port", type=int, help="default: 4222")
    serve.add_argument("--address", help="name or address that islands dial (default: this host's)")
    serve.add_argument("--keep-gb", type=float, help=f"{keep} (default: 20)")
    where = "(default: of this machine only, without TLS)"
    serve.add_argument(
        "--http", metavar="[HOST:]PORT", help=f"serve a page of the run, and /metrics {where}"
    )
    site = commands.add_parser("site", help="give a site a login of its own, or take it away")
    site.add_argument("name")
    site.add_argument("--folder", type=Path, required=True, help="that of `serve`")
    action = site.add_mutually_exclusive_group()
    action.add_argument("--renew", action="store_true", help="give it another password")
    action.add_argument("--revoke", action="store_true", help="remove its login")
    check = commands.add_parser("check", help="read the whole log of a folder, such as a backup")
    check.add_argument("folder", type=Path, help="folder of a server that is not running")
    status = commands.add_parser("status", help="print islands, rounds and what became of samples")
    status.add_argument("--json", action="store_true")
    watch = commands.add_parser("watch", help="show the same, refreshed every second")
    leave = commands.add_parser("leave", help="ask an island to send its work and to leave")
    leave.add_argument("name", help="islands.name of the island")
    change = commands.add_parser("change", help="change a setting of the run while it goes on")
    change.add_argument("key", help=f"one of {', '.join(CHANGEABLE)}")
    change.add_argument("value")
    make = commands.add_parser("make", help="make the streams of a run on servers of your own")
    replicas = "servers that have each stream"
    make.add_argument("--replicas", type=int, choices=range(1, 6), default=1, help=replicas)
    make.add_argument("--keep-gb", type=float, default=20.0, help=f"{keep} (default: 20)")
    for command in (status, watch, leave, change, make):
        command.add_argument(
            "--join", required=True, help="join string of `serve`, or a file with it"
        )
    return parser


def _serve(options: argparse.Namespace) -> NoReturn:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: sys.exit())
    names = "run", "host", "port", "address", "keep_gb"
    chosen = {name: getattr(options, name) for name in names}
    server = open_folder(options.folder, say=partial(print, flush=True), **chosen)
    page: PageServer | None = None
    try:
        server.start()
        if ISLAND in server.joins:
            print(server.join)
            print(
                f"Give this line, which contains a password, to each island: --islands.join '...', "
                f"or the path of a file with it, such as {server.join_file}. Islands dial "
                f"{server.join.addresses[0]}. Ctrl-C ends the server."
            )
        print(f"sites with a login: {', '.join(server.joins) or 'none'}", flush=True)
        if options.http:
            page = server.open_page(options.http)
            print(f"page of the run: {page.url}, for these logins and their passwords", flush=True)
        threading.Thread(target=_print_check, args=(server,), daemon=True).start()
        server.keep_running()
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if page is not None:
            page.close()
        server.stop()


def _print_check(server: Server) -> bool:
    """Check the log of a running server. Return whether it is whole."""
    try:
        found = check_log(server.admin)
    except Exception as error:  # the server may have ended
        print(f"the log could not be checked: {error}", flush=True)
        return False
    print("\n".join(found.lines()), flush=True)
    return not found.problems


def _check(folder: Path) -> int:
    """Check the log of a folder, whose server is not running."""
    folder = folder.absolute()
    settings = read_settings(folder)
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    private = msgspec.structs.replace(settings, host=LOOPBACK, port=port)
    server = Server(folder, private, partial(print, flush=True))
    with files_of(folder):
        server.launch()
    try:
        return 0 if _print_check(server) else 1
    finally:
        server.stop()


def _change_site(options: argparse.Namespace) -> None:
    folder, site = options.folder.absolute(), options.name
    change: SiteChange = "revoke" if options.revoke else "renew" if options.renew else "add"
    with files_of(folder):
        join = change_site(folder, site, change)
    if join is None:
        print(f"{site} has no login any more; a running `serve` disconnects it")
    else:
        print(join)
        print(
            f"Give this line, which contains a password, to the islands of {site} only, or the "
            f"file {join_file(folder, site)}."
        )


# --- requests to a run ----------------------------------------------------------------------------


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


def change(join: Join, key: str, value: str) -> None:
    """Append a change, and wait until it is read back."""
    parse_value(key, value)  # refuses a mistake without a connection
    outcomes = list[Outcome]()
    with open_reader(join, outcomes.append) as reader:
        if (facts := reader.state.facts) is None:
            raise UserError("the run has not begun, so islands still set their own settings")
        record, before = parse_change(facts, key, value), settings_of(facts).get(key)
        outcomes.clear()  # an equal change may have been made before
        reader.connection.append(encode(record))
        end = time.monotonic() + CHANGE_SECONDS
        while not (found := [one for one in outcomes if one.record == record]):
            if time.monotonic() > end:
                raise UserError(
                    f"the change was not read back within {CHANGE_SECONDS:g} s: try again"
                )
            reader.read(0.1)
        if found[-1].void:
            raise UserError(f"{key} = {value}: {found[-1].void}")
    print(f"the run goes on with {key} = {record.value} (before: {before})")


if __name__ == "__main__":
    sys.exit(main())
