"""Resuming a run from a checkpoint, on the same layout or another one."""

import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import AdamW

from torchtitan_diloco.components.checkpoint_schema import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    RANDOM,
    SHARED,
    Manifest,
    RunState,
    complete_checkpoints,
    damage,
    read_manifest,
    worker_folder,
)
from torchtitan_diloco.components.inner_state import RandomState, inner_tensors, random_states
from torchtitan_diloco.config.loader import flatten
from torchtitan_diloco.diloco.outer_loop import OuterLoop
from torchtitan_diloco.diloco.state_dict import (
    SavedState,
    facts_for_new_worker,
    shared_parameter_name,
)
from torchtitan_diloco.distributed.collectives import gather_objects
from torchtitan_diloco.distributed.world import World

NO_OUTER_LOOP_SAVED = (
    "the saved run had no outer loop: the shared parameters start as its model, outer momentum "
    "from zero"
)
NOT_COMPARED = ("run.folder", "run.name", "checkpoint.", "metrics.", "profiling.")


@dataclass(frozen=True)
class Start:
    """Run folder and checkpoint that a run starts from."""

    folder: str = ""
    """Folder of the run to continue; empty for a new run."""
    checkpoint: str = ""
    """Folder of the checkpoint; empty for a run from the beginning."""
    manifest: Manifest | None = None

    @property
    def state(self) -> RunState:
        return RunState() if self.manifest is None else self.manifest.state


def find_start(resume: str, run_folder: str) -> Start:
    """Return what `checkpoint.resume` and `run.folder` mean."""
    own = Path(run_folder).expanduser() if run_folder else None
    if resume == "never" or (resume == "auto" and own is None):
        return Start()
    path = own if own is not None and resume == "auto" else Path(resume).expanduser()
    if resume != "auto" and (path / MANIFEST).exists():
        return _start("", path)
    if found := complete_checkpoints(path):
        same = own is None or own.resolve() == path.resolve()
        return _start(str(path) if same else "", found[-1])
    if resume == "auto":
        return Start(str(path) if (path / "metrics.jsonl").exists() else "")
    raise ValueError(
        f'checkpoint.resume = "{resume}" is no folder of a checkpoint, or of a run that has a '
        'complete one: give "auto", "never", or such a folder'
    )


def _start(folder: str, checkpoint: Path) -> Start:
    return Start(folder, str(checkpoint), read_manifest(checkpoint))


def changed_settings(before: str, now: str) -> list[str]:
    """Return the differences between the settings of two TOML texts, one line each."""
    old, new = (dict(flatten(tomllib.loads(text))) for text in (before, now))
    return [
        f"{key} was {old.get(key, 'not set')}, is {new.get(key, 'not set')}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not key.startswith(NOT_COMPARED)
    ]


def restore(
    start: Start,
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
    assert start.manifest is not None
    manifest, reader = start.manifest, _Reader(Path(start.checkpoint), start.manifest, world)
    streaming, streamed = bool(outer.fragment_names), bool(manifest.outer)
    worker = world.worker if streaming and streamed else 0
    existed = worker < manifest.workers
    source = worker % manifest.workers if existed or new_workers == "copy" else None
    reader.check_files([SHARED, *([] if source is None else [worker_folder(source)])])
    reader.check_model(model)
    if source is not None:
        reader.load_inner(source, model, optimizer, parameters=existed)
    if not streamed:
        outer.restart_from_model(manifest.step)
        return [NO_OUTER_LOOP_SAVED] if streaming else []
    if not existed:
        reader.load_shared_into(model)
    notes = outer.load_state_dict(reader.outer_state(worker, model))
    if not streaming:
        return notes
    change = f"{manifest.workers} workers are now {world.workers}"
    if manifest.workers > world.workers:
        notes.append(
            f"{change}: what those from {world.workers} on had not sent yet is left behind"
        )
    elif manifest.workers < world.workers:
        how = "as a copy" if new_workers == "copy" else "fresh"
        notes.append(
            f"{change}: the new ones start from the shared parameters, their inner optimizer {how}"
        )
    return notes


def saved_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the tensors in one folder of a checkpoint, by name."""
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: one for name, one in known.items() if isinstance(one, TensorStorageMetadata)}


def read_tensors(folder: Path, template: dict[str, Tensor]) -> None:
    """Fill the tensors of the template, whatever ranks wrote them. Each rank reads its own part."""
    if template:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(template, storage_reader=FileSystemReader(folder), no_dist=True)


class _Reader:
    def __init__(self, path: Path, manifest: Manifest, world: World) -> None:
        self._path, self._manifest, self._world = path, manifest, world

    def check_files(self, folders: list[str]) -> None:
        """Raise on every rank if a file is damaged. The ranks of a worker share the work."""
        ranks, rank = self._world.ranks_per_worker, self._world.rank_in_worker
        names = [name for name in sorted(self._manifest.files) if name.split("/")[0] in folders]
        found = damage(self._path, self._manifest, names[rank::ranks])
        for text in gather_objects(found, self._world.control):
            if text:
                raise ValueError(text)

    def check_model(self, model: nn.Module) -> None:
        theirs = {
            name.removeprefix(MODEL): tuple(known.size)
            for name, known in saved_tensors(self._path / worker_folder(0)).items()
            if name.startswith(MODEL)
        }
        mine = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        if differing:
            name = differing[0]
            there, here = theirs.get(name, "absent"), mine.get(name, "absent")
            raise ValueError(
                f"{self._path} is of another model: {name} is {there} there and {here} in this "
                f"run, and {len(differing) - 1} more differ. Set the [model] section, the "
                "tokenizer and training.sequence_length as in the run's config.toml"
            )

    def load_inner(
        self, source: int, model: nn.Module, optimizer: AdamW, *, parameters: bool
    ) -> None:
        """Load the optimizer of the saved worker `source`, and its parameters if asked for."""
        folder = self._path / worker_folder(source)
        tensors = inner_tensors(model, optimizer)
        if not parameters:
            tensors = {name: one for name, one in tensors.items() if not name.startswith(MODEL)}
        random, states = dict[str, Tensor](), dict[str, RandomState]()
        if parameters and self._manifest.ranks_per_worker == self._world.ranks_per_worker:
            states = random_states(self._world.device, self._world.rank_in_worker)
        for name in states.keys() & (known := saved_tensors(folder)).keys():
            random[name] = torch.zeros(known[name].size, dtype=torch.uint8)
        read_tensors(folder, tensors | random)
        for name, value in random.items():
            _, set_state = states[name]
            set_state(value)

    def load_shared_into(self, model: nn.Module) -> None:
        """Load the shared parameters into the model; frozen ones are not among them."""
        known = saved_tensors(self._path / SHARED)
        named = ((shared_parameter_name(name), one) for name, one in model.named_parameters())
        shared = {name: one.detach() for name, one in named if name in known}
        read_tensors(self._path / SHARED, shared)

    def outer_state(self, worker: int, model: nn.Module) -> SavedState:
        """Return the state of the outer loop for `worker`, which the saved run may not have had."""
        facts, own = facts_for_new_worker(self._manifest.outer[0]), list[str]()
        if worker < self._manifest.workers:
            facts = self._manifest.outer[worker]
            names = saved_tensors(self._path / worker_folder(worker))
            own = [name for name in names if not name.startswith((MODEL, OPTIMIZER, RANDOM))]
        shared = list(saved_tensors(self._path / SHARED))
        saved = SavedState.template(model, facts, shared, own, self._world.host_mesh)
        read_tensors(self._path / SHARED, saved.shared)
        read_tensors(self._path / worker_folder(worker), saved.own)
        return saved
