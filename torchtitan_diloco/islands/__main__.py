"""Serve, watch and change a run of islands.

.venv/bin/torchtitan-diloco islands serve FOLDER --address HOST
.venv/bin/torchtitan-diloco islands site FOLDER NAME
.venv/bin/torchtitan-diloco islands sync LOCATION
.venv/bin/torchtitan-diloco islands status --join LOCATION
.venv/bin/torchtitan-diloco islands watch --join LOCATION
.venv/bin/torchtitan-diloco islands change KEY VALUE --join LOCATION
.venv/bin/torchtitan-diloco islands leave NAME --join LOCATION
.venv/bin/torchtitan-diloco islands evict NAME --join LOCATION
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from torchtitan_diloco.base.process import ExitSignals, run_and_exit
from torchtitan_diloco.base.registry import add_imports_option
from torchtitan_diloco.base.user import (
    USER_ERROR,
    Parser,
    UserError,
    command_line,
    install_command,
)
from torchtitan_diloco.islands import changes, reader
from torchtitan_diloco.islands.bucket_folder import BucketFolder
from torchtitan_diloco.islands.changes import ADMIT
from torchtitan_diloco.islands.children import SCRATCH
from torchtitan_diloco.islands.console import say
from torchtitan_diloco.islands.run_settings import KEYS
from torchtitan_diloco.store.location import KINDS


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        code: int | None = options.act(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=command_line("islands"), description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)

    def add(name: str, act: Callable[[argparse.Namespace], int | None], text: str) -> Parser:
        description = f"{text[0].upper()}{text[1:]}."
        command: Parser = commands.add_parser(name, help=text, description=description)
        command.set_defaults(act=act)
        return command

    serve = add("serve", _serve, "serve a bucket of your own, and the syncer of the run in it")
    _add_server_arguments(serve)
    sync = add("sync", _sync, "decide for a run, and merge the parts of its islands")
    sync.add_argument("location", help=KINDS)
    sync.add_argument("--stay", action="store_true", help="go on after the end of the run")
    cores = "cores that average and encode fragments (default: 1)"
    sync.add_argument("--threads", type=int, default=1, help=cores)
    folder = f"folder for the newest versions in fp32 (default: {SCRATCH})"
    sync.add_argument("--scratch", type=Path, default=SCRATCH, help=folder)
    add_imports_option(sync)
    page = "serve a page about the run, and /metrics, to this machine"
    sync.add_argument("--http", metavar="PORT", help=page)
    site = add("site", _change_site, "give a site its own login, or remove it")
    site.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the bucket")
    site.add_argument("name", metavar="NAME", help="name of the site")
    action = site.add_mutually_exclusive_group()
    for flag, text in (
        ("renew", "give the site a new secret"),
        ("revoke", "remove the login of the site"),
    ):
        action.add_argument(f"--{flag}", action="store_const", const=flag, dest="change", help=text)
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
    for command in (status, watch, leave, evict, change):
        command.add_argument("--join", required=True, help=f"where the run is: {KINDS}")
    return parser


def _add_server_arguments(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the bucket")
    parser.add_argument(
        "--no-syncer",
        action="store_true",
        help="serve only a bucket, such as for checkpoint.mirror or for `islands sync` elsewhere",
    )
    add_imports_option(parser)
    parser.add_argument("--address", help="name or address that others connect to")
    parser.add_argument("--host", help="address to listen on (default: 0.0.0.0; for IPv6, ::)")
    parser.add_argument("--port", type=int, help="TCP port to listen on (default: 8333)")
    where = "(default: only to this machine, without TLS)"
    parser.add_argument(
        "--http", metavar="[HOST:]PORT", help=f"serve a page about the run, and /metrics {where}"
    )


# --- processes, and the folder of a bucket --------------------------------------------------------


def _serve(options: argparse.Namespace) -> None:
    """Serve a bucket until a signal ends this process in order."""
    try:
        from torchtitan_diloco.islands.bucket_server import serve
    except ImportError:
        raise UserError(f"install obstore: {install_command('islands')}") from None
    serve(
        options.folder,
        address=options.address,
        host=options.host,
        port=options.port,
        with_syncer=not options.no_syncer,
        http=options.http,
        check_signals=ExitSignals().check,
        say=say,
    )


def _sync(options: argparse.Namespace) -> int:
    """Run a syncer until the run has ended, and return the exit code. A signal ends it in order,
    and a second one at once."""
    from torchtitan_diloco.islands.syncing import sync  # needs torch

    if options.threads < 1:
        raise UserError(f"--threads {options.threads}: give at least 1")
    with ExitStack() as stack:
        if options.http is not None:
            from torchtitan_diloco.islands.page import serve_page

            page = stack.enter_context(closing(serve_page(options.location, options.http)))
            say(f"page of the run: {page.url}")
        stopped_by = sync(
            options.location,
            options.scratch,
            threads=options.threads,
            stays=options.stay,
            say=say,
        )
    return 128 + stopped_by if stopped_by else 0


def _change_site(options: argparse.Namespace) -> None:
    site = options.name
    path = BucketFolder(options.folder.expanduser()).change_site(site, options.change or "add")
    if options.change == "revoke":
        print(f"removed the login of {site}; a running `serve` refuses it within a second")
    else:
        print(f"Give {path}, which contains a secret, to {site} only; a running `serve` accepts it")


# --- the state of a run, and requests to it -------------------------------------------------------


def _show(options: argparse.Namespace) -> None:
    reader.print_status(options.join, as_json=options.json, repeat="repeat" in options)


def _ask_to_leave(options: argparse.Namespace) -> None:
    changes.leave(options.join, options.name)


def _evict(options: argparse.Namespace) -> None:
    changes.evict(options.join, options.name)


def _change(options: argparse.Namespace) -> None:
    changes.change(options.join, options.key, options.value)


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
