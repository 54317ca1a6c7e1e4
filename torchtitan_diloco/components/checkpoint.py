"""Saving a run while training goes on."""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchtitan_diloco.components import checkpoint_folders as folders
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
from torchtitan_diloco.diloco.round import total
from torchtitan_diloco.diloco.state_dict import RESIDUAL, SavedState, copy_to_host
from torchtitan_diloco.distributed.collectives import naming_lost_ranks, on_all_ranks
from torchtitan_diloco.distributed.world import FSDP, World
from torchtitan_diloco.log import UserError, logger

Value = TypeVar("Value")
SAVE_AFTER_ERROR_SECONDS = 20.0
"""Time for a save in progress when a run ends with an error."""


@dataclass(frozen=True)
class _Part:
    """What one rank adds to the manifest."""

    facts: dict[str, Any]
    exchanged: dict[str, float]
    files: dict[str, tuple[int, int]]


class Checkpointer:
    """Saves one checkpoint at a time; a failed save leaves training and earlier checkpoints alone.

    Training waits for the exchanges in flight and for copies in host memory. Files are safetensors
    and JSON, as `torch.distributed.checkpoint` pickles its metadata.
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
        self._workers_on_disk = folder.workers
        self._shares = world.worker == folder.workers[0]
        """Whether this worker writes what all workers share. One on every disk does."""
        self._is_first = self._shares and world.rank_in_worker == 0
        self._copied: torch.cuda.Event | None = None  # after the copies of the last save
        self._timer_start = time.monotonic()
        self.failure = ""
        """Why the last save failed; empty if it did not."""

    def due_by_time(self) -> bool:
        """Return whether `every_minutes` have passed on the clock of rank 0, and no save is under
        way, which training would have to wait for.

        The timer starts again at once, as all ranks agree on the save some steps later.
        """
        minutes = self._config.every_minutes
        seconds = time.monotonic() - self._timer_start
        saving = self._saving is not None and not self._saving.done()
        due = self._world.is_first and minutes > 0 and seconds >= 60 * minutes and not saving
        if due:
            self._timer_start = time.monotonic()
        return due

    def save(self, manifest: Manifest) -> float:
        """Start a save and return the seconds that training waited. Every rank calls it after the
        same step."""
        started = time.perf_counter()
        self.wait()
        self._timer_start = time.monotonic()
        self._outer.heal(self._world.group(FSDP))
        writes = self._outer.fragment_names or self._shares  # else all hold the same
        inner = self._copy_inner() if writes else {}
        outer = SavedState(**self._outer.state_dict(self._world.host_mesh))
        self._saving = self._thread.submit(partial(self._write, manifest, inner, outer))
        if not self._config.asynchronous:
            self.wait()
        return time.perf_counter() - started

    def _copy_inner(self) -> dict[str, Tensor]:
        """Copy the model, the inner optimizer and random states to host memory. On a GPU the copies
        are only queued, before the next step; `_write` waits for them."""
        rank, tensors = self._world.rank_in_worker, inner_tensors(self._model, self._optimizer)
        rows = rows_to_write(tensors, rank)
        inner = {name: copy_to_host(value) for name, value in rows.items()}
        if self._world.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        return inner | random_states(self._world.device, rank)

    def wait(self) -> None:
        """Wait for the save under way. Raise if a worker is lost meanwhile."""
        if self._saving is None:
            return
        while not wait([self._saving], timeout=1.0).done:
            self._world.liveness.check("seen in a save")
        with naming_lost_ranks(self._world, "in a save"):
            self.failure = self._saving.result()
        self._saving = None

    def close(self) -> None:
        """Give a save under way some time. Its failure must not hide why the run has ended.

        After a loss the save has failed, or it waits for the lost rank.
        """
        if self._saving is not None and not self._world.liveness.is_lost:
            wait([self._saving], SAVE_AFTER_ERROR_SECONDS)
        self._thread.close(timeout=0.0)

    # --- in the background ------------------------------------------------------------------------

    def _write(self, manifest: Manifest, inner: dict[str, Tensor], saved: SavedState) -> str:
        """Write a checkpoint. Return on every rank why it failed, or an empty text."""
        started, config = time.perf_counter(), self._config
        path = folders.checkpoint_path(self._run, manifest.step)
        written = folders.incomplete(path)
        if self._world.device.type == "cuda":  # else a thread uses GPU 0
            torch.cuda.set_device(self._world.device)
        if self._copied is not None:
            self._copied.synchronize()
        try:
            self._on_first(lambda: folders.begin(path))
            part = self._on_all(lambda: self._write_part(written, inner, saved))
            merged = self._merge(manifest, gather_objects(part, self._world.saving))
            self._on_first(lambda: folders.write_manifest(path, merged.files, merged.to_json()))
            self._on_first(lambda: folders.complete(path))
        except ValueError as error:
            if self._is_first:
                shutil.rmtree(written, ignore_errors=True)
                logger.error(
                    f"checkpoint of step {manifest.step} could not be saved: {error}; earlier ones "
                    "are untouched"
                )
            return str(error)
        if self._is_first:
            try:
                folders.prune(self._run, path, config.keep_latest, config.keep_every)
            except OSError as error:  # the checkpoint itself is saved
                logger.warning(f"old checkpoints in {path.parent} could not be deleted: {error}")
        megabytes = sum(size for size, _ in merged.files.values()) / 1e6
        seconds = time.perf_counter() - started
        logger.info(
            f"checkpoint of step {manifest.step}: {megabytes:,.1f} MB in {seconds:.1f} s, {path}"
        )
        return ""

    def _on_all(self, task: Callable[[], Value]) -> Value:
        """Return the result of `task`, or raise ValueError if it failed on one of the ranks."""

        def explained() -> Value:
            try:
                return task()
            except Exception as error:
                kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
                raise UserError(f"{kind}{error}") from error

        return on_all_ranks(self._world.saving, explained)

    def _on_first(self, task: Callable[[], None]) -> None:
        """Run `task` on the first rank of each disk."""
        self._on_all(lambda: task() if self._is_first else None)

    def _write_part(self, folder: Path, inner: dict[str, Tensor], saved: SavedState) -> _Part:
        """Write the tensors of this rank. Raise if one is not finite, as every restart would be."""
        rank = self._world.rank_in_worker
        own = worker_folder(self._world.worker if self._outer.fragment_names else 0)
        kept = {name: one for name, one in saved.tensors.items() if name.startswith(RESIDUAL)}
        tensors = {own: inner | rows_to_write(kept, rank)}
        if self._shares:
            shared = {name: one for name, one in saved.tensors.items() if name not in kept}
            tensors[SHARED] = rows_to_write(shared, rank)
        files = {}
        for name, rows in tensors.items():
            for tensor, value in rows.items():
                if value.is_floating_point() and not is_finite([value]):
                    raise UserError(f"{name}/{tensor} is not finite")
            if rows:
                file = write_tensors(folder / name, rows, rank)
                files[str(file.relative_to(folder))] = fingerprint(file)
        return _Part(saved.facts, saved.exchanged, files)

    def _merge(self, manifest: Manifest, parts: Sequence[_Part]) -> Manifest:
        """Add what is known once all parts are written: totals with the exchanges that were in
        flight, facts of each worker, and the files on this disk."""
        totals = total([manifest.state.totals, *(part.exchanged for part in parts)])
        ranks, workers = self._world.ranks_per_worker, self._workers_on_disk
        here = [part for rank, part in enumerate(parts) if rank // ranks in workers]
        return replace(
            manifest,
            state=replace(manifest.state, totals=totals),
            outer=[part.facts for part in parts[::ranks] if part.facts],
            files={name: known for part in here for name, known in part.files.items()},
        )
