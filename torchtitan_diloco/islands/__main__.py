"""Server and state of a run of islands.

python -m torchtitan_diloco.islands serve --folder DIR
python -m torchtitan_diloco.islands status --join STRING
python -m torchtitan_diloco.islands leave NAME --join STRING
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.utils import STOP_SIGNALS, USER_ERROR


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "serve":
            return _serve(options)
        _ask(Join.parse(options.join), options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _parser() -> argparse.ArgumentParser:
    keep = "GB of parts, and as much of snapshots, that the server keeps on its disk"
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_diloco.islands", description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run a server, and print the join string of its run")
    serve.add_argument("--folder", type=Path, required=True, help="new, or that of the same run")
    serve.add_argument("--run", help="name of the run (default: a random one)")
    serve.add_argument("--host", help="address to listen on (default: 0.0.0.0)")
    serve.add_argument("--port", type=int, help="default: 4222")
    serve.add_argument("--address", help="name or address that islands dial (default: this host's)")
    serve.add_argument("--keep-gb", type=float, help=f"{keep} (default: 20)")
    status = commands.add_parser("status", help="print islands, rounds and what became of samples")
    status.add_argument("--json", action="store_true")
    status.add_argument("--once", action="store_true", help="do not refresh")
    leave = commands.add_parser("leave", help="ask an island to send its work and to leave")
    leave.add_argument("name", help="islands.name of the island")
    make = commands.add_parser("make", help="make the streams of a run on servers of your own")
    make.add_argument("--replicas", type=int, default=1, help="servers that have each stream")
    make.add_argument("--keep-gb", type=float, default=20.0, help=f"{keep} (default: 20)")
    for command in (status, leave, make):
        command.add_argument(
            "--join", required=True, help="join string of `serve`, or a file with it"
        )
    return parser


def _serve(options: argparse.Namespace) -> int:
    from torchtitan_diloco.islands.server import open_folder

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: sys.exit())
    server = open_folder(
        options.folder,
        run=options.run,
        host=options.host,
        port=options.port,
        address=options.address,
        keep_gb=options.keep_gb,
        say=lambda line: print(line, flush=True),
    )
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


def _ask(join: Join, options: argparse.Namespace) -> None:
    from torchtitan_diloco.islands import server, session, status

    session.check_installed()
    if options.command == "status":
        status.print_status(join, as_json=options.json, once=options.once)
    elif options.command == "leave":
        status.ask_to_leave(join, options.name)
    else:
        asyncio.run(server.make_streams(join, options.keep_gb, options.replicas))
        print(f"the streams of the run {join.run} are there")


if __name__ == "__main__":
    sys.exit(main())
