"""Saving a run while training goes on."""

import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import AdamW

from torchtitan_diloco.components.checkpoint_schema import (
    SHARED,
    Manifest,
    begin,
    checkpoint_path,
    complete,
    fingerprint,
    incomplete,
    prune,
    worker_folder,
)
from torchtitan_diloco.components.inner_state import copy_to_host, inner_tensors, random_states
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.outer_loop import OuterLoop
from torchtitan_diloco.diloco.state_dict import SavedState
from torchtitan_diloco.distributed.collectives import gather_objects, naming_lost_ranks
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.utils import logger

Result = TypeVar("Result")
Files = dict[str, tuple[int, int]]
LAST_SECONDS = 20.0
"""Seconds that a run which ends with an error waits for a save in progress."""


class SaveError(Exception):
    """The failures of all ranks in a save; raised on every rank."""


class Checkpointer:
    """Saves one checkpoint at a time; a failed save leaves training and earlier checkpoints alone.

    A thread of our own calls `torch.distributed.checkpoint.save`. `async_save` would copy the whole
    state dict when it is called, but what comes back for fragments in flight is known only later,
    and it has no step after the tensors for sizes, checksums, the manifest and the rename.
    """

    def __init__(
        self,
        config: Checkpoint,
        run: Path,
        world: World,
        model: nn.Module,
        optimizer: AdamW,
        outer: OuterLoop,
    ) -> None:
        self._config, self._run, self._world = config, run, world
        self._model, self._optimizer, self._outer = model, optimizer, outer
        self._thread = BackgroundThread("checkpoint")
        self._saving: Future[str] | None = None
        self._timer_start = time.monotonic()
        self.failure = ""
        """Why the last save failed; empty if it did not."""

    def due_by_time(self) -> bool:
        """Return whether `every_minutes` have passed by the clock of rank 0.

        A save under way ends first, so that training does not wait for a slow disk. The timer
        starts again at once, as all ranks agree on the save some steps later.
        """
        minutes = self._config.every_minutes
        seconds = time.monotonic() - self._timer_start
        saving = self._saving is not None and not self._saving.done()
        due = self._world.is_first and minutes > 0 and seconds >= 60 * minutes and not saving
        if due:
            self._timer_start = time.monotonic()
        return due

    def save(self, manifest: Manifest) -> float:
        """Start a save; every rank calls it after the same step.

        Returns the seconds that training waited.
        """
        started = time.perf_counter()
        self.wait()
        self._timer_start = time.monotonic()
        mesh, inner = self._world.host_mesh, dict[str, Tensor]()
        if self._outer.fragment_names or self._world.worker == 0:  # else all workers hold the same
            tensors = inner_tensors(self._model, self._optimizer)
            inner = {name: copy_to_host(value, mesh) for name, value in tensors.items()}
            states = random_states(self._world.device, self._world.rank_in_worker)
            inner |= {name: get_state() for name, (get_state, _) in states.items()}
        outer = self._outer.start_state_dict(mesh)
        self._saving = self._thread.submit(partial(self._write, manifest, inner, outer))
        if not self._config.asynchronous:
            self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Wait for the save under way. A worker that is found lost meanwhile ends the wait."""
        if self._saving is None:
            return
        while not wait([self._saving], timeout=1.0).done:
            self._outer.check()
        with naming_lost_ranks(self._world, "in a save"):
            self.failure = self._saving.result()
        self._saving = None

    def close(self) -> None:
        """Give a save under way some time. Its failure must not hide what has ended the run."""
        if self._saving is not None:
            with suppress(TimeoutError):
                self._saving.exception(LAST_SECONDS)
        self._thread.close(timeout=5.0)

    # --- in the background ------------------------------------------------------------------------

    def _write(
        self, manifest: Manifest, inner: dict[str, Tensor], outer: "Future[SavedState] | None"
    ) -> str:
        """Write a checkpoint and return why it failed, the same on every rank, or nothing."""
        started = time.perf_counter()
        path = checkpoint_path(self._run, manifest.step)
        try:
            self._agree(lambda: begin(path) if self._world.is_first else None)
            nothing = SavedState({}, {}, {}, {})
            saved = self._agree(lambda: nothing if outer is None else outer.result())
            files = self._agree(lambda: self._write_tensors(incomplete(path), inner, saved))
            parts = gather_objects((saved.facts, saved.exchanged, files), self._world.saving)
            manifest = _merge(manifest, parts, self._world.ranks_per_worker)
            self._agree(lambda: self._finish(path, manifest) if self._world.is_first else None)
        except SaveError as error:
            if self._world.is_first:
                shutil.rmtree(incomplete(path), ignore_errors=True)
                logger.error(
                    f"checkpoint of step {manifest.step} could not be saved: {error}; earlier ones "
                    "are untouched"
                )
            return str(error)
        megabytes = sum(size for size, _ in manifest.files.values()) / 1e6
        seconds = time.perf_counter() - started
        logger.info(
            f"checkpoint of step {manifest.step}: {megabytes:,.1f} MB in {seconds:.1f} s, {path}"
        )
        return ""

    def _write_tensors(self, folder: Path, inner: dict[str, Tensor], saved: SavedState) -> Files:
        """Write the tensors of this rank and return size and CRC-32 of the files it wrote."""
        folders = {worker_folder(self._world.worker): inner | saved.own}
        if self._world.worker == 0:
            folders[SHARED] = saved.shared
        mesh = self._world.host_mesh
        group, rank = (None if mesh is None else mesh.get_group()), self._world.rank_in_worker
        files: Files = {}
        for name, tensors in folders.items():
            if not tensors:
                continue
            writer = FileSystemWriter(folder / name, sync_files=True, thread_count=1)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
            written = list((folder / name).glob(f"__{rank}_*.distcp"))
            if rank == 0:
                written.append(folder / name / ".metadata")
            files |= {f"{name}/{file.name}": fingerprint(file) for file in written}
        return files

    def _finish(self, path: Path, manifest: Manifest) -> None:
        absent = [name for name in manifest.files if not (incomplete(path) / name).exists()]
        if absent:
            raise OSError(
                f"{incomplete(path) / absent[0]} was written by another node and is not here: "
                "run.folder must be a folder that all nodes share"
            )
        complete(path, manifest)
        keep_latest, keep_every = self._config.keep_latest, self._config.keep_every
        try:
            prune(self._run, path, keep_latest=keep_latest, keep_every=keep_every)
        except OSError as error:  # the checkpoint itself is saved
            logger.warning(f"old checkpoints in {path.parent} could not be deleted: {error}")

    def _agree(self, task: Callable[[], Result]) -> Result:
        """Run `task` and return its result, or raise SaveError if it failed on any rank."""
        failure = ""
        try:
            result = task()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            failure = f"{_cause(error)} (rank {self._world.rank})"
        failures = [text for text in gather_objects(failure, self._world.saving) if text]
        if failures:
            raise SaveError("; ".join(dict.fromkeys(failures)))
        return result


def _merge(
    manifest: Manifest,
    parts: list[tuple[dict[str, Any], dict[str, float], Files]],
    ranks_per_worker: int,
) -> Manifest:
    """Add what all ranks know once their parts are written.

    Exchanges that were in flight belong to the saved state, but are not in the totals yet.
    """
    totals = Counter[str](manifest.state.totals)
    for _, exchanged, _ in parts:
        totals.update(exchanged)
    return replace(
        manifest,
        state=replace(manifest.state, totals=dict(totals)),
        outer=[facts for facts, _, _ in parts[::ranks_per_worker] if facts],
        files={name: known for _, _, files in parts for name, known in files.items()},
    )


def _cause(error: BaseException) -> str:
    """Return the first cause of an error: DCP wraps the errors of all ranks."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    hint = ", which a full disk may cause" if "inline_container" in str(error) else ""
    return f"{type(error).__name__}: {error}".splitlines()[0] + hint
