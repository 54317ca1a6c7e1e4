"""Saving a run while training goes on."""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_rank

from torchtitan_diloco.components.checkpoint_folders import (
    begin,
    checkpoint_path,
    complete,
    incomplete,
    prune,
    write_manifest,
)
from torchtitan_diloco.components.checkpoint_schema import (
    SHARED,
    Manifest,
    fingerprint,
    inner_tensors,
    random_states,
    rows_to_write,
    worker_folder,
    write_tensors,
)
from torchtitan_diloco.components.run_folder import RunFolder
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.healing import is_finite
from torchtitan_diloco.diloco.object_collectives import gather_objects
from torchtitan_diloco.diloco.outer_loop import OuterLoop
from torchtitan_diloco.diloco.state_dict import SavedState, copy_to_host
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.distributed.collectives import RanksLostError, naming_lost_ranks
from torchtitan_diloco.distributed.stop import StopRequest
from torchtitan_diloco.distributed.world import FSDP, World
from torchtitan_diloco.utils import SAVE_AFTER_ERROR_SECONDS, SAVE_AFTER_LOSS_SECONDS, logger


@dataclass(frozen=True)
class _Part:
    """What one rank adds to the manifest."""

    first_worker: int
    """Number of the disk that has the files."""
    facts: dict[str, Any] = field(default_factory=dict)
    exchanged: dict[str, float] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    failure: str = ""


class SaveError(Exception):
    """The failures of all ranks in a save; raised on every rank."""


@dataclass(frozen=True)
class _Writers:
    """This rank among those that write a checkpoint together."""

    group: ProcessGroup | None
    worker: int
    """Number of this worker's folder."""
    first_worker: int
    """First worker on this disk."""
    rank: int
    """Rank in the worker."""

    @property
    def shares(self) -> bool:
        """Return whether this worker writes what all share."""
        return self.worker == self.first_worker

    @property
    def is_first(self) -> bool:
        return self.shares and self.rank == 0

    def gather(self, task: Callable[[], _Part | None]) -> list[_Part]:
        """Return the results of `task` on all ranks, or raise SaveError if it failed on one."""
        try:
            part = task() or _Part(self.first_worker)
        except Exception as error:
            rank = 0 if self.group is None else get_rank()
            cause = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            part = _Part(self.first_worker, failure=f"{cause} (rank {rank})")
        parts = gather_objects(part, self.group)
        if failures := [part.failure for part in parts if part.failure]:
            raise SaveError("; ".join(dict.fromkeys(failures)))
        return parts

    def gather_first(self, task: Callable[[], None]) -> None:
        """Run `task` on the first rank of each disk."""
        self.gather(lambda: task() if self.is_first else None)


class Checkpointer:
    """Saves one checkpoint at a time; a failed save leaves training and earlier checkpoints alone.

    `torch.distributed.checkpoint.async_save` would copy the whole state dict when it is called, but
    what comes back for fragments in flight is known only later. Its metadata are also pickled.
    """

    def __init__(
        self,
        config: Checkpoint,
        folder: RunFolder,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        outer: OuterLoop,
    ) -> None:
        self._config, self._run, self._world = config, folder.path, world
        self._model, self._optimizer, self._outer = model, optimizer, outer
        self._thread = BackgroundThread("checkpoint")
        self._saving: Future[str] | None = None
        place = world.worker, folder.first_worker, world.rank_in_worker
        self._writers = _Writers(world.saving, *place)
        self._copied: torch.cuda.Event | None = None
        """After the copies of the last save. Only one save at a time is under way."""
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
        self._outer.heal(self._world.group(FSDP))
        shared = self._writers.shares
        writes = self._outer.fragment_names or shared  # else all hold the same
        inner = self._copy_inner() if writes else {}
        outer = self._outer.start_state_dict(self._world.host_mesh, shared=shared)
        write = partial(self._write, manifest, inner, outer, self._writers)
        self._saving = self._thread.submit(write)
        if not self._config.asynchronous:
            self.wait()
        return time.perf_counter() - started

    def _copy_inner(self) -> dict[str, Tensor]:
        """Copy to host memory. On a GPU the copies are queued before the next step, which changes
        what is copied; `_write` waits for them."""
        rank, tensors = self._world.rank_in_worker, inner_tensors(self._model, self._optimizer)
        rows = rows_to_write(tensors, rank)
        inner = {name: copy_to_host(value) for name, value in rows.items()}
        if self._world.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        return inner | random_states(self._world.device, rank)

    def wait(self) -> None:
        """Wait for the save under way. A worker that is found lost meanwhile ends the wait."""
        if self._saving is None:
            return
        while not wait([self._saving], timeout=1.0).done:
            self._outer.check()
        with naming_lost_ranks(self._world, "in a save"):
            self.failure = self._saving.result()
        self._saving = None

    @contextmanager
    def saving_alone(self, stop: StopRequest, manifest: Callable[[], Manifest]) -> Iterator[None]:
        """If the body ends because others hang after a stop request, save the first worker left.

        The others wait for its end: launchers end all processes when the first one has failed.
        """
        try:
            yield
        except (WorkerLostError, RanksLostError):
            stop.loss_is_known.set()
            saver = self._world.liveness.first_left
            if saver == self._world.worker:
                self._save_alone(manifest())
            elif saver is not None:
                self._world.liveness.wait_for_end(saver)
            raise

    def _save_alone(self, manifest: Manifest) -> None:
        """Save this worker as the only one, without an answer of the others."""
        path, mesh = checkpoint_path(self._run, manifest.step), self._world.host_mesh
        self._end_save()
        self._outer.heal(self._world.group(FSDP))
        state = self._outer.state_without_others(mesh)
        if state is None or path.exists():
            return
        outer = Future[SavedState]()
        outer.set_result(state)
        group = None if mesh is None else mesh.get_group()
        writers = _Writers(group, 0, 0, self._world.rank_in_worker)
        if writers.is_first:
            logger.warning(
                f"worker {self._world.worker} saves step {manifest.step} alone: rounds in flight "
                "are given up, and the other workers of a resumed run start from the shared "
                "parameters"
            )
        self._write(replace(manifest, workers=1), self._copy_inner(), outer, writers)

    def close(self) -> None:
        """Give a save under way some time. Its failure must not hide what has ended the run."""
        self._end_save()
        self._thread.close(timeout=0.0)

    def _end_save(self) -> None:
        """Wait for a save under way. After a loss it soon fails, or it waits for the lost rank."""
        seconds = (
            SAVE_AFTER_LOSS_SECONDS if self._world.liveness.is_lost else SAVE_AFTER_ERROR_SECONDS
        )
        wait([] if self._saving is None else [self._saving], timeout=seconds)

    # --- in the background ------------------------------------------------------------------------

    def _write(
        self,
        manifest: Manifest,
        inner: dict[str, Tensor],
        outer: "Future[SavedState] | None",
        writers: _Writers,
    ) -> str:
        """Write a checkpoint and return why it failed, the same on every rank, or nothing."""
        started, config = time.perf_counter(), self._config
        path = checkpoint_path(self._run, manifest.step)
        if self._world.device.type == "cuda":  # else a thread uses GPU 0
            torch.cuda.set_device(self._world.device)
        if self._copied is not None:
            self._copied.synchronize()
        try:
            writers.gather_first(lambda: begin(path))
            folder = incomplete(path)
            parts = writers.gather(lambda: self._write_part(folder, inner, outer, writers))
            manifest = _merge(manifest, parts, self._world.ranks_per_worker, writers.first_worker)
            writers.gather_first(lambda: _finish(path, manifest))
            writers.gather_first(lambda: complete(path))
        except SaveError as error:
            if writers.is_first:
                shutil.rmtree(incomplete(path), ignore_errors=True)
                logger.error(
                    f"checkpoint of step {manifest.step} could not be saved: {error}; earlier ones "
                    "are untouched"
                )
            return str(error)
        if writers.is_first:
            keep = {"keep_latest": config.keep_latest, "keep_every": config.keep_every}
            try:
                prune(self._run, path, **keep)
            except OSError as error:  # the checkpoint itself is saved
                logger.warning(f"old checkpoints in {path.parent} could not be deleted: {error}")
        megabytes = sum(size for size, _ in manifest.files.values()) / 1e6
        seconds = time.perf_counter() - started
        logger.info(
            f"checkpoint of step {manifest.step}: {megabytes:,.1f} MB in {seconds:.1f} s, {path}"
        )
        return ""

    def _write_part(
        self,
        folder: Path,
        inner: dict[str, Tensor],
        outer: "Future[SavedState] | None",
        writers: _Writers,
    ) -> _Part:
        """Write the tensors of this rank. What is not finite is refused: every restart would have
        it."""
        saved = SavedState({}, {}) if outer is None else outer.result()
        number = writers.worker if self._outer.fragment_names else 0
        folders = {worker_folder(number): inner | rows_to_write(saved.own, writers.rank)}
        if writers.shares:
            folders[SHARED] = rows_to_write(saved.shared, writers.rank)
        folders = {name: rows for name, rows in folders.items() if rows}
        for name, rows in folders.items():
            for tensor, value in rows.items():
                if value.is_floating_point() and not is_finite([value]):
                    raise ValueError(f"{name}/{tensor} is not finite")
        written = [write_tensors(folder / one, folders[one], writers.rank) for one in folders]
        files = {str(file.relative_to(folder)): fingerprint(file) for file in written}
        return _Part(writers.first_worker, saved.facts, saved.exchanged, files)


def _finish(path: Path, manifest: Manifest) -> None:
    absent = [name for name in manifest.files if not (incomplete(path) / name).exists()]
    if absent:
        raise OSError(
            f"{incomplete(path) / absent[0]} was written by another node of the worker and is not "
            "here: its nodes must share run.folder"
        )
    write_manifest(path, manifest.to_json())


def _merge(
    manifest: Manifest, parts: list[_Part], ranks_per_worker: int, first_worker: int
) -> Manifest:
    """Add what all ranks know once their parts are written: files on this disk only.

    Exchanges that were in flight belong to the saved state, but are not in the totals yet.
    """
    totals = Counter[str](manifest.state.totals)
    for part in parts:
        totals.update(part.exchanged)
    return replace(
        manifest,
        state=replace(manifest.state, totals=dict(totals)),
        outer=[part.facts for part in parts[::ranks_per_worker] if part.facts],
        files={
            name: known
            for part in parts
            if part.first_worker == first_worker
            for name, known in part.files.items()
        },
    )
