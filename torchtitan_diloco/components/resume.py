"""Finding the checkpoint that a run starts from, and loading it, also on another layout."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_diloco.components import checkpoint_folders as folders
from torchtitan_diloco.components.checkpoint_schema import (
    MODEL,
    OPTIMIZER,
    RANDOM,
    SHARED,
    DamagedError,
    Manifest,
    RunState,
    TensorFolder,
    check_files,
    inner_tensors,
    random_states,
    read_manifest,
    worker_folder,
)
from torchtitan_diloco.components.optimizer import local_of
from torchtitan_diloco.config.schema import flatten
from torchtitan_diloco.diloco.object_collectives import broadcast_object, gather_objects
from torchtitan_diloco.diloco.outer_loop import OuterLoop
from torchtitan_diloco.diloco.state_dict import (
    SavedState,
    facts_for_new_worker,
    shared_parameter_name,
)
from torchtitan_diloco.distributed.collectives import on_all_ranks
from torchtitan_diloco.distributed.world import WORKER, World
from torchtitan_diloco.log import UserError, logger

STORED_FOLDER = "torchtitan_diloco/run folder"
"""Key of torchrun's store. It tells ranks that were started again where the run goes on."""


@dataclass(frozen=True)
class Start:
    """Run folder and checkpoint that a run starts from."""

    folder: Path | None = None
    """Folder of the run to continue; None for a new run."""
    checkpoint: Path | None = None
    """None for a run from the beginning."""
    manifest: Manifest | None = None
    damaged: dict[Path, str] = field(default_factory=dict)
    """Newer checkpoints that cannot be used, and why."""

    @property
    def state(self) -> RunState:
        return RunState() if self.manifest is None else self.manifest.state


def find_start(world: World, resume: str, run_folder: str) -> Start:
    """Return where `checkpoint.resume` and `run.folder` start: the same step on every rank.

    Every rank looks for itself, as places may have no common disk.
    """
    of_first_rank = on_all_ranks(world.control, lambda: _wanted(world, resume, run_folder))
    resume, folder_of_first_rank = broadcast_object(of_first_rank, list[str], world.control)
    run_folder = run_folder or folder_of_first_rank
    folder, candidates = on_all_ranks(world.control, lambda: _look(resume, run_folder))
    own = {path.name: path for path in candidates}
    found = gather_objects((folder is not None, list(own)), world.control)
    if found[0][0]:  # rank 0 may be the only one with records
        folder = folder or Path(run_folder).expanduser()
    wrong: dict[str, str] = {}
    names = {name for _, names in found for name in names}
    for name in sorted(names, key=lambda name: (len(name), name), reverse=True):
        lacking = next((rank for rank, (_, names) in enumerate(found) if name not in names), None)
        if lacking is None:
            manifest, problem = _verify(world, own[name])
        else:
            manifest, problem = None, f"{name} is not in all places (rank {lacking} lacks it)"
        if not problem:
            damaged = {own[newer]: why for newer, why in wrong.items() if newer in own}
            return Start(folder, own[name], manifest, damaged)
        if resume != "auto":
            raise UserError(
                f"{problem}: set checkpoint.resume to another checkpoint, or to "
                '"auto", which takes the newest one in run.folder that all places have undamaged'
            )
        wrong[name] = problem
    if wrong:
        raise UserError(
            f"no checkpoint can be resumed: {'; '.join(wrong.values())}. Copy the folder of one to "
            "the places that lack it, where workers whose state is not in it start from the shared "
            "parameters; or start a new run in another run.folder; or remove them to start over"
        )
    return Start(folder)


def _wanted(world: World, resume: str, run_folder: str) -> list[str]:
    """Return `checkpoint.resume` and `run.folder`. A run that torchrun has started again goes on
    where its first rank has begun, unless it was to start from elsewhere and has not saved yet."""
    store = world.store
    if not world.is_first or store is None or not store.check([STORED_FOLDER]):
        return [resume, run_folder]
    own = run_folder or store.get(STORED_FOLDER).decode()
    if resume == "never" or folders.complete_checkpoints(Path(own).expanduser()):
        resume = "strict" if resume == "strict" else "auto"
    return [resume, own if resume in ("auto", "strict") else run_folder]


def _look(resume: str, run_folder: str) -> tuple[Path | None, list[Path]]:
    """Return the folder of the run to continue and the checkpoints that it may start from."""
    own = Path(run_folder).expanduser() if run_folder else None
    if resume in ("auto", "strict", "never"):
        found = folders.complete_checkpoints(own) if own and resume != "never" else []
        begun = own and resume != "never" and (found or any(own.glob("worker-*/metrics.jsonl")))
        return own if begun else None, found
    path = Path(resume).expanduser()
    if (path / folders.MANIFEST).exists() or (path.is_dir() and folders.is_checkpoint(path)):
        return None, [path]
    if found := folders.complete_checkpoints(path):
        continued = own is None or own.resolve() == path.resolve()
        return path if continued else None, found
    raise UserError(
        f'checkpoint.resume = "{resume}" is no folder of a checkpoint, or of a run that has a '
        'complete one: give "auto", "strict", "never", or such a folder'
    )


def _verify(world: World, path: Path) -> tuple[Manifest | None, str]:
    """Return the manifest of a checkpoint, and what is damaged on any rank.

    The ranks of each worker check what it will read. Raise if a file cannot be read, which does not
    prove that it is damaged.
    """

    def check() -> tuple[Manifest | None, str]:
        try:
            manifest = read_manifest(path)
            read = f"{SHARED}/", f"{worker_folder(manifest.nearest(world.worker))}/"
            by_size = sorted(manifest.files, key=manifest.files.__getitem__, reverse=True)
            names = [name for name in by_size if name.startswith(read)]
            check_files(path, manifest, names[world.rank_in_worker :: world.ranks_per_worker])
        except DamagedError as error:
            return None, f"{error} (found by rank {world.rank})"
        return manifest, ""

    manifest, damaged = on_all_ranks(world.control, check)
    identity = 0 if manifest is None else manifest.identity()
    answers = gather_objects((damaged, identity), world.control)
    wrong = next((damaged for damaged, _ in answers if damaged), "")
    others = [rank for rank, (_, theirs) in enumerate(answers) if theirs != answers[0][1]]
    if others and not wrong:
        raise UserError(
            f"{path} of rank 0 and that of ranks {', '.join(map(str, others))} are not of one save:"
            " give all places the folder of the same run"
        )
    return manifest, wrong


# --- load ----------------------------------------------------------------------------------------

NO_OUTER_LOOP_SAVED = (
    "the saved run had no outer loop: the shared parameters start as its model, outer momentum "
    "from zero"
)
NOT_COMPARED = ("run.folder", "run.name", "checkpoint.", "metrics.", "profiling.")


def restore(
    path: Path,
    manifest: Manifest,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: OuterLoop,
) -> list[str]:
    """Load a checkpoint and return what could not be carried over, one line each.

    Without an outer loop, which has no fragments, all workers hold one model and resume from worker
    0. The inner optimizer of a new worker starts from zero.
    """
    streaming, streamed = bool(outer.fragment_names), bool(manifest.outer)
    worker = world.worker if streaming and streamed else 0
    existed = worker in manifest.present
    holders = gather_objects(existed, world.control)
    if not (streaming or any(holders)):
        raise UserError(
            f"data parallelism goes on from worker 0, whose state {path} holds in no place: copy "
            "the folder of the place that has it, or keep the method of the run"
        )
    if streaming and not existed and worker < manifest.workers and world.rank_in_worker == 0:
        logger.warning(
            f"the state of worker {worker} is not in {path}: it starts from the shared parameters"
        )
    own = TensorFolder(path, manifest, worker_folder(manifest.nearest(worker)))
    _check_model(path, own, model)
    notes = list[str]()
    if existed:
        same_ranks = manifest.ranks_per_worker == world.ranks_per_worker
        states = random_states(world.device, world.rank_in_worker) if same_ranks else {}
        notes += _load_inner(own, inner_tensors(model, optimizer), states)
    if not (streaming or all(holders)):
        source = holders.index(True) // world.ranks_per_worker
        _send_inner(inner_tensors(model, optimizer), world.group(WORKER), source)
    if not streamed:
        outer.restart_from_model(manifest.step)
        return [*notes, NO_OUTER_LOOP_SAVED] if streaming else notes
    shared = TensorFolder(path, manifest, SHARED)
    if existed:
        facts = manifest.outer[worker]
    else:
        facts = facts_for_new_worker(manifest.outer[0])
        named = ((shared_parameter_name(name), one) for name, one in model.named_parameters())
        # Frozen parameters are not shared: they stay as the workers have agreed.
        shared.fill({name: one.detach() for name, one in named if name in shared.shapes})
    own_names = own.shapes if existed else ()
    saved = SavedState.template(model, facts, shared.shapes, own_names, world.host_mesh)
    shared.fill(saved.shared)
    own.fill(saved.own)
    notes += outer.load_state_dict(saved)
    if not streaming or manifest.workers == world.workers:
        return notes
    change = f"{manifest.workers} workers are now {world.workers}"
    if manifest.workers > world.workers:
        end = f"what those from {world.workers} on had not sent yet is left behind"
    else:
        end = "the new ones start from the shared parameters, their inner optimizer from zero"
    return [*notes, f"{change}: {end}"]


def _check_model(path: Path, saved: TensorFolder, model: nn.Module) -> None:
    theirs = {
        name.removeprefix(MODEL): shape
        for name, shape in saved.shapes.items()
        if name.startswith(MODEL)
    }
    mine = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if differing:
        name = differing[0]
        there, here = theirs.get(name, "absent"), mine.get(name, "absent")
        raise UserError(
            f"{path} is of another model: {name} is {there} there and {here} in this run, and "
            f"{len(differing) - 1} more differ. Set the [model] section, the tokenizer and "
            "training.sequence_length as in the run's config.toml"
        )


def _load_inner(
    saved: TensorFolder, inner: dict[str, Tensor], random: dict[str, Tensor]
) -> list[str]:
    """Load what is a worker's own. Return what could not be carried over."""
    own = inner | random
    known = {name: tensor for name, tensor in own.items() if name in saved.shapes}
    saved.fill(known)
    for name in random.keys() & known.keys():
        on_gpu = name.startswith(f"{RANDOM}cuda")
        (torch.cuda.set_rng_state if on_gpu else torch.set_rng_state)(random[name])
    new = sum(name.startswith(OPTIMIZER) for name in own.keys() - known.keys())
    other = f"optimizer.name was another one: {new} tensors of its state start from zero"
    return [other] if new else []


def _send_inner(inner: dict[str, Tensor], group: dist.ProcessGroup | None, source: int) -> None:
    """Copy what is a worker's own from the worker `source` to the others, which lack its state:
    the run was saved with an outer loop, without a common disk."""
    for tensor in map(local_of, inner.values()):
        if tensor.numel():
            dist.broadcast(tensor, group_src=source, group=group)


def changed_settings(before: str, now: str) -> list[str]:
    """Return the differences between the settings of two TOML texts, one line each."""
    old, new = (flatten(tomllib.loads(text)) for text in (before, now))
    return [
        f"{key} was {old.get(key, 'not set')}, is {new.get(key, 'not set')}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not key.startswith(NOT_COMPARED)
    ]
