"""The checkpoint that a run starts from: finding it, and loading it on any layout."""

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.messages import gather_objects
from torchtitan_diloco.base.tensors import local_of, shard_rows
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint import (
    MODEL,
    RANDOM,
    drop_state,
    inner_tensors,
    random_states,
    rank_file,
)
from torchtitan_diloco.components.checkpoint_folder import (
    DamagedError,
    Manifest,
    check_files,
    complete_checkpoints,
    folder_of_worker,
    read_manifest,
)
from torchtitan_diloco.config.schema import flatten
from torchtitan_diloco.diloco.data_parallel import OuterLoop
from torchtitan_diloco.diloco.state_dict import (
    SENT,
    SavedState,
    differences,
    write_shared,
)
from torchtitan_diloco.distributed.collectives import on_all_ranks
from torchtitan_diloco.distributed.world import WORKER, World

Shapes = dict[str, tuple[int, ...]]
NOT_COMPARED = ("run.folder", "run.name", "checkpoint.", "metrics.", "profiling.")


def check_tokenizer(manifest: Manifest | None, name: str, fingerprint: str) -> None:
    """Raise if the tokenizer is another one, for which the same ids mean other text."""
    if manifest is not None and manifest.tokenizer not in ("", fingerprint):
        raise UserError(
            f'the checkpoint was trained with another tokenizer than data.tokenizer = "{name}" '
            f"(fingerprint {manifest.tokenizer} there, {fingerprint} here): set that one"
        )


class SavedTensors:
    """The tensors of a checkpoint, of any number of ranks, by name.

    Each rank has saved consecutive rows of a sharded tensor in a file of its own. This class joins
    them: the rows of a file follow those of the file of the rank before. It reads only files in the
    manifest, whose checksums have been compared before.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self.shapes: Shapes = {}
        self._parts: dict[str, list[tuple[int, int, Any]]] = {}
        """First row, last row + 1 and file of each rank's rows, by name."""
        for file in (path / rank_file(rank) for rank in range(len(manifest.files))):
            try:
                opened: Any = safe_open(file, "pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file} does not hold tensors ({error})") from None
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                shape = tuple(opened.get_slice(name).get_shape())
                if not shape:  # a number, which one rank has saved
                    self._parts[name] = [(0, 1, opened)]
                    self.shapes[name] = ()
                    continue
                start = self.shapes[name][0] if name in self.shapes else 0
                end = start + shape[0]
                self._parts.setdefault(name, []).append((start, end, opened))
                self.shapes[name] = (end, *shape[1:])

    def fill(self, template: Mapping[str, Tensor]) -> None:
        """Fill the tensors of the template, or this rank's rows of them if they are sharded."""
        for name, tensor in template.items():
            if self.shapes.get(name) != tuple(tensor.shape):
                raise UserError(f"{self._path} has no {name} of shape {tuple(tensor.shape)}")
            local = local_of(tensor)
            first = 0  # row of the whole tensor that is the first one here
            if isinstance(tensor, DTensor):
                mesh = tensor.device_mesh
                dim = mesh.ndim - 1
                rank = mesh.get_local_rank(dim)
                first = shard_rows(len(tensor), rank, mesh.size(dim)).start
            for start, end, file in self._parts[name]:
                if not tensor.dim():
                    local.copy_(file.get_tensor(name))
                    continue
                # This file has the rows from `low` to `high` of those that are needed here.
                low = max(start, first)
                high = min(end, first + len(local))
                if low < high:
                    rows = file.get_slice(name)[low - start : high - start]
                    local[low - first : high - first].copy_(rows)


# --- find -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from."""

    goes_on: bool = False
    """Whether the checkpoint is of this run: false for a new run."""
    manifest: Manifest | None = None
    """None for a run from the beginning. That of another worker if this one has no checkpoint."""
    checkpoint: Path | None = None
    """Checkpoint of this worker, if it has one."""
    holders: list[int] = field(default_factory=list)
    """Workers that have the checkpoint."""
    of_this_worker: list[Path] = field(default_factory=list)
    """All complete checkpoints of this worker in `run.folder`, in the order of their steps."""
    adopted_from: str = ""
    """Location of the mirror of a run that this start continues, if `run.folder` had none."""

    @property
    def step(self) -> int:
        return 0 if self.manifest is None else self.manifest.step

    def load(self, name: str, part: Stateful) -> None:
        """Load the saved state of a part of the run, if there is a checkpoint that has it."""
        if self.manifest is not None and name in self.manifest.parts:
            part.load_state_dict(self.manifest.parts[name])


@dataclass(frozen=True)
class CheckedStep:
    """Result of a rank's check of a step: the manifest, or what is wrong with it."""

    manifest: Manifest | None = None
    problem: str = ""


def find_start(
    world: World, resume: str, run_folder: str, verified: set[Path] | None = None
) -> Start:
    """Return where a run starts: the same step on every rank.

    A run that has checkpoints goes on from them, also if it started from `checkpoint.resume`. The
    step is the newest one that is undamaged and that all workers have which have any. A worker that
    has none is new, or has lost its disk: it gets a copy.

    `verified`: checkpoints whose files are not compared with their checksums, as they have been
    before. Those that this call compares are added.
    """
    group = world.saving
    verified = set() if verified is None else verified
    ranks = world.ranks_per_worker
    run = Path(run_folder).expanduser()
    of_this_worker = complete_checkpoints(folder_of_worker(run, world.worker))
    goes_on = any(gather_objects(bool(of_this_worker), group))
    source = Path(resume).expanduser().resolve()
    if goes_on and resume != "auto" and source.parent.parent == run.resolve():
        reason = "is of the run in run.folder, which goes on from its newest: choose another folder"
        raise UserError(f'checkpoint.resume = "{resume}" {reason} for a new run')
    candidates = {path.name: path for path in of_this_worker}
    if not goes_on and resume != "auto":
        candidates = _checkpoints_of(world, resume)
    # From the newest step that any worker has, down to one that all ranks can use. All ranks judge
    # the same answers, so they agree.
    problems = list[str]()
    for name in _names_of_all(world, candidates):
        checked = on_all_ranks(group, partial(_verify, world, candidates, name, verified))
        of_ranks = gather_objects(checked, group)
        holders, problem = judge(of_ranks, ranks)
        if problem:
            problems.append(problem)
            continue
        if world.is_first:
            for newer in problems:
                logger.warning(f"{newer}: continuing from {name}")
        is_here = world.worker in holders
        source_worker = world.worker if is_here else holders[0]
        return Start(
            goes_on=goes_on,
            manifest=of_ranks[ranks * source_worker].manifest,  # the worker's first rank has it
            checkpoint=candidates[name] if is_here else None,
            holders=holders,
            of_this_worker=of_this_worker,
        )
    if problems:
        raise UserError(
            f"no checkpoint can be resumed: {'; '.join(problems)}. Remove a worker's checkpoints "
            "to give it a copy of another one's, or start a new run in another run.folder"
        )
    if resume != "auto":
        raise UserError(
            f'checkpoint.resume = "{resume}" is not the folder of a checkpoint, or of a run with a '
            'complete one: give such a folder, or "auto"'
        )
    return Start()


def _checkpoints_of(world: World, resume: str) -> dict[str, Path]:
    """Return this worker's checkpoints by name: those of a run, or one."""
    source = Path.cwd() / Path(resume).expanduser()  # a link may lead to another disk
    if not source.name.startswith("step-"):
        checkpoints = complete_checkpoints(folder_of_worker(source, world.worker))
        return {path.name: path for path in checkpoints}
    beside = folder_of_worker(source.parent.parent, world.worker) / source.name
    is_only = world.workers == 1 or (world.worker == 0 and not beside.exists())
    checkpoint = source if is_only else beside
    return {checkpoint.name: checkpoint} if checkpoint.is_dir() else {}


def _names_of_all(world: World, candidates: Mapping[str, Path]) -> list[str]:
    """Return the names of the checkpoints that any worker has, newest first. Collective."""
    listed = gather_objects(list(candidates), world.saving)
    for rank, names in enumerate(listed):
        if names != listed[rank - rank % world.ranks_per_worker]:
            reason = "does not see the checkpoints that its worker's first rank sees"
            raise UserError(f"rank {rank} {reason}: its nodes must share run.folder")
    known = {name for names in listed for name in names}
    # Names are zero-padded: a longer one is of a later step.
    return sorted(known, key=lambda name: (len(name), name), reverse=True)


def _verify(
    world: World, candidates: Mapping[str, Path], name: str, verified: set[Path]
) -> CheckedStep:
    """Check this rank's share of the files of a step, unless they are verified already."""
    if name not in candidates:
        # A worker without any checkpoint gets a copy, which is no problem.
        return CheckedStep(problem=f"worker {world.worker} has no {name}" if candidates else "")
    path = candidates[name]
    try:
        manifest = read_manifest(path)
        if path not in verified:
            names = sorted(manifest.files)[world.rank_in_worker :: world.ranks_per_worker]
            check_files(path, manifest, names)
            verified.add(path)
    except DamagedError as error:
        return CheckedStep(problem=f"{error} (found by rank {world.rank})")
    return CheckedStep(manifest if world.rank_in_worker == 0 else None)


def judge(of_ranks: Sequence[CheckedStep], ranks: int) -> tuple[list[int], str]:
    """Return the workers that have a step, and why it cannot be resumed, if so.

    `ranks`: of each worker. The save of the first worker that has one counts: what is left of
    workers that it did not have is ignored.
    """
    manifests = {
        rank // ranks: checked.manifest
        for rank, checked in enumerate(of_ranks)
        if checked.manifest is not None
    }
    saved_workers = next((saved.workers for saved in manifests.values()), len(of_ranks))
    of_saved = of_ranks[: saved_workers * ranks]
    problems = [checked.problem for checked in of_saved if checked.problem]
    holders = [worker for worker in manifests if worker < saved_workers]
    if not problems and len({manifests[worker].save for worker in holders}) > 1:
        problems = [f"workers {holders} have step {manifests[holders[0]].step} of several saves"]
    return holders, next(iter(problems), "")


# --- load -----------------------------------------------------------------------------------------


def restore(
    start: Start,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: OuterLoop,
    *,
    is_island: bool = False,
) -> list[str]:
    """Load a checkpoint and return what could not be carried over, one line each.

    `is_island`: the other workers are jobs of their own, with their own checkpoints.

    Workers without one get a copy of the first that has it, with the shared parameters in their
    model. With data parallelism, or after it, all workers go on from one.
    """
    manifest = start.manifest
    streaming = bool(outer.fragments)
    assert manifest is not None
    readers = start.holders if streaming else start.holders[:1]
    reads = world.worker in readers
    source = start.checkpoint if reads else None
    files = on_all_ranks(
        world.saving, lambda: None if source is None else SavedTensors(source, manifest)
    )
    # A worker that reads nothing learns from the first reader which tensors there are.
    shapes = {} if files is None else files.shapes
    of_first = gather_objects(shapes, world.saving)[readers[0] * world.ranks_per_worker]
    shapes = shapes or {name: tuple(shape) for name, shape in of_first.items()}
    _check_model(start, shapes, model, world)
    # Reading fills the tensors of model, optimizer and outer loop in place; those that only the
    # outer loop has are first created like the saved ones. What is not in the checkpoint stays.
    inner = inner_tensors(model, optimizer, create=True)
    tensors = {name: tensor for name, tensor in inner.items() if name in shapes}
    saved = None
    if manifest.outer is not None:
        facts = manifest.outer if reads else manifest.outer.for_new_worker()
        names = [name for name in shapes if reads or not name.startswith(SENT)]
        saved = SavedState.template(model, facts=facts, names=names, mesh=world.host_mesh)
        tensors |= saved.tensors
    # All wait for the slowest disk here, as groups between workers wait only as long as for a link.
    on_all_ranks(world.saving, partial(_fill, tensors, files, world))
    if len(readers) < world.workers:
        _copy_to_others(tensors, world, readers)
    notes = list[str]()
    if new := drop_state(model, optimizer, saved=shapes):
        notes.append(f"{new} tensors of the optimizer are not in the checkpoint and begin anew")
    if saved is None:
        outer.restart_from_model(manifest.step)
        if streaming:
            text = "the saved run had no outer loop: the shared parameters start as its model"
            notes.append(f"{text}, outer momentum from zero")
        return notes
    if not reads:
        write_shared(model, saved)
    notes += outer.load_state_dict(saved)
    if streaming and not is_island:
        notes += _changed_workers(manifest.workers, now=world.workers, readers=readers)
    return notes


def _check_model(start: Start, shapes: Shapes, model: nn.Module, world: World) -> None:
    """Raise if the checkpoint has parameters of other names or shapes than the model.

    One of another run, which has just been fetched, does not stay in `run.folder`.
    """
    saved = {name.removeprefix(MODEL): shapes[name] for name in shapes if name.startswith(MODEL)}
    mine = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if mistakes := differences(mine, saved):
        more = f", and {len(mistakes) - 1} more differ" if len(mistakes) > 1 else ""
        settings = "the [model] section, the tokenizer and training.sequence_length"
        if start.adopted_from:
            if start.checkpoint is not None and world.rank_in_worker == 0:
                shutil.rmtree(start.checkpoint)
            raise UserError(
                f"checkpoint.mirror = {start.adopted_from} belongs to a run with another model: "
                f"{mistakes[0]}{more}. Give this run a mirror of its own; or, to continue that "
                f"run, set {settings} as there"
            )
        raise UserError(
            f"{start.checkpoint or 'the checkpoint'} is of another model: {mistakes[0]}{more}. Set "
            f"{settings} as in the run's config.toml"
        )


def _fill(tensors: Mapping[str, Tensor], files: SavedTensors | None, world: World) -> None:
    """Fill the tensors and set the random states of this rank from its files, if it has any."""
    if files is not None:
        files.fill(tensors)
        _load_random_states(files, world)


def _load_random_states(files: SavedTensors, world: World) -> None:
    """Set the random states of this rank, if they were saved."""
    for name, state in random_states(world.device, world.rank_in_worker).items():
        if name in files.shapes:  # else the worker has more ranks than before
            files.fill({name: state})
            if name.startswith(f"{RANDOM}cuda"):
                torch.cuda.set_rng_state(state)
            else:
                torch.set_rng_state(state)


def _copy_to_others(tensors: Mapping[str, Tensor], world: World, readers: Sequence[int]) -> None:
    """Copy the state of the first worker that has read it to those that have not."""
    group = world.group(WORKER)
    device = world.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    for name, tensor in sorted(tensors.items()):
        local = local_of(tensor)
        if local.numel() and not name.startswith(SENT):
            sent = local.to(device, copy=True).contiguous()
            dist.broadcast(sent, group_src=readers[0], group=group)
            if world.worker not in readers:
                local.copy_(sent)


def _changed_workers(before: int, now: int, readers: Sequence[int]) -> list[str]:
    """Return what a run loses or copies that has other workers than its checkpoint."""
    notes = list[str]()
    if before > now:
        notes.append(
            f"{before} workers are now {now}: what those from {now} on had not sent yet is left "
            "behind"
        )
    if new := [worker for worker in range(now) if worker not in readers]:
        notes.append(
            f"workers {new} have no checkpoint: they get a copy from worker {readers[0]}, with the "
            "shared parameters"
        )
    return notes


def changed_settings(before: str, now: str, ignored: tuple[str, ...] = NOT_COMPARED) -> list[str]:
    """Return the differences between the settings of two TOML texts, one line each.

    `ignored`: beginnings of the keys that are not compared.
    """
    old, new = (flatten(tomllib.loads(text)) for text in (before, now))
    return [
        f"{key} was {old.get(key, 'not set')}, is {new.get(key, 'not set')}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not key.startswith(ignored)
    ]
