"""Saving a run while training goes on, and resuming it, on the same layout or another one."""

import shutil
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from torchtitan_diloco.components.checkpoint_schema import (
    METADATA,
    MODEL,
    SHARED,
    Manifest,
    TensorFolder,
    begin,
    cause_in_dcp,
    checkpoint_path,
    complete,
    fingerprint,
    incomplete,
    inner_tensors,
    prune,
    random_states,
    worker_folder,
)
from torchtitan_diloco.config.loader import flatten
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.fragments import local_rows
from torchtitan_diloco.diloco.healing import is_finite
from torchtitan_diloco.diloco.object_collectives import gather_objects
from torchtitan_diloco.diloco.outer_loop import OuterLoop
from torchtitan_diloco.diloco.state_dict import (
    SavedState,
    facts_for_new_worker,
    shaped_like,
    shared_parameter_name,
)
from torchtitan_diloco.distributed.collectives import naming_lost_ranks
from torchtitan_diloco.distributed.world import FSDP, World
from torchtitan_diloco.utils import logger

Result = TypeVar("Result")
Files = dict[str, tuple[int, int]]
LAST_SECONDS = 20.0
"""Seconds that a run which ends with an error waits for a save in progress."""


@dataclass(frozen=True)
class _Part:
    """What one rank adds to the manifest."""

    facts: dict[str, Any]
    exchanged: dict[str, float]
    files: Files


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
        self._outer.heal(self._world.group(FSDP))
        mesh, inner = self._world.host_mesh, dict[str, Tensor]()
        if self._outer.fragment_names or self._world.worker == 0:  # else all workers hold the same
            tensors = inner_tensors(self._model, self._optimizer)
            inner = {name: _copy_to_host(value, mesh) for name, value in tensors.items()}
            inner |= random_states(self._world.device, self._world.rank_in_worker)
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
            part = _Part(saved.facts, saved.exchanged, files)
            parts = gather_objects(part, self._world.saving)
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
        """Write the tensors of this rank and return size and CRC-32 of the files it wrote.

        What is not finite is refused: every restart would have it.
        """
        folders = {worker_folder(self._world.worker): inner | saved.own}
        if self._world.worker == 0:
            folders[SHARED] = saved.shared
        mesh = self._world.host_mesh
        group, rank = (None if mesh is None else mesh.get_group()), self._world.rank_in_worker
        files: Files = {}
        for folder_name, tensors in folders.items():
            for name, value in tensors.items():
                if value.is_floating_point() and not is_finite([local_rows(name, value)]):
                    raise ValueError(f"{folder_name}/{name} is not finite")
        for name, tensors in folders.items():
            if not tensors:
                continue
            writer = FileSystemWriter(folder / name, sync_files=True, thread_count=1)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
            written = list((folder / name).glob(f"__{rank}_*.distcp"))
            if rank == 0:
                written.append(folder / name / METADATA)
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
            failure = f"{cause_in_dcp(error)} (rank {self._world.rank})"
        failures = [text for text in gather_objects(failure, self._world.saving) if text]
        if failures:
            raise SaveError("; ".join(dict.fromkeys(failures)))
        return result


def _copy_to_host(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    local = value.to_local() if isinstance(value, DTensor) else value.detach()
    return shaped_like(value, local.to("cpu", copy=True), mesh)


def _merge(manifest: Manifest, parts: list[_Part], ranks_per_worker: int) -> Manifest:
    """Add what all ranks know once their parts are written.

    Exchanges that were in flight belong to the saved state, but are not in the totals yet.
    """
    totals = Counter[str](manifest.state.totals)
    for part in parts:
        totals.update(part.exchanged)
    return replace(
        manifest,
        state=replace(manifest.state, totals=dict(totals)),
        outer=[part.facts for part in parts[::ranks_per_worker] if part.facts],
        files={name: known for part in parts for name, known in part.files.items()},
    )


# --- resume ---------------------------------------------------------------------------------------

NO_OUTER_LOOP_SAVED = (
    "the saved run had no outer loop: the shared parameters start as its model, outer momentum "
    "from zero"
)


def restore(
    path: Path,
    manifest: Manifest,
    new_workers: str,
    world: World,
    model: nn.Module,
    optimizer: AdamW,
    outer: OuterLoop,
) -> list[str]:
    """Load a checkpoint and return what could not be carried over, one line each.

    `new_workers` is `checkpoint.new_workers`. Without an outer loop, which has no fragments, all
    workers hold one model and resume from worker 0.
    """
    streaming, streamed = bool(outer.fragment_names), bool(manifest.outer)
    worker = world.worker if streaming and streamed else 0
    existed = worker < manifest.workers
    own = TensorFolder(path, manifest, worker_folder(worker % manifest.workers))
    _check_model(path, own, model)
    if existed or new_workers == "copy":
        same_ranks = manifest.ranks_per_worker == world.ranks_per_worker
        _load_inner(own, model, optimizer, world, parameters=existed, random=existed and same_ranks)
    if not streamed:
        outer.restart_from_model(manifest.step)
        return [NO_OUTER_LOOP_SAVED] if streaming else []
    shared = TensorFolder(path, manifest, SHARED)
    if existed:
        facts = manifest.outer[worker]
    else:
        facts = facts_for_new_worker(manifest.outer[0])
        named = ((shared_parameter_name(name), one) for name, one in model.named_parameters())
        # Frozen parameters are not shared: they stay what the workers have agreed on.
        shared.fill({name: one.detach() for name, one in named if name in shared.tensors})
    own_names = own.tensors if existed else ()
    saved = SavedState.template(model, facts, shared.tensors, own_names, world.host_mesh)
    shared.fill(saved.shared)
    own.fill(saved.own)
    notes = outer.load_state_dict(saved)
    if not streaming or manifest.workers == world.workers:
        return notes
    change = f"{manifest.workers} workers are now {world.workers}"
    if manifest.workers > world.workers:
        end = f"what those from {world.workers} on had not sent yet is left behind"
    else:
        how = "as a copy" if new_workers == "copy" else "fresh"
        end = f"the new ones start from the shared parameters, their inner optimizer {how}"
    return [*notes, f"{change}: {end}"]


def _check_model(path: Path, saved: TensorFolder, model: nn.Module) -> None:
    theirs = {
        name.removeprefix(MODEL): tuple(known.size)
        for name, known in saved.tensors.items()
        if name.startswith(MODEL)
    }
    mine = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if differing:
        name = differing[0]
        there, here = theirs.get(name, "absent"), mine.get(name, "absent")
        raise ValueError(
            f"{path} is of another model: {name} is {there} there and {here} in this run, and "
            f"{len(differing) - 1} more differ. Set the [model] section, the tokenizer and "
            "training.sequence_length as in the run's config.toml"
        )


def _load_inner(
    saved: TensorFolder,
    model: nn.Module,
    optimizer: AdamW,
    world: World,
    *,
    parameters: bool,
    random: bool,
) -> None:
    """Load the state of the optimizer, and on request parameters and random states."""
    tensors = inner_tensors(model, optimizer)
    if not parameters:
        tensors = {name: one for name, one in tensors.items() if not name.startswith(MODEL)}
    states = random_states(world.device, world.rank_in_worker) if random else {}
    states = {name: state for name, state in states.items() if name in saved.tensors}
    saved.fill(tensors | states)
    for name, state in states.items():
        set_state = torch.cuda.set_rng_state if "/cuda/" in name else torch.set_rng_state
        set_state(state)


NOT_COMPARED = ("run.folder", "run.name", "checkpoint.", "metrics.", "profiling.")


def changed_settings(before: str, now: str) -> list[str]:
    """Return the differences between the settings of two TOML texts, one line each."""
    old, new = (dict(flatten(tomllib.loads(text))) for text in (before, now))
    return [
        f"{key} was {old.get(key, 'not set')}, is {new.get(key, 'not set')}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not key.startswith(NOT_COMPARED)
    ]
