"""Processes of a run that are killed at a write to its store, and started again."""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.islands.trainees import Trainee
from tests.processes import FORKS
from torchtitan_diloco.diloco import DiLoCoConfig
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.islands.syncing import SyncerProcess
from torchtitan_diloco.store import Store, open_store

PATIENCE = 120.0
SAVE_EVERY = 4
"""Number of steps after which an island that may die saves its state."""


def kill_at(store: Store, count: int | None, prefix: str = "") -> None:
    """Kill this process at its `count`th write below `prefix`: before it if `count` is even, and
    after it otherwise."""
    numbers = itertools.count(1)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # until the signal arrives

    def replaced(verb: Callable[..., Any]) -> Callable[..., Any]:
        def write(name: str, *arguments: Any, **options: Any) -> Any:
            number = next(numbers) if name.startswith(prefix) else 0
            if number == count and number % 2 == 0:
                die()
            result = verb(name, *arguments, **options)
            if number == count:
                die()
            return result

        return write

    for verb in ("create", "replace", "delete") if count is not None else ():
        setattr(store.backend, verb, replaced(getattr(store.backend, verb)))


def decide(count: int | None, store: Path, scratch: Path) -> None:
    """Run a syncer. By its scratch folder, it knows that the one before is dead."""
    torch.set_num_threads(1)
    run = Run(open_store(str(store)))
    kill_at(run.store, count)
    SyncerProcess(run, scratch).run()
    run.close()


def train(
    count: int | None,
    store: Path,
    name: str,
    config: DiLoCoConfig,
    total_tokens: int,
    folder: Path,
) -> None:
    """Train an island from its checkpoint in `folder` on, and leave its shared copy there."""
    torch.set_num_threads(1)
    saved = folder / "saved.pt"
    shared = folder / "shared.pt"
    state = torch.load(saved, weights_only=False) if saved.exists() else None
    island = Trainee(
        store,
        name,
        config,
        total_tokens=total_tokens,
        saved=None if state is None else state["outer"],
        step_seconds=0.01,
    )
    if state is not None:
        island.model.load_state_dict(state["model"])
    open_link = island.peers._open

    def open_mortal(checksums: Sequence[str]) -> Link:
        link = open_link(checksums)
        kill_at(link.run.store, count, prefix="part/")
        return link

    def save(step: int) -> None:
        if step % SAVE_EVERY == 0:
            state = {"outer": island.outer.state_dict(), "model": island.model.state_dict()}
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").replace(saved)

    island.peers._open = open_mortal  # type: ignore[method-assign]
    island.on_step = save
    island.train()
    island.outer.close()
    torch.save(island.shared, shared)


class Lives(threading.Thread):
    """Starts a process again each time that it is killed, and the last time without a death."""

    def __init__(self, body: Callable[..., None], deaths: Sequence[int], *arguments: Any) -> None:
        super().__init__(daemon=True)
        self._body = body
        self._arguments = arguments
        self._counts: list[int | None] = [*deaths, None]
        self.codes = list[int | None]()
        """Exit codes, negative for a signal."""

    def run(self) -> None:
        for count in self._counts:
            process = FORKS.Process(target=self._body, args=(count, *self._arguments), daemon=True)
            process.start()
            process.join(PATIENCE)
            if process.exitcode is None:
                process.kill()
                process.join()
            self.codes.append(process.exitcode)
            if process.exitcode != -signal.SIGKILL:
                return

    def finish(self) -> None:
        """Wait for the last life, and check that all the others were ended by a kill."""
        self.join(PATIENCE)
        assert not self.is_alive()
        assert self.codes == [-signal.SIGKILL] * (len(self._counts) - 1) + [0]
