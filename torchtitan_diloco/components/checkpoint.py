"""Saves a run while it goes on: copies in the training thread, writing in another, visible when all ranks have finished."""

import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import AdamW

from torchtitan_diloco.components.checkpoint_folder import (
    INCOMPLETE,
    SHARED,
    Manifest,
    begin,
    checkpoint_path,
    complete,
    fingerprint,
    prune,
    worker_folder,
)
from torchtitan_diloco.components.inner_state import inner_state
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.outer_loop import DataParallel
from torchtitan_diloco.diloco.round import total
from torchtitan_diloco.distributed.roll_call import naming_lost_ranks
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.utils import logger

LAST_SECONDS = 20.0
"""That a save under way is given when a run ends with an error."""
TENSORS = ("outer", "next", "slots", "residual")
"""Of the outer state: what is no plain fact."""


class Checkpointer:
    """One save at a time. A save that fails is told and leaves earlier checkpoints as they are; training goes on."""

    def __init__(
        self,
        config: Checkpoint,
        run: Path,
        world: World,
        model: nn.Module,
        optimizer: AdamW,
        outer: StreamingDiLoCo | DataParallel,
    ) -> None:
        self._config, self._run, self._world = config, run, world
        self._model, self._optimizer, self._outer = model, optimizer, outer
        self._thread = BackgroundThread("checkpoint")
        self._saving: Future[str] | None = None
        self._last_minutes = time.monotonic()
        self.failure = ""
        """Of the last save, in words."""

    def due(self, step: int) -> bool:
        """By the number of steps, which all ranks count alike."""
        return bool(self._config.every) and step % self._config.every == 0

    def minutes_have_passed(self) -> bool:
        """By this rank's clock: ranks have to agree before they act on it."""
        minutes = self._config.every_minutes
        passed = bool(minutes) and time.monotonic() - self._last_minutes >= 60 * minutes
        if passed:  # it is asked after every step, and the answer comes some steps later
            self._last_minutes = time.monotonic()
        return passed

    def save(self, manifest: Manifest) -> float:
        """Every rank calls it after the same step. Returns the seconds that training was held up."""
        started = time.perf_counter()
        self.wait()
        self._last_minutes = time.monotonic()
        rank = self._world.rank_in_worker
        own = (
            inner_state(self._model, self._optimizer, self._world.host_mesh, rank)
            if self._has_own_state
            else {}
        )
        outer: Future[dict[str, Any]] | None = None
        if isinstance(self._outer, StreamingDiLoCo):
            outer = self._outer.start_state_dict(self._world.host_mesh)
        self._saving = self._thread.submit(partial(self._write, manifest, own, outer))
        if not self._config.asynchronous:
            self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """For the save under way, if there is one. Ranks are patient with each other's disks; a worker that is found to be
        lost meanwhile ends it."""
        if self._saving is None:
            return
        while not wait([self._saving], timeout=1.0).done:
            self._outer.check()
        with (
            nullcontext()
            if self._world.saving is None
            else naming_lost_ranks(self._world, "in a save")
        ):
            self.failure = self._saving.result()
        self._saving = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A run that ends with an error leaves a save some time, but does not wait for ranks that are gone."""
        if self._saving is not None:
            with suppress(TimeoutError):
                self._saving.exception(
                    LAST_SECONDS
                )  # what ended the run is to be told, not what ends the save with it
        self._thread.close(timeout=5.0)

    @property
    def _has_own_state(self) -> bool:
        """With data parallelism all workers hold the same."""
        return isinstance(self._outer, StreamingDiLoCo) or self._world.worker == 0

    # --- in the background -----------------------------------------------------------------------------------------

    def _write(
        self, manifest: Manifest, own: dict[str, Tensor], outer: "Future[dict[str, Any]] | None"
    ) -> str:
        """The failure in words, the same on every rank, or nothing."""
        started = time.perf_counter()
        path = checkpoint_path(self._run, manifest.step)
        aside = path.with_name(path.name + INCOMPLETE)
        failure = self._by_the_first(lambda: begin(path))
        facts: dict[str, Any] = {}
        exchanged: dict[str, float] = {}
        folders: dict[str, dict[str, Tensor]] = {}
        written: dict[str, list[int]] = {}

        def collect() -> None:
            state = {} if outer is None else outer.result()
            exchanged.update(state.pop("exchanged", {}))
            facts.update({key: value for key, value in state.items() if key not in TENSORS})
            folders.update(self._by_folder(own, state))
            for name in folders:
                (aside / name).mkdir(parents=True, exist_ok=True)

        def write() -> None:
            for name, tensors in folders.items():
                written.update(self._write_folder(aside, name, tensors))

        for task in (
            collect,
            write,
        ):  # one by one: writing is a collective, into which all go or none
            failure = failure or self._on_all(task)
        gathered = self._gather((facts, written, exchanged))
        everything = replace(
            manifest,
            # What was under way at the save is a part of the state, and so is what it took, which nobody had counted yet.
            run=manifest.run
            | {
                "totals": total(
                    [manifest.run.get("totals", {}), *(sums for _, _, sums in gathered)]
                )
            },
            outer=[theirs for theirs, _, _ in gathered[:: self._world.ranks_per_worker] if theirs],
            files={name: known for _, files, _ in gathered for name, known in files.items()},
        )
        failure = failure or self._by_the_first(lambda: self._finish(aside, path, everything))
        if self._world.is_first:
            if failure:
                shutil.rmtree(aside, ignore_errors=True)
                logger.error(
                    f"checkpoint of step {manifest.step} could not be saved: {failure}; earlier ones are untouched"
                )
            else:
                megabytes = sum(size for size, _ in everything.files.values()) / 1e6
                seconds = time.perf_counter() - started
                logger.info(
                    f"checkpoint of step {manifest.step}: {megabytes:,.1f} MB in {seconds:.1f} s, {path}"
                )
        return failure

    def _by_folder(
        self, own: dict[str, Tensor], state: dict[str, Any]
    ) -> dict[str, dict[str, Tensor]]:
        """What this rank takes part in writing."""
        own |= {f"residual/{name}": value for name, value in state.get("residual", {}).items()}
        folders = {worker_folder(self._world.worker): own} if own else {}
        if state and self._world.worker == 0:
            shared = {f"outer/{name}": value for name, value in state["outer"].items()}
            shared |= {f"next/{name}": value for name, value in state["next"].items()}
            for number, slot in enumerate(state["slots"]):
                shared |= {f"slot-{number}/{name}": value for name, value in slot.items()}
            folders[SHARED] = shared
        return folders

    def _write_folder(
        self, aside: Path, name: str, state: dict[str, Tensor]
    ) -> dict[str, list[int]]:
        """Returns the files this rank wrote. The first rank of the worker writes the index of all."""
        mesh, folder = self._world.host_mesh, aside / name
        group = None if mesh is None else mesh.get_group()
        writer = FileSystemWriter(
            folder, single_file_per_rank=True, sync_files=True, thread_count=1
        )
        with warnings.catch_warnings():  # a single process is what is meant, torch need not say so
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(state, storage_writer=writer, process_group=group, no_dist=group is None)
        rank = 0 if group is None else group.rank()
        mine = [*folder.glob(f"__{rank}_*.distcp"), *([folder / ".metadata"] if rank == 0 else [])]
        return {f"{name}/{path.name}": fingerprint(path) for path in mine}

    def _finish(self, aside: Path, path: Path, manifest: Manifest) -> None:
        missing = [name for name in manifest.files if not (aside / name).exists()]
        if missing:
            raise OSError(
                f"{aside / missing[0]} was written by another node and is not here: run.folder must be a folder that all "
                "nodes share"
            )
        complete(aside, path, manifest)
        prune(
            self._run,
            path,
            keep_latest=self._config.keep_latest,
            keep_every=self._config.keep_every,
        )

    def _by_the_first(self, task: Callable[[], object]) -> str:
        """Rank 0 does it; everybody learns how it went."""
        return self._on_all(task if self._world.is_first else lambda: None)

    def _on_all(self, task: Callable[[], object]) -> str:
        """Every rank does it; the failures of all, in words."""
        failure = ""
        try:
            task()
        except (
            Exception,
            CheckpointException,
        ) as error:  # (which is no Exception) the other ranks wait to be told
            failure = f"{_cause(error)} (rank {self._world.rank})"
        return "; ".join(dict.fromkeys(theirs for theirs in self._gather(failure) if theirs))

    def _gather(self, mine: Any) -> list[Any]:
        group = self._world.saving
        if group is None:
            return [mine]
        found: list[Any] = [None] * self._world.size
        dist.all_gather_object(found, mine, group=group)
        return found


def _cause(error: BaseException) -> str:
    """What went wrong at the bottom: DCP wraps the errors of all ranks."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    hint = ", which a full disk may cause" if "inline_container" in str(error) else ""
    return f"{type(error).__name__}: {error}".splitlines()[0] + hint
