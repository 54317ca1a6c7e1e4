"""Several islands on this machine, with a server of their own."""

import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torchtitan_diloco.islands.server import local_server
from torchtitan_diloco.utils import STOP_SIGNALS, end_with_parent


def run_islands(command: Sequence[str], count: int, folder: Path) -> int:
    """Run a training command as several islands, each in a folder of its own, until all have ended.

    The output of the first island is that of this process, the others' is in `output.txt` of their
    folders. Signals are passed on to all. Returns the first exit code that is not 0.
    """
    with ExitStack() as stack:
        join = stack.enter_context(local_server(folder / "server"))
        islands = []
        for number in range(1, count + 1):
            own = folder / f"island-{number}"
            own.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context((own / "output.txt").open("ab")) if number > 1 else None
            words = [*command, "--islands.join", str(join), "--islands.name", own.name]
            words += ["--run.folder", str(own)]
            islands.append(
                subprocess.Popen(
                    words,
                    stdout=output,
                    stderr=output and subprocess.STDOUT,
                    preexec_fn=end_with_parent,
                    process_group=0,  # a signal of the terminal reaches them once, from here
                )
            )

        def pass_on(number: int, _frame: object) -> None:
            for island in islands:
                if island.poll() is None:
                    island.send_signal(number)

        for number in STOP_SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, pass_on)
                stack.callback(signal.signal, number, before)
        return _wait(islands)


def _wait(islands: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait for all, and return the first exit code that is not 0."""
    code, running = 0, list(islands)
    while running:
        for island in running[:]:
            if (found := island.poll()) is not None:
                running.remove(island)
                code = code or (128 - found if found < 0 else found)
        time.sleep(0.05)
    return code
