"""What a run starts from, and how it takes back what a checkpoint holds, on the same layout or on another."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import AdamW

from torchtitan_diloco.components.checkpoint_folder import (
    MANIFEST,
    SHARED,
    Manifest,
    complete_checkpoints,
    damage,
    read_manifest,
    worker_folder,
)
from torchtitan_diloco.components.inner_state import (
    MODEL,
    RANDOM,
    STEPS,
    inner_template,
    set_optimizer_steps,
)
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.diloco.outer_loop import DataParallel
from torchtitan_diloco.diloco.state_dict import shaped_like
from torchtitan_diloco.distributed.agreement import broadcast_text, gather_texts
from torchtitan_diloco.distributed.world import World


@dataclass(frozen=True)
class Start:
    folder: str = ""
    """Of the run that goes on, empty for a new one."""
    checkpoint: str = ""
    """Folder of the checkpoint, empty for a run from the beginning."""
    manifest: Manifest | None = None

    @property
    def step(self) -> int:
        return 0 if self.manifest is None else self.manifest.step

    @property
    def tokens(self) -> int:
        return 0 if self.manifest is None else self.manifest.tokens


def agree_on_start(world: World, resume: str, run_folder: str) -> Start:
    """Rank 0 looks; all ranks get the same answer or the same error."""
    found, failure = ("", ""), ""
    if world.is_first:
        try:
            found = find_start(resume, run_folder)
            if found[1]:
                read_manifest(Path(found[1]))
        except ValueError as error:
            failure = str(error)
    folder, checkpoint, failure = json.loads(broadcast_text(world, json.dumps([*found, failure])))
    if failure:
        raise ValueError(failure)
    if not checkpoint:
        return Start(folder)
    text = Path(checkpoint, MANIFEST).read_text(encoding="utf-8") if world.is_first else ""
    return Start(folder, checkpoint, Manifest.from_json(broadcast_text(world, text)))


def find_start(resume: str, run_folder: str) -> tuple[str, str]:
    """The folder of the run to go on with, and the checkpoint to start from."""
    if resume == "never":
        return "", ""
    if resume == "auto":
        folder = Path(run_folder).expanduser() if run_folder else None
        if folder is None:
            return "", ""
        found = complete_checkpoints(folder)
        begun = bool(found) or (folder / "metrics.jsonl").exists()
        return str(folder) if begun else "", str(found[-1]) if found else ""
    path = Path(resume).expanduser()
    if (path / MANIFEST).exists():
        return "", str(path)
    found = complete_checkpoints(path)
    if found:
        own = not run_folder or Path(run_folder).expanduser().resolve() == path.resolve()
        return str(path) if own else "", str(found[-1])
    if not path.exists():
        raise ValueError(
            f'checkpoint.resume = "{resume}" does not exist: give "auto", "never", or the folder of a run or of a checkpoint'
        )
    raise ValueError(
        f'checkpoint.resume = "{resume}" is neither "auto" nor "never", and no folder of a checkpoint or of a run with a '
        "complete one: look into the run's folder, below checkpoints/"
    )


def changed_settings(manifest: Manifest, settings: dict[str, str]) -> list[str]:
    """What the run goes on with instead, one line each."""
    ignored = ("run.folder", "run.name", "checkpoint.", "metrics.", "profiling.")
    keys = [key for key in sorted({*manifest.settings, *settings}) if not key.startswith(ignored)]
    before = [manifest.settings.get(key, "absent") for key in keys]
    after = [settings.get(key, "absent") for key in keys]
    return [
        f"{key} was {old}, is {new}"
        for key, old, new in zip(keys, before, after, strict=True)
        if old != new
    ]


def restore(
    start: Start,
    config: Checkpoint,
    world: World,
    model: nn.Module,
    optimizer: AdamW,
    outer: StreamingDiLoCo | DataParallel,
) -> list[str]:
    """Returns what could not be carried over, one line each."""
    assert start.manifest is not None
    loader = _Loader(Path(start.checkpoint), start.manifest, world)
    saved_workers = start.manifest.workers
    has_shared = bool(start.manifest.outer)
    worker = world.worker if has_shared and isinstance(outer, StreamingDiLoCo) else 0
    known = worker < saved_workers
    source = worker if known or config.new_workers == "copy" else None
    source = None if source is None else source % saved_workers
    loader.check_files([SHARED, *([] if source is None else [worker_folder(source)])])
    loader.check_model(model)
    if source is not None:
        loader.load_inner(source, model, optimizer, parameters=known)
    notes = []
    if has_shared and not (known and isinstance(outer, StreamingDiLoCo)):
        loader.load_shared_into(model)
    if isinstance(outer, StreamingDiLoCo):
        if has_shared:
            notes += outer.load_state_dict(loader.outer_state(worker, source, model))
        else:
            outer.restart_from_model(start.manifest.step)
            notes.append(
                "the saved run had no outer loop: the shared parameters start as its model, outer momentum from zero"
            )
        if saved_workers > world.workers:
            notes.append(
                f"{saved_workers} workers are now {world.workers}: what those from {world.workers} on had of their own, "
                "not sent yet, is left behind"
            )
        if has_shared and saved_workers < world.workers:
            notes.append(
                f"{saved_workers} workers are now {world.workers}: the new ones start from the shared parameters, their inner "
                f"optimizer {'as a copy' if config.new_workers == 'copy' else 'fresh'}"
            )
    elif has_shared:
        notes.append(
            "there is no outer loop any more: the model starts from the shared parameters, the optimizer from worker 0's"
        )
    return notes


def saved_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """What is in one of a checkpoint's folders, by name."""
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: value for name, value in known.items() if isinstance(value, TensorStorageMetadata)
    }


def read_tensors(
    folder: Path, template: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Reads into the tensors of the template, whatever the ranks were that wrote them. `group`: the ranks that share the
    template's tensors; None for a single process."""
    if template:
        with warnings.catch_warnings():  # a single process is what is meant, torch need not say so
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(
                template,
                storage_reader=FileSystemReader(folder),
                process_group=group,
                no_dist=group is None,
            )


class _Loader:
    def __init__(self, path: Path, manifest: Manifest, world: World) -> None:
        self._path, self._manifest, self._world = path, manifest, world
        self._group = None if world.host_mesh is None else world.host_mesh.get_group()

    def check_files(self, folders: list[str]) -> None:
        """The ranks of a worker share the work. Whatever one finds is everybody's error."""
        ranks, rank = self._world.ranks_per_worker, self._world.rank_in_worker
        names = [name for name in sorted(self._manifest.files) if name.split("/")[0] in folders]
        found = gather_texts(self._world, damage(self._path, self._manifest, names[rank::ranks]))
        wrong = next((text for text in found if text), "")
        if wrong:
            raise ValueError(wrong)

    def check_model(self, model: nn.Module) -> None:
        theirs = {
            name.removeprefix(MODEL): tuple(known.size)
            for name, known in self._tensors(worker_folder(0)).items()
            if name.startswith(MODEL)
        }
        mine = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        if differing:
            name = differing[0]
            raise ValueError(
                f"{self._path} is of another model: {name} is {theirs.get(name, 'absent')} there and {mine.get(name, 'absent')}"
                f" in this run, and {len(differing) - 1} more differ. Set the [model] section, the tokenizer and "
                "training.sequence_length as in the run's config.toml"
            )

    def load_inner(
        self, source: int, model: nn.Module, optimizer: AdamW, *, parameters: bool
    ) -> None:
        folder = worker_folder(source)
        template = inner_template(model, optimizer, parameters=parameters)
        rank = self._world.rank_in_worker
        known = self._tensors(folder)
        same_ranks = parameters and self._world.ranks_per_worker == self._manifest.ranks_per_worker
        setters = {
            f"{RANDOM}cpu/{rank}": torch.set_rng_state,
            f"{RANDOM}cuda/{rank}": torch.cuda.set_rng_state,
        }
        random = {name: setter for name, setter in setters.items() if same_ranks and name in known}
        if not next(model.parameters()).is_cuda:
            random.pop(f"{RANDOM}cuda/{rank}", None)
        template |= {name: torch.zeros(known[name].size, dtype=torch.uint8) for name in random}
        self._load(folder, template)
        set_optimizer_steps(model, optimizer, template[STEPS])
        for name, setter in random.items():
            setter(template[name])

    def load_shared_into(self, model: nn.Module) -> None:
        known = self._tensors(SHARED)
        names = {
            f"outer/{name}": parameter.detach() for name, parameter in model.named_parameters()
        }
        self._load(SHARED, {name: value for name, value in names.items() if name in known})

    def outer_state(self, worker: int, source: int | None, model: nn.Module) -> dict[str, Any]:
        known = worker < self._manifest.workers
        state = dict(self._manifest.outer[worker if known else 0])
        if not known:
            state["fragments"] = [record | {"weight": 0.0} for record in state["fragments"]]
        kinds = self._by_kind(SHARED, model)
        slots = sorted(
            (kind for kind in kinds if kind.startswith("slot-")),
            key=lambda kind: int(kind.removeprefix("slot-")),
        )
        residual = (
            self._by_kind(worker_folder(worker), model).get("residual", {})
            if known and source is not None
            else {}
        )
        for kind in ("outer", "next", *slots):
            self._load(
                SHARED, {f"{kind}/{name}": value for name, value in kinds.get(kind, {}).items()}
            )
        if residual:
            self._load(
                worker_folder(worker),
                {f"residual/{name}": value for name, value in residual.items()},
            )
        return state | {
            "outer": kinds["outer"],
            "next": kinds.get("next", {}),
            "slots": [kinds[kind] for kind in slots],
            "residual": residual,
        }

    def _by_kind(self, folder: str, model: nn.Module) -> dict[str, dict[str, Tensor]]:
        """Room in host memory for what the outer loop saved there, by kind and parameter."""
        parameters, kinds = dict(model.named_parameters()), dict[str, dict[str, Tensor]]()
        for key in self._tensors(folder):
            kind, _, name = key.partition("/")
            if kind in ("outer", "next", "residual") or kind.startswith("slot-"):
                parameter = parameters[name]
                local = parameter.detach()
                size = (local.to_local() if hasattr(local, "to_local") else local).numel()
                kinds.setdefault(kind, {})[name] = shaped_like(
                    parameter, torch.zeros(size), self._world.host_mesh
                )
        return kinds

    def _tensors(self, folder: str) -> dict[str, TensorStorageMetadata]:
        return saved_tensors(self._path / folder)

    def _load(self, folder: str, template: dict[str, Tensor]) -> None:
        read_tensors(self._path / folder, template, self._group)
