"""Checkpoints of a worker: what they hold, and saving them while training goes on.

RUN/worker-0/step-00001000/manifest.json  `Manifest`
                           rank-0.safetensors ...  for each rank of the worker, its rows of
    model/NAME, optimizer/STATE/NAME, random/...   parameters, inner optimizer, random states
    outer/NAME, momentum/NAME, ...                 the outer loop: `SavedState.tensors`

A folder gets its name once it is complete. Files are safetensors and JSON, so reading a checkpoint
never runs code from it; `torch.distributed.checkpoint` pickles its metadata.

To add a number: add a field to the state of the `RunPart` that has it, such as `SavedTelemetry`. To
add a part: add a line to the `RunState` of the trainer. To add a tensor of a worker: return it from
`inner_tensors`; what the outer loop saves is in diloco/state_dict.py. If older checkpoints would be
read wrongly, raise VERSION.
"""

import json
import time
import zlib
from collections.abc import Callable, Container, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_diloco.base.background import BackgroundThread
from torchtitan_diloco.base.hardware import flush_to_disk
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.messages import gather_objects
from torchtitan_diloco.base.tensors import copy_to_host, is_finite, local_of
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint_folder import (
    Files,
    Manifest,
    begin,
    checkpoint_path,
    complete,
    crc_of,
    discard,
    incomplete,
    prune,
)
from torchtitan_diloco.components.optimizer import create_state
from torchtitan_diloco.components.run_plan import AfterStep
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.data.mixture import SavedPosition
from torchtitan_diloco.diloco.data_parallel import OuterLoop
from torchtitan_diloco.distributed.collectives import naming_lost_ranks, on_all_ranks
from torchtitan_diloco.distributed.world import FSDP, World

MODEL = "model/"
"""Prefix of the names of parameters. Names without one of these prefixes are the outer loop's."""
OPTIMIZER = "optimizer/"
RANDOM = "random/"
SAVE_AFTER_ERROR_SECONDS = 20.0
"""Time for a save in progress when a run ends with an error."""
LEAVE_SECONDS = 5.0
"""Time to end a run, after the wait for the mirror, on a machine that is taken away."""

State = TypeVar("State")

# --- state ----------------------------------------------------------------------------------------


class HasState(Protocol[State]):
    """A part of a run with a state to go on from. `State`: a dataclass of what JSON can hold."""

    def saved_state(self) -> State:
        """Return the state, which is copied before training goes on."""

    def load_state(self, saved: State, /) -> None:
        """Go on from a state that was saved."""


class Loads(Enum):
    """When a part takes over its state from the checkpoint that a run starts from."""

    ALWAYS = auto()
    """Also in a new run that starts from the checkpoint of another one."""
    WITH_RUN = auto()
    """If the run goes on. A worker without a checkpoint takes over that of another one."""
    WITH_WORKER = auto()
    """If the run goes on, and this worker has a checkpoint of its own."""


@dataclass(frozen=True)
class RunPart(Generic[State]):
    """A part of a run whose state is saved beside the tensors, as JSON."""

    name: str
    """Its key in `Manifest.parts`."""
    owner: HasState[State]
    kind: type[State]
    """Type of its state."""
    loads: Loads

    def saved(self) -> Any:
        """Return a copy of the state, of what JSON can hold."""
        return msgspec.to_builtins(self.owner.saved_state())

    def load(self, saved: Any) -> None:
        """Load what `saved` has returned."""
        try:
            state = msgspec.convert(saved, self.kind)
        except msgspec.ValidationError as error:
            raise UserError(
                f'the checkpoint has a state of "{self.name}" that cannot be read ({error}): '
                "resume it with the version of torchtitan_diloco that saved it"
            ) from None
        self.owner.load_state(state)


@dataclass(frozen=True)
class RunState:
    """All that a checkpoint holds of a worker. `Checkpointer` saves it, and `Start.load` loads
    it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    outer: OuterLoop
    parts: Sequence[RunPart[Any]] = ()


# --- tensors --------------------------------------------------------------------------------------


def inner_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, create: bool = False
) -> dict[str, Tensor]:
    """Return parameters and optimizer state by name, not copied.

    A parameter has no state before its first step, or after a reset of its fragment. `create`: it
    gets one, to be filled.
    """
    if create:
        create_state(optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"{MODEL}{name}": parameter.detach() for parameter, name in names.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items():
                tensors[f"{OPTIMIZER}{key}/{names[parameter]}"] = value
    return tensors


def drop_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Container[str]) -> int:
    """Drop the state of parameters, unless all of it is `saved`, so that the optimizer begins it.
    Return the number of tensors that were not saved."""
    lacking = 0
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        if unsaved := sum(f"{OPTIMIZER}{key}/{name}" not in saved for key in state):
            del optimizer.state[parameter]
            lacking += unsaved
    return lacking


def random_states(device: torch.device, rank: int) -> dict[str, Tensor]:
    """Return copies of a rank's random states by name. `rank`: its number in its worker."""
    states = {f"{RANDOM}cpu/{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{RANDOM}cuda/{rank}"] = torch.cuda.get_rng_state()
    return states


def rows_to_write(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return this rank's rows of sharded tensors, and on the first rank also the tensors that all
    ranks hold whole."""
    return {
        name: local_of(value)
        for name, value in tensors.items()
        if isinstance(value, DTensor) or rank == 0
    }


def rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def write_tensors(folder: Path, rows: dict[str, Tensor], rank: int) -> Files:
    """Write the file of a rank, if it has rows, and flush it to the disk. Return its fingerprint.

    Raise if a value is not finite, as it would be after every restart.
    """
    if not rows:
        return {}
    for name, value in rows.items():
        if value.is_floating_point() and not is_finite([value]):
            raise UserError(f"{name} is not finite")
    if not folder.is_dir():
        raise OSError(f"{folder} of another node is not here: its nodes must share run.folder")
    file = folder / rank_file(rank)
    try:
        save_file(rows, file)
    except SafetensorError as error:  # such as a full disk; it does not name the file
        raise OSError(f"{file} cannot be written ({error})") from error
    file.chmod(folder.stat().st_mode & 0o666)  # safetensors ignores the umask
    flush_to_disk(file)
    return {file.name: fingerprint_of_rows(file, rows)}


def fingerprint_of_rows(file: Path, rows: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the fingerprint that a file of these tensors must have.

    Only its header is read, which says in which order the tensors follow. Their bytes are those in
    memory, so a fault of the disk does not get a matching checksum.
    """
    with file.open("rb") as opened:
        length = opened.read(8)
        header = opened.read(int.from_bytes(length, "little"))
    offsets = {
        name: entry["data_offsets"]
        for name, entry in json.loads(header).items()
        if name != "__metadata__"
    }
    # A safetensors file is the length of the header, the header, and the bytes of all tensors.
    crc = zlib.crc32(length + header)
    for name in sorted(offsets, key=offsets.__getitem__):  # those of no bytes first
        crc = zlib.crc32(rows[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    size = len(length) + len(header) + max((end for _, end in offsets.values()), default=0)
    return size, crc


# --- saving ---------------------------------------------------------------------------------------


class Copier(Protocol):
    """Copies checkpoints elsewhere (mirror.py)."""

    @property
    def held(self) -> Set[Path]: ...

    def offer(self, path: Path) -> None: ...

    def finish(self, most_seconds: Callable[[], float]) -> None: ...

    def close(self) -> None: ...


class Checkpointer:
    """Saves one checkpoint at a time; a failed save leaves training and earlier checkpoints alone.

    Each worker writes its own; with data parallelism only worker 0. Training waits for the
    exchanges in flight and for copies in host memory.
    """

    def __init__(
        self,
        config: Checkpoint,
        folder: Path,
        world: World,
        state: RunState,
        *,
        about: Manifest,
        mirror: Copier | None = None,
        is_locked: bool = True,
    ) -> None:
        """Build the checkpointer of a worker.

        Args:
            folder: that of this worker.
            about: what is the same in all checkpoints of the run.
            is_locked: no other run can be in the folder; otherwise only what this start has begun
                is deleted.
        """
        self._config = config
        self._folder = folder
        self._world = world
        self._state = state
        self._about = about
        self._mirror = mirror
        self._thread = BackgroundThread("checkpoint")
        self._saving: Future[str] | None = None
        self._begun = set[Path]()
        self._only = None if is_locked else self._begun
        self._writes = bool(state.outer.fragments) or world.worker == 0
        self._is_first = self._writes and world.rank_in_worker == 0
        self._timer_start = time.monotonic()
        self.failure = ""
        """Why the last save failed; empty if it did not."""
        self.save_seconds = 0.0
        """Time from the beginning to the end of the last complete save, 0 if there was none."""
        self._save_started = 0.0

    def is_due(self, after: AfterStep) -> bool:
        """Return whether to save after a step. A run that pauses always does."""
        if after.asked_to_save or after.paused:
            return True
        return after.is_multiple_of(self._config.every) or (after.stops and self._config.at_end)

    def due_by_time(self) -> bool:
        """Return whether `every_minutes` have passed on the clock of rank 0, and no save is under
        way, which training would have to wait for.

        The timer starts again at once, as all ranks agree on the save some steps later.
        """
        minutes = self._config.every_minutes
        if minutes == 0 or not self._world.is_first:
            return False
        now = time.monotonic()
        if now < self._timer_start + 60 * minutes:
            return False
        if self._saving is not None and not self._saving.done():
            return False
        self._timer_start = now
        return True

    def save(self, step: int, tokens: int, position: SavedPosition | None) -> float:
        """Start a save and return the seconds that it took from training, without waits for
        exchanges, which the outer loop counts. Every rank calls it after the same step.

        `tokens`: tokens of all workers together, up to this step. `position`: in the data.
        """
        started = time.perf_counter()
        rank = self._world.rank_in_worker
        state = self._state
        waited = state.outer.exposed_seconds
        self.wait()
        self._timer_start = time.monotonic()
        self._save_started = time.perf_counter()
        state.outer.heal(self._world.group(FSDP))
        saved = state.outer.saved_state(self._world.host_mesh)
        rows = rows_to_write(saved.tensors, rank) if saved else {}
        if self._writes:
            inner = rows_to_write(inner_tensors(state.model, state.optimizer), rank)
            rows |= {name: copy_to_host(value) for name, value in inner.items()}
            rows |= random_states(self._world.device, rank)
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        manifest = replace(
            self._about,
            step=step,
            tokens=tokens,
            position=position,
            parts={part.name: part.saved() for part in state.parts},
            outer=saved.facts if saved else None,
        )
        self._saving = self._thread.submit(partial(self._write, manifest, rows))
        return time.perf_counter() - started - (state.outer.exposed_seconds - waited)

    def wait(self) -> None:
        """Wait for the save under way. Raise if a worker is lost meanwhile."""
        if self._saving is None:
            return
        while not wait([self._saving], timeout=1.0).done:
            self._world.liveness.check("seen in a save")
        with naming_lost_ranks(self._world, "in a save"):
            self.failure = self._saving.result()
        self._saving = None

    def finish(self, seconds_left: Callable[[], float]) -> None:
        """Wait for the save under way, and then for its copy in the mirror.

        `seconds_left`: returns the time until this machine is taken away.
        """
        self.wait()

        def most_seconds() -> float:
            most = min(seconds_left() - LEAVE_SECONDS, self._config.mirror_wait_seconds)
            return max(0.0, float(most))

        if self._mirror is not None:
            with naming_lost_ranks(self._world, "in the wait for the mirror"):
                self._mirror.finish(most_seconds)

    def close(self) -> None:
        """Give a save under way some time. Its failure must not hide why the run has ended.

        After a loss the save has failed, or it waits for the lost rank.
        """
        if self._saving is not None and not self._world.liveness.is_lost:
            wait([self._saving], SAVE_AFTER_ERROR_SECONDS)
        self._thread.close(timeout=0.0)
        if self._mirror is not None:
            self._mirror.close()

    # --- in the background ------------------------------------------------------------------------

    def _begin(self, path: Path) -> None:
        begin(path, self._only)
        self._begun.add(path)

    def _write(self, manifest: Manifest, rows: dict[str, Tensor]) -> str:
        """Write a checkpoint. Return on every rank why it failed, or an empty text."""
        started = time.perf_counter()
        path = checkpoint_path(self._folder, manifest.step)
        subject = f"checkpoint of step {manifest.step}"
        world = self._world
        on_all = partial(on_all_ranks, world.saving)
        try:
            on_all(lambda: self._begin(path) if self._is_first else None)
            own_files = on_all(lambda: write_tensors(incomplete(path), rows, world.rank_in_worker))
            files = gather_objects(own_files, world.saving)
            first = world.rank - world.rank_in_worker
            files_of_worker: Files = {}
            for part in files[first : first + world.ranks_per_worker]:
                files_of_worker |= part
            text = replace(manifest, files=files_of_worker, save=crc_of(files)).to_json()
            on_all(lambda: complete(path, text) if self._is_first else None)
        except (ValueError, OSError) as error:
            if path in self._begun:
                discard(path)  # also if only this worker could complete it
            if world.is_first:
                logger.error(f"{subject} could not be saved: {error}; earlier ones are untouched")
            return str(error)
        if self._mirror is not None:
            self._mirror.offer(path)
        held = self._mirror.held if self._mirror is not None else frozenset[Path]()
        if self._is_first:  # now that all workers have this one
            prune(
                self._folder,
                keep_latest=self._config.keep_latest,
                keep_every=self._config.keep_every,
                held=held,
                only=self._only,
            )
        megabytes = sum(size for part in files for size, _ in part.values()) / 1e6
        seconds = time.perf_counter() - started
        self.save_seconds = time.perf_counter() - self._save_started
        logger.info(f"{subject}: {megabytes:,.1f} MB in {seconds:.1f} s, {path}")
        return ""
