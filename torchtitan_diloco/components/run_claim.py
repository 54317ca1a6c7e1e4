"""The folder of a run: made, taken for this run alone, and seen by every node that is to write there."""

import secrets
import time
from pathlib import Path
from typing import TextIO

from torchtitan_diloco.components.resume import Start, find_start
from torchtitan_diloco.components.run_folder import create_run_folder, hold_run_folder, lock_text
from torchtitan_diloco.config.schema import Run
from torchtitan_diloco.distributed.agreement import broadcast_text, gather_texts
from torchtitan_diloco.distributed.world import World

SEEN_WITHIN_SECONDS = 10.0
"""Some network file systems show a new file a little later."""


def claim_run_folder(
    world: World, run: Run, resume: str, start: Start, toml: str, *, saves: bool
) -> tuple[Path, TextIO | None]:
    """Rank 0 makes it, holds it (by the file it returns), writes the configuration there as TOML, and tells all ranks. A run
    that `saves` needs a folder that all of them see."""
    made, held, failure, token = "", None, "", secrets.token_hex(8)
    if world.is_first:
        try:
            path = create_run_folder(
                start.folder or run.folder, run.name, goes_on=bool(start.folder)
            )
            held = hold_run_folder(path, token)  # first: another run's files are not to be touched
            if start.folder:
                _check_that_start_stands(resume, run.folder, start)
            name = (
                f"config-from-step-{start.step}.toml"
                if start.folder and start.step
                else "config.toml"
            )
            (path / name).write_text(toml, encoding="utf-8")
            made = str(path)
        except ValueError as error:  # the others wait to be told
            failure = str(error)
        except OSError as error:
            failure = f"cannot make the folder of the run: {error}; set run.folder to a folder that can be written"
    failure = broadcast_text(world, failure)
    if failure:
        if held is not None:
            held.close()
        raise ValueError(failure)
    path, token = Path(broadcast_text(world, made)), broadcast_text(world, token)
    if saves:
        _check_that_all_see(world, path, token)
    return path, held


def _check_that_start_stands(resume: str, folder: str, start: Start) -> None:
    """The run that held the folder before may have saved once more since this one looked."""
    found = find_start(resume, folder)
    if found != (start.folder, start.checkpoint):
        was, now = (checkpoint or "the beginning" for checkpoint in (start.checkpoint, found[1]))
        raise ValueError(
            f"run.folder = {start.folder}: another run has just ended there, so this one would go on from {was} instead of "
            f"{now}: start it again"
        )


def _check_that_all_see(world: World, path: Path, token: str) -> None:
    """A save into folders that only look alike would be found out when it is too late."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while not (seen := token in lock_text(path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = [
        rank
        for rank, answer in enumerate(gather_texts(world, "" if seen else "not seen"))
        if answer
    ]
    if blind:
        ranks = ", ".join(map(str, blind))
        raise ValueError(
            f"run.folder = {path} of rank 0 is not seen by the nodes of ranks {ranks}, so no checkpoint could be saved: give a "
            "folder on a disk that all nodes share, or train without: checkpoint.every = 0, checkpoint.every_minutes = 0, "
            "checkpoint.at_end = false and training.stop_after = 0"
        )
