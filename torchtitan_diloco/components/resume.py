"""The checkpoint that a run starts from: finding it, and loading it on any layout.

`find_start` asks the sources of checkpoints, one after the other: `ThisRun`, the mirror of the run
(mirror.py), and `OtherRun`. The `Start` that it returns has what the plan of the run needs to know.
Once the run has claimed its folder, `Start.load` loads all of its `RunState`.
"""

import secrets
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.messages import broadcast_object, gather_objects
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint import (
    MODEL,
    RANDOM,
    Loads,
    RunState,
    drop_state,
    inner_tensors,
    random_states,
)
from torchtitan_diloco.components.checkpoint_folder import (
    DamagedError,
    Manifest,
    begun_checkpoints,
    check_files,
    complete_checkpoints,
    folder_of_worker,
    read_manifest,
)
from torchtitan_diloco.components.new_workers import copy_to_others, describe_changed_workers
from torchtitan_diloco.components.saved_tensors import SavedTensors, TensorShapes
from torchtitan_diloco.config.schema import flatten
from torchtitan_diloco.data.mixture import SavedPosition
from torchtitan_diloco.diloco.state_dict import (
    SENT,
    SavedState,
    differences,
    write_shared,
)
from torchtitan_diloco.distributed.collectives import on_all_ranks
from torchtitan_diloco.distributed.world import World

NOT_COMPARED = ("run.folder", "run.name", "checkpoint.", "metrics.", "price.", "profiling.")
"""Beginnings of keys that change nothing in what is computed."""


def check_tokenizer(manifest: Manifest, name: str, fingerprint: str) -> None:
    """Raise if the tokenizer is another one, for which the same ids mean other text."""
    if manifest.tokenizer not in ("", fingerprint):
        raise UserError(
            f'the checkpoint was trained with another tokenizer than data.tokenizer = "{name}" '
            f"(fingerprint {manifest.tokenizer} there, {fingerprint} here): set that one"
        )


# --- find -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from."""

    run: str = ""
    """Identity of the run that begins or goes on."""
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

    @property
    def position(self) -> SavedPosition | None:
        """Position in the data. None: at their beginning."""
        return None if self.manifest is None else self.manifest.position

    def load(self, state: RunState, world: World, *, is_island: bool = False) -> list[str]:
        """Load the checkpoint and return what could not be carried over, one line each.

        `is_island`: the other workers are jobs of their own, with their own checkpoints.
        """
        assert self.manifest is not None
        notes = _load_tensors(self, self.manifest, state, world, is_island=is_island)
        for part in state.parts:
            if self._loads(part.loads) and part.name in self.manifest.parts:
                part.load(self.manifest.parts[part.name])
        return notes

    def _loads(self, which: Loads) -> bool:
        match which:
            case Loads.ALWAYS:
                return True
            case Loads.WITH_RUN:
                return self.goes_on
            case Loads.WITH_WORKER:
                return self.goes_on and self.checkpoint is not None


class Source(Protocol):
    """Something that has checkpoints from which a run can start."""

    def find(self, start: Start, /) -> Start:
        """Return the start from a checkpoint of this source, or `start`, which the sources before
        have found, if that one is to be preferred. Collective."""


def find_start(sources: Iterable[Source]) -> Start:
    """Return where a run starts: the same step on every rank."""
    start = Start()
    for source in sources:
        start = source.find(start)
    return start


class ThisRun:
    """The checkpoints in `run.folder`, from which a run goes on, also if it started from
    `checkpoint.resume`."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._folder = Path(folder).expanduser()
        self.verified = set[Path]()
        """Checkpoints whose files are not compared with their checksums, as they have been."""

    def find(self, start: Start, /) -> Start:
        world = self._world
        folder = folder_of_worker(self._folder, world.worker)
        of_this_worker = complete_checkpoints(folder)
        newest = _find_newest(
            world, of_this_worker, begun_checkpoints(folder), self.verified, may_start_over=True
        )
        if newest.manifest is None:
            run = newest.run or start.run or new_identity(world)
            return replace(start, run=run, of_this_worker=of_this_worker)
        return replace(newest, run=newest.manifest.run, goes_on=True, of_this_worker=of_this_worker)


class OtherRun:
    """The checkpoints in `checkpoint.resume`, from one of which a new run starts."""

    def __init__(self, world: World, resume: str, run_folder: str) -> None:
        self._world = world
        self._resume = resume
        source = Path(resume).expanduser().resolve()
        if resume != "auto" and source.parent.parent == Path(run_folder).expanduser().resolve():
            reason = "is of the run in run.folder, which goes on from its newest: choose another"
            raise UserError(f'checkpoint.resume = "{resume}" {reason} folder for a new run')

    def find(self, start: Start, /) -> Start:
        if start.goes_on:
            return start
        # All ranks look, also those with "auto": whether all have the same setting is compared
        # later.
        is_given = self._resume != "auto"
        checkpoints = self._checkpoints() if is_given else []
        # A new run loses nothing if a worker takes a copy in place of a save that it has begun.
        newest = _find_newest(self._world, checkpoints, set(), set(), may_start_over=False)
        if newest.manifest is None and is_given:
            raise UserError(
                f'checkpoint.resume = "{self._resume}" is not the folder of a checkpoint, or of a '
                'run with a complete one: give such a folder, or "auto"'
            )
        return replace(newest, run=start.run, of_this_worker=start.of_this_worker)

    def _checkpoints(self) -> list[Path]:
        """Return this worker's checkpoints: those of a run, or one."""
        world = self._world
        source = Path.cwd() / Path(self._resume).expanduser()  # a link may lead to another disk
        if not source.name.startswith("step-"):
            return complete_checkpoints(folder_of_worker(source, world.worker))
        beside = folder_of_worker(source.parent.parent, world.worker) / source.name
        is_only = world.workers == 1 or (world.worker == 0 and not beside.exists())
        checkpoint = source if is_only else beside
        return [checkpoint] if checkpoint.is_dir() else []


def new_identity(world: World) -> str:
    """Return the identity of a new run, the same on all ranks."""
    return broadcast_object(secrets.token_hex(8), str, world.control)


@dataclass(frozen=True)
class CheckedStep:
    """Result of a rank's check of a step: the manifest, or what is wrong with it."""

    manifest: Manifest | None = None
    problem: str = ""
    is_unfinished: bool = False
    """Whether the problem is that the save of the step has ended before this worker had it."""


def _find_newest(
    world: World,
    checkpoints: Sequence[Path],
    begun: Set[str],
    verified: set[Path],
    *,
    may_start_over: bool,
) -> Start:
    """Return the start from the newest step that is undamaged and that all workers have which have
    any. Without a checkpoint on any worker, it has no manifest. Collective.

    A worker that has none is new, or has lost its disk: it gets a copy.

    Args:
        checkpoints: those of this worker.
        begun: names of those that it has not completed.
        verified: those that need not be verified; those that are verified are added.
        may_start_over: whether to return a start of the same run without a manifest, if its only
            step is a first save that not all workers have completed.
    """
    group = world.saving
    ranks = world.ranks_per_worker
    candidates = {path.name: path for path in checkpoints}
    # From the newest step that any worker has, down to one that all ranks can use. All ranks judge
    # the same answers, so they agree.
    problems = list[str]()
    names = _names_of_all(world, candidates)
    for name in names:
        verify = partial(_verify, world, candidates, begun, name, verified)
        checked = on_all_ranks(group, verify)
        of_ranks = gather_objects(checked, group)
        holders, problem = judge(of_ranks, ranks)
        if problem:
            problems.append(problem)
            unfinished = {checked.problem for checked in of_ranks if checked.is_unfinished}
            if may_start_over and problem in unfinished and len(names) == 1:
                if world.is_first:
                    logger.warning(f"{problem}, the only one of the run: starting over")
                manifests = [checked.manifest for checked in of_ranks if checked.manifest]
                return Start(run=manifests[0].run if manifests else "")
            continue
        if world.is_first:
            for newer in problems:
                logger.warning(f"{newer}: continuing from {name}")
        is_here = world.worker in holders
        source_worker = world.worker if is_here else holders[0]
        return Start(
            manifest=of_ranks[ranks * source_worker].manifest,  # the worker's first rank has it
            checkpoint=candidates[name] if is_here else None,
            holders=holders,
        )
    if problems:
        raise UserError(
            f"no checkpoint can be resumed: {'; '.join(problems)}. Remove a worker's checkpoints "
            "to give it a copy of another one's, or start a new run in another run.folder"
        )
    return Start()


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
    world: World,
    candidates: Mapping[str, Path],
    begun: Set[str],
    name: str,
    verified: set[Path],
) -> CheckedStep:
    """Check this rank's share of the files of a step, unless they are verified already."""
    if name not in candidates and name in begun:
        problem = f"worker {world.worker} has not completed {name}"
        return CheckedStep(problem=problem, is_unfinished=True)
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


def _load_tensors(
    start: Start, manifest: Manifest, state: RunState, world: World, *, is_island: bool
) -> list[str]:
    """Load model, optimizer, outer loop and random states. Return what could not be carried over.

    Workers without a checkpoint get a copy of the first that has it, with the shared parameters in
    their model. With data parallelism, or after it, all workers go on from one.
    """
    outer = state.outer
    streaming = bool(outer.fragments)
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
    _check_model(start, shapes, state.model, world)
    # Reading fills the tensors of model, optimizer and outer loop in place; those that only the
    # outer loop has are first created like the saved ones. What is not in the checkpoint stays.
    inner = inner_tensors(state.model, state.optimizer, create=True)
    tensors = {name: tensor for name, tensor in inner.items() if name in shapes}
    saved = None
    if manifest.outer is not None:
        facts = manifest.outer if reads else manifest.outer.for_new_worker()
        names = [name for name in shapes if reads or not name.startswith(SENT)]
        saved = SavedState.template(state.model, facts=facts, names=names, mesh=world.host_mesh)
        tensors |= saved.tensors
    # All wait for the slowest disk here, as groups between workers wait only as long as for a link.
    on_all_ranks(world.saving, partial(_fill, tensors, files, world))
    if len(readers) < world.workers:
        copy_to_others(tensors, world, readers)
    notes = list[str]()
    if new := drop_state(state.model, state.optimizer, saved=shapes):
        notes.append(f"{new} tensors of the optimizer are not in the checkpoint and begin anew")
    if saved is None:
        outer.restart_from_model(manifest.step)
        if streaming:
            text = "the saved run had no outer loop: the shared parameters start as its model"
            notes.append(f"{text}, outer momentum from zero")
        return notes
    if not reads:
        write_shared(state.model, saved)
    notes += outer.load_state(saved)
    if streaming and not is_island:
        notes += describe_changed_workers(manifest.workers, now=world.workers, readers=readers)
    return notes


def _check_model(start: Start, shapes: TensorShapes, model: nn.Module, world: World) -> None:
    """Raise if the checkpoint has parameters of other names or shapes than the model.

    One of another run, which has just been fetched, does not stay in `run.folder`.
    """
    saved = {name.removeprefix(MODEL): shapes[name] for name in shapes if name.startswith(MODEL)}
    of_model = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if mistakes := differences(of_model, saved):
        others = f", and {len(mistakes) - 1} more differ" if len(mistakes) > 1 else ""
        settings = "the [model] section, the tokenizer and training.sequence_length"
        if start.adopted_from:
            if start.checkpoint is not None and world.rank_in_worker == 0:
                shutil.rmtree(start.checkpoint)
            raise UserError(
                f"checkpoint.mirror = {start.adopted_from} belongs to a run with another model: "
                f"{mistakes[0]}{others}. Give this run a mirror of its own; or, to continue that "
                f"run, set {settings} as there"
            )
        raise UserError(
            f"{start.checkpoint or 'the checkpoint'} is of another model: {mistakes[0]}{others}. "
            f"Set {settings} as in the run's config.toml"
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
