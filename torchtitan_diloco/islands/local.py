"""Islands on this machine, to try them: a folder as their store, and the syncer beside them."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torchtitan_diloco.base.hardware import available_cores, end_with_parent
from torchtitan_diloco.base.process import STACKS_SIGNAL, STOP_SIGNALS
from torchtitan_diloco.base.user import LOCAL_ISLANDS, command_line
from torchtitan_diloco.islands.children import NICE, SYNCER_SECONDS, syncer_of
from torchtitan_diloco.islands.config import local_names
from torchtitan_diloco.islands.console import say

STORE = "store"
"""Folder beside those of the islands, with all that islands exchange."""
SYNCER = "syncer"
"""Folder beside these, with the files of the syncer."""
OUTPUT = "output.txt"
LOOK_SECONDS = 0.2


def run_islands(command: Sequence[str], count: int, folder: Path) -> int:
    """Run a training command as several islands, each in its own folder, until all have ended.

    The first island writes to the output of this process; the others, and the syncer, to
    `output.txt` in their folders. All islands receive the signals of this process. The syncer is
    started again if it dies, and ends after the last island. Return the first exit code that is
    not 0.
    """
    store = folder / STORE
    with ExitStack() as stack:
        islands = list[subprocess.Popen[bytes]]()
        say(f"all islands: {command_line('islands')} watch --join {shlex.quote(str(store))}")
        names = local_names(count)
        others = f"{', '.join([*names[1:], SYNCER])}: {OUTPUT} in the folders of these names"
        say(f"{others} in {folder}")
        for island_folder in [folder / name for name in names]:
            island_folder.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context((island_folder / OUTPUT).open("ab")) if islands else None
            flags = ["--islands.join", str(store), "--islands.name", island_folder.name]
            islands.append(
                subprocess.Popen(
                    [*command, *flags, "--run.folder", str(island_folder)],
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

        for number in (*STOP_SIGNALS, STACKS_SIGNAL):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, pass_on)
                stack.callback(signal.signal, number, before)
        _run_syncer_beside(islands, store, folder / SYNCER)
        codes = [island.wait() for island in islands]
        say(
            f"the islands and their store are in {folder}; to continue a run that was stopped, run "
            f"the same command with --run.folder {shlex.quote(str(folder))}"
        )
        return next((128 - code if code < 0 else code for code in codes if code), 0)


def _run_syncer_beside(
    islands: Sequence["subprocess.Popen[bytes]"], store: Path, folder: Path
) -> None:
    """Run the syncer of a run until all islands have ended."""
    folder.mkdir(exist_ok=True)
    threads = min(2, max(1, available_cores() - len(islands)))
    syncer = syncer_of(
        store,
        folder,
        say,
        options=["--threads", str(threads)],
        output=folder / OUTPUT,
        nice=NICE,
    )
    try:
        while any(island.poll() is None for island in islands):
            syncer.runs()
            time.sleep(LOOK_SECONDS)
    finally:
        syncer.stop(SYNCER_SECONDS)
