"""A server and islands on this machine, to try them."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torchtitan_diloco.hardware import end_with_parent
from torchtitan_diloco.islands.server import Server, open_folder
from torchtitan_diloco.log import LOCAL_ISLANDS, STOP_SIGNALS, command_line

LOCAL_GB = 1
PORTS_TRIED = 3


@contextmanager
def local_server(folder: Path) -> Iterator[Server]:
    """Run a server for islands on this machine."""
    host = "127.0.0.1"
    for attempt in range(1, PORTS_TRIED + 1):
        with socket.create_server((host, 0)) as found:
            port = found.getsockname()[1]
        server = open_folder(folder, host=host, port=port, address=host, keep_gb=LOCAL_GB)
        try:
            server.start()
            break
        except ValueError as error:  # another process may have taken the port by now
            if "address already in use" not in str(error).lower() or attempt == PORTS_TRIED:
                raise
    try:
        yield server
    finally:
        server.stop()


def run_islands(command: Sequence[str], count: int, folder: Path) -> int:
    """Run a training command as several islands, each in its own folder, until all have ended.

    The first island writes to the output of this process, the others to `output.txt` in their
    folders. All receive the signals of this process. Return the first exit code that is not 0.
    """
    with ExitStack() as stack:
        server = stack.enter_context(local_server(folder / "server"))
        print(f"all islands: {command_line('islands')} watch --join {server.join_file}", flush=True)
        islands = list[subprocess.Popen[bytes]]()
        for own in [folder / f"island-{number}" for number in range(1, count + 1)]:
            own.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context((own / "output.txt").open("ab")) if islands else None
            flags = ["--islands.join", str(server.join_file), "--islands.name", own.name]
            islands.append(
                subprocess.Popen(
                    [*command, *flags, "--run.folder", str(own)],
                    stdout=output,
                    stderr=output and subprocess.STDOUT,
                    env=os.environ | {LOCAL_ISLANDS: str(folder)},
                    preexec_fn=end_with_parent,
                    process_group=0,  # they receive signals of the terminal only from here
                )
            )

        def pass_on(number: int, _frame: object) -> None:
            for island in islands:
                island.send_signal(number)  # does nothing if it has ended

        for number in STOP_SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, pass_on)
                stack.callback(signal.signal, number, before)
        codes = [island.wait() for island in islands]
        print(
            f"islands and server are in {folder}; the same command with --run.folder {folder} "
            "continues a run that was stopped",
            flush=True,
        )
        return next((128 - code if code < 0 else code for code in codes if code), 0)
