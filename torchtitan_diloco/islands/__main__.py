"""Serve, watch and change a run of islands.

.venv/bin/torchtitan-diloco islands serve FOLDER --address HOST
.venv/bin/torchtitan-diloco islands site FOLDER NAME
.venv/bin/torchtitan-diloco islands serve --folder DIR
.venv/bin/torchtitan-diloco islands sync LOCATION
.venv/bin/torchtitan-diloco islands site NAME --folder DIR
.venv/bin/torchtitan-diloco islands check DIR
.venv/bin/torchtitan-diloco islands status --join LOCATION
.venv/bin/torchtitan-diloco islands watch --join LOCATION
.venv/bin/torchtitan-diloco islands change KEY VALUE --join LOCATION
.venv/bin/torchtitan-diloco islands leave NAME --join LOCATION
.venv/bin/torchtitan-diloco islands evict NAME --join LOCATION
"""

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import NoReturn

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.process import STOP_SIGNALS, run_and_exit
from torchtitan_diloco.base.user import (
    USER_ERROR,
    Parser,
    UserError,
    command_line,
    install_command,
)
from torchtitan_diloco.islands import store_changes, store_reader
from torchtitan_diloco.islands.bucket_folder import BucketFolder, Change
from torchtitan_diloco.islands.changes import parse_change, parse_value, settings_of
from torchtitan_diloco.islands.children import SCRATCH
from torchtitan_diloco.islands.config import Join, is_location
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.reader import open_reader, print_status
from torchtitan_diloco.islands.records import Close, Leave, encode, name_of
from torchtitan_diloco.islands.server import Server, free_port, make_streams, open_folder
from torchtitan_diloco.islands.server_folder import ISLAND, LOOPBACK, Folder
from torchtitan_diloco.islands.session import REMEDY, GapError, TrimmedError
from torchtitan_diloco.islands.store_changes import ADMIT
from torchtitan_diloco.islands.store_settings import KEYS

LEAVE_SECONDS, CHANGE_SECONDS, CHECK_SECONDS = 60.0, 10.0, 600.0
say = partial(print, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if "join" in options and not is_location(options.join):
            options.join = Join.parse(options.join)
        is_good = options.act(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 1 if is_good is False else 0


KEEP = "GB of parts, and as many of snapshots, that the server keeps on disk (default: 20)"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=command_line("islands"), description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)

    def add(name: str, act: Callable[[argparse.Namespace], object], text: str) -> Parser:
        description = f"{text[0].upper()}{text[1:]}."
        command: Parser = commands.add_parser(name, help=text, description=description)
        command.set_defaults(act=act)
        return command

    serve = add("serve", _serve, "serve a bucket of your own, or the log of a run")
    _add_server_arguments(serve)
    sync = add("sync", _sync, "decide for a run in a store, and merge the parts of its islands")
    sync.add_argument("location", help="a folder, a join file, s3://, gs:// or az://")
    sync.add_argument("--stay", action="store_true", help="go on after the end of the run")
    cores = "cores that average and encode fragments (default: 1)"
    sync.add_argument("--threads", type=int, default=1, help=cores)
    folder = f"folder for the newest versions in fp32 (default: {SCRATCH})"
    sync.add_argument("--scratch", type=Path, default=SCRATCH, help=folder)
    page = "serve a page about the run, and /metrics, to this machine"
    sync.add_argument("--http", metavar="PORT", help=page)
    site = add("site", _change_site, "give a site its own login, or remove it")
    site.add_argument(
        "words", nargs="+", metavar="[FOLDER] NAME", help="folder of a bucket, and name of the site"
    )
    site.add_argument("--folder", type=Path, help="folder of a log")
    action = site.add_mutually_exclusive_group()
    for flag, text in (
        ("renew", "give the site a new password"),
        ("revoke", "remove the login of the site"),
    ):
        action.add_argument(f"--{flag}", action="store_const", const=flag, dest="change", help=text)
    check = add(
        "check",
        _check,
        "read the whole log in a folder, such as a backup, and report missing records",
    )
    check.add_argument("folder", type=Path, help="folder of a server, which must not be running")
    status = add("status", _show, "print the state of islands, rounds and samples")
    status.add_argument("--json", action="store_true", help="print JSON for programs")
    watch = add("watch", _show, "show the state of the run, refreshed every second")
    watch.set_defaults(json=False, repeat=True)
    leave = add("leave", _ask_to_leave, "ask an island to send its work and leave")
    leave.add_argument("name", help="islands.name of the island")
    evict = add("evict", _evict, "take the slot of an island, and refuse its name from then on")
    evict.add_argument("name", help="islands.name of the island")
    change = add("change", _change, "change a setting during the run")
    change.add_argument("key", help=f"one of {', '.join(KEYS)}; or {ADMIT}")
    change.add_argument("value", help=f"its new value; for {ADMIT}, an island that was evicted")
    make = add("make", _make, "create the streams of a run on your own servers")
    replicas = "number of servers that store each stream"
    make.add_argument("--replicas", type=int, choices=range(1, 6), default=1, help=replicas)
    make.add_argument("--keep-gb", type=float, default=20.0, help=KEEP)
    for command in (status, watch, leave, evict, change, make):
        command.add_argument(
            "--join",
            required=True,
            help="where the run is: a folder, a join file, s3://, gs:// or az://",
        )
    return parser


def _add_server_arguments(parser: Parser) -> None:
    bucket = parser.add_argument_group("a bucket of your own")
    bucket.add_argument("bucket", nargs="?", type=Path, metavar="FOLDER", help="its folder")
    bucket.add_argument(
        "--no-syncer",
        action="store_true",
        help="serve only a bucket, such as for checkpoint.mirror or for `islands sync` elsewhere",
    )
    both = parser.add_argument_group("both")
    both.add_argument("--address", help="name or address that others connect to")
    both.add_argument("--host", help="address to listen on (default: 0.0.0.0; for IPv6, ::)")
    both.add_argument(
        "--port", type=int, help="TCP port to listen on (default: 8333; of a log, 4222)"
    )
    where = "(default: only to this machine, without TLS)"
    both.add_argument(
        "--http", metavar="[HOST:]PORT", help=f"serve a page about the run, and /metrics {where}"
    )
    log = parser.add_argument_group("the log of a run")
    log.add_argument(
        "--folder", type=Path, help="a new folder, or the folder of the run to continue"
    )
    log.add_argument("--run", help="name of the run (default: a random one)")
    log.add_argument("--keep-gb", type=float, help=KEEP)


# --- the server and its folder --------------------------------------------------------------------


def _serve(options: argparse.Namespace) -> None:
    if (options.bucket is None) == (options.folder is None):
        raise UserError("give either FOLDER, to serve a bucket, or --folder, to serve a log")
    if options.bucket is not None:
        _serve_bucket(options)
    from torchtitan_diloco.islands.page import PageServer, page_address

    address = page_address(options.http) if options.http else None
    _exit_on_signals()
    names = "run", "host", "port", "address", "keep_gb"
    server = open_folder(options.folder, say=say, **{name: vars(options)[name] for name in names})
    page: PageServer | None = None
    try:
        server.start()
        if address is not None:  # which may be taken: an error, before a join string is printed
            page = PageServer(server, *address)
        if ISLAND in server.joins:
            say(_invitation(server))
        say(f"sites with a login: {', '.join(server.joins) or 'none'}")
        if page is not None:
            say(f"page of the run: {page.url}, for these logins and their passwords")
        threading.Thread(target=_print_check, args=(server.admin,), daemon=True).start()
        server.keep_running()
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        logger.setLevel(logging.ERROR)  # connections of this process lose the server that it ends
        if page is not None:
            page.close()
        server.stop()


def _serve_bucket(options: argparse.Namespace) -> NoReturn:
    for name in ("run", "keep_gb"):
        if vars(options)[name] is not None:
            raise UserError(f"--{name.replace('_', '-')} is only for a log: leave it out")
    try:
        from torchtitan_diloco.islands.bucket_server import serve
    except ImportError:
        raise UserError(f"install obstore: {install_command('islands')}") from None
    _exit_on_signals()
    serve(
        options.bucket,
        address=options.address,
        host=options.host,
        port=options.port,
        with_syncer=not options.no_syncer,
        http=options.http,
        say=say,
    )


def _exit_on_signals() -> None:
    """Let signals that stop a run end this process in order."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: sys.exit())


def _invitation(server: Server) -> str:
    """Describe how islands join. The password is only shown on a terminal, because journals keep
    output."""
    file, address = server.join_file(), server.join.addresses[0]
    if sys.stdout.isatty():
        text = f"{server.join}\nGive this line, which contains a password, to each island: "
        text += f"--islands.join '...', or the path of a file with it, such as {file}."
    else:
        text = f"The join string, which contains a password, is in {file}. Give this file to each "
        text += "island: --islands.join FILE."
    return f"{text} Islands connect to {address}. Ctrl-C ends the server."


def _sync(options: argparse.Namespace) -> None:
    """Run a syncer until the run has ended. A signal ends it in order, and a second one at once."""
    from torchtitan_diloco.islands.syncing import sync  # needs torch

    if options.threads < 1:
        raise UserError(f"--threads {options.threads}: give at least 1")
    with ExitStack() as stack:
        if options.http is not None:
            from torchtitan_diloco.islands.store_page import serve_page

            page = stack.enter_context(closing(serve_page(options.location, options.http)))
            say(f"page of the run: {page.url}")
        sync(
            options.location,
            options.scratch,
            threads=options.threads,
            stays=options.stay,
            say=say,
        )


def _change_site(options: argparse.Namespace) -> None:
    *paths, site = options.words
    if len(paths) + (options.folder is not None) != 1:
        raise UserError("give the FOLDER of a bucket and the NAME of a site, or NAME and --folder")
    if paths:
        _change_site_of_bucket(BucketFolder(Path(paths[0]).expanduser()), site, options.change)
        return
    folder = Folder(options.folder)
    join = folder.change_site(site, options.change or "add")
    if join is None:
        print(f"removed the login of {site}; a running `serve` disconnects it")
    else:
        print(join)
        print(
            f"Give this line, which contains a password, to the islands of {site} only, or the "
            f"file {folder.join_file(site)}."
        )


def _change_site_of_bucket(folder: BucketFolder, site: str, change: Change | None) -> None:
    path = folder.change_site(site, change or "add")
    if change == "revoke":
        print(f"removed the login of {site}; a running `serve` refuses it within a second")
    else:
        print(f"Give {path}, which contains a secret, to {site} only; a running `serve` accepts it")


def _check(options: argparse.Namespace) -> bool:
    """Check the log of a folder, whose server is not running."""
    server = Server(options.folder, say)
    server.settings.host, server.settings.port = LOOPBACK, free_port()
    server.launch()
    try:
        return _print_check(server.admin)
    finally:
        server.stop()


def _print_check(admin: Join) -> bool:
    """Read the whole log of a running server and describe it. Return whether it is complete."""
    connection, state, problem = Connection(admin, "check/1"), State(), ""
    try:
        connection.connect()
        stored = State.decode(connection.newest_state() or b"{}")
        if stored.sequence > connection.last:
            problem = f"an island has already read {stored.sequence} records: {REMEDY}"
        state = stored if connection.first > 1 else state
        connection.follow(state.sequence)
        connection.receive_log(CHECK_SECONDS)
    except TrimmedError as error:
        problem = f"records 1 to {error.first - 1} are missing: {REMEDY}"
    except GapError as error:
        problem = str(error)
    except Exception as error:  # the server may have ended
        say(f"the log could not be checked: {error}")
        return False
    finally:
        connection.close()
    state.verifies, begun_at, void = False, state.sequence, list[int]()
    for sequence, raw, *_ in connection.records:
        outcome = state.read(sequence, raw)
        if outcome.record is None:
            void.append(sequence)
        elif continues_another(outcome, state):
            problem = problem or (
                f"record {sequence} continues a version that no record creates: {REMEDY}"
            )
    what = f"read from {begun_at + 1:,} to {state.sequence:,}" if state.sequence else "it is empty"
    say(f"log: {connection.last:,} records, {what}")
    if state.facts is not None:
        versions = ", ".join(str(fragment.version) for fragment in state.fragments)
        merged, total = max(state.clocks, default=0), state.facts.total_tokens
        say(f"versions {versions}; tokens merged: {merged:,} of {total:,}")
    if void:
        say(f"islands skip {len(void)} damaged or foreign records, such as record {void[0]}")
    if problem:
        say(f"PROBLEM: {problem}")
    return not problem


def continues_another(outcome: Outcome, state: State) -> bool:
    """Return whether a close is void because it continues a version that the log does not
    create."""
    close = outcome.record
    if not isinstance(close, Close) or not outcome.void or close.fragment >= len(state.fragments):
        return False
    fragment = state.fragments[close.fragment]
    return close.version > fragment.version and close.previous != fragment.head


# --- requests to a run ----------------------------------------------------------------------------


def _make(options: argparse.Namespace) -> None:
    make_streams(options.join, options.keep_gb, options.replicas)
    print(f"created the streams of the run {options.join.run}")


def _show(options: argparse.Namespace) -> None:
    repeat = "repeat" in options
    if isinstance(options.join, str):
        store_reader.print_status(options.join, as_json=options.json, repeat=repeat)
        return
    print_status(options.join, as_json=options.json, repeat=repeat)


def _ask_to_leave(options: argparse.Namespace) -> None:
    """Ask an island to leave and wait until its slot is free."""
    name = options.name
    if isinstance(options.join, str):
        store_changes.leave(options.join, name)
        return
    with open_reader(options.join) as reader:
        if reader.state.ended:
            raise UserError(f"island {name} cannot leave: the run {reader.state.run} has ended")
        owners = reader.state.owners().values()
        asked = {owner for owner in owners if name_of(owner) == name}
        if not asked:
            names = ", ".join(sorted({name_of(owner) for owner in owners})) or "none"
            raise UserError(f"the run has no island {name!r}; it has: {names}")
        say(f"asked {name} to leave")
        end = time.monotonic() + LEAVE_SECONDS
        while left := asked.intersection(reader.state.owners().values()):
            for incarnation in left:  # again and again, as it may just be connecting
                reader.connection.ask(incarnation, Leave(sender="status"))
            if time.monotonic() > end:
                raise UserError(
                    f"{name} has not left within {LEAVE_SECONDS:g} s: if it is "
                    "dead, another island can take its slot; otherwise, it may still "
                    "be sending its work"
                )
            reader.read(0.2)
        print(f"{name} has left")


def _evict(options: argparse.Namespace) -> None:
    if not isinstance(options.join, str):
        raise UserError("the islands of a run with a log evict an island by votes: islands.action")
    store_changes.evict(options.join, options.name)


def _change(options: argparse.Namespace) -> None:
    """Append a change, and wait until it is read back."""
    key, value = options.key, options.value
    if isinstance(options.join, str):
        store_changes.change(options.join, key, value)
        return
    parse_value(key, value)  # refuses a mistake without a connection
    outcomes = list[Outcome]()
    with open_reader(options.join, outcomes.append) as reader:
        if (facts := reader.state.facts) is None:
            raise UserError("the run has not started: set this on the islands instead")
        record, before = parse_change(facts, key, value), settings_of(facts).get(key)
        outcomes.clear()  # an equal change may have been made before
        reader.connection.append(encode(record))
        end = time.monotonic() + CHANGE_SECONDS
        while not (found := [one for one in outcomes if one.record == record]):
            if time.monotonic() > end:
                raise UserError(
                    f"the server did not confirm the change within {CHANGE_SECONDS:g} s: try again"
                )
            reader.read(0.1)
        if found[-1].void:
            raise UserError(f"{key} = {value}: {found[-1].void}")
    print(f"the run continues with {key} = {record.value} (before: {before})")


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
