"""A Python of a virtual environment that runs this package in forks, for commands in a shell."""

import json
import shlex
import socketserver
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from tests.programs import Program

PACKAGE = "torchtitan_diloco"
COMMAND = "torchtitan-diloco"
SCRIPT = f"""#!/bin/sh
case "$*" in
"-u -m {PACKAGE} "* | "-m {PACKAGE} "* | */bin/{COMMAND}\\ *)
    exec {{python}} -S -E {{client}} "$@" ;;
esac
exec {{python}} "$@"
"""
"""The program that takes the place of the interpreter."""
CLIENT = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    code, printed = json.load(server.makefile())
sys.stdout.write(printed)
sys.exit(code if code >= 0 else 128 - code)
"""


@contextmanager
def package_in_forks(environment: Path) -> Iterator[None]:
    """Let the commands of this package in a virtual environment be programs of `tests.programs`.

    They have the arguments, the folder, the variables and the exit codes of the shell. Their output
    and their error output are both printed as output, when they have ended. All other commands run
    in the interpreter of the environment.
    """
    numbers = count()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            words, folder, variables = json.load(self.rfile)
            start = next(
                at + 1
                for at, word in enumerate(words)
                if word == PACKAGE or word.endswith(f"/bin/{COMMAND}")
            )
            console = environment / f"console-{next(numbers)}.txt"
            with Program(
                console, words[start:], folder=Path(folder), variables=variables
            ) as program:
                answer = program.wait(), program.printed()
            self.wfile.write(json.dumps(answer).encode())

    python = environment / "bin/python"
    interpreter = environment / "bin/interpreter"
    client = environment / "client.py"
    with tempfile.TemporaryDirectory() as private:  # a short path, as addresses have few bytes
        address = f"{private}/server"
        with socketserver.ThreadingUnixStreamServer(address, Handler) as server:
            client.write_text(CLIENT.format(address=address))
            interpreter.symlink_to(python.resolve())
            python.unlink()
            python.write_text(
                SCRIPT.format(python=shlex.quote(f"{interpreter}"), client=shlex.quote(f"{client}"))
            )
            python.chmod(0o755)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield
            finally:
                server.shutdown()
