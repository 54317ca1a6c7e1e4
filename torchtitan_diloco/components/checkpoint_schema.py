"""The folder of a checkpoint: its files, the names of its tensors, its manifest, and checks.

RUN/checkpoints/step-00001000/manifest.json  `Manifest`
                              shared/        outer loop: `SavedState.shared`
                              worker-0/ ...  each worker: its model, inner optimizer and random
                                             states, and `SavedState.own` of the outer loop

Each rank of the worker that writes a folder of tensors has a safetensors file of its rows there.
Reading a checkpoint never runs code from it.

To add a number: declare it in `RunState` with a default for older checkpoints, fill it in
`Trainer._manifest`, and read it from `Trainer.resumed`. `Trainer._resumed_state` says what a change
of settings resets. To add a tensor of a worker: return it from `inner_tensors`; what the outer loop
saves is in diloco/state_dict.py. If older checkpoints would be read wrongly, raise VERSION.
Describe what users see in docs/checkpoint.md.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_diloco.components.checkpoint_folders import MANIFEST, flush_to_disk
from torchtitan_diloco.components.optimizer import initial_state
from torchtitan_diloco.diloco.fragments import local_of, shard_rows
from torchtitan_diloco.log import UserError

Result = TypeVar("Result")
VERSION = 5
SHARED = "shared"
RETRY_AFTER_SECONDS = (0.2, 1.0, 3.0)
MODEL, OPTIMIZER, RANDOM = "model/", "optimizer/", "random/"
"""Prefixes of the tensors in a worker's folder; all other names there are the outer loop's."""


@dataclass(frozen=True)
class RunState:
    """State of a run beside its tensors. A new run starts from `RunState()`."""

    step: int = 0
    tokens: int = 0
    """Tokens of all workers together."""
    position: int = 0
    """Position of the next sample in the global order of samples."""
    skipped_in_a_row: int = 0
    """Steps without an update, up to this one."""
    validated: tuple[int, float] | None = None
    """Step of the last validation and its loss."""
    totals: dict[str, float] = field(default_factory=dict)
    """`Telemetry.totals`: bytes and seconds."""
    counted_after_step: int = 0
    """Step from which the totals count: that of the last change of `diloco.method`, or 0."""
    elapsed_seconds: float = 0.0


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json: the description of a checkpoint."""

    state: RunState
    workers: int
    """Saved workers; 1 with data parallelism."""
    ranks_per_worker: int
    data: dict[str, Any]
    """Corpus, sequence length and order that `RunState.position` refers to."""
    config: str
    """Settings of the run, as TOML."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer."""
    outer: list[dict[str, Any]] = field(default_factory=list)
    """`SavedState.facts` of each worker; empty with data parallelism."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size in bytes and CRC-32 of every other file, by path in the folder. Without a common disk,
    each place has `shared/` and the folders of its own workers."""
    version: int = VERSION

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def present(self) -> list[int]:
        """Return the workers whose state is in this folder."""
        found = {name.partition("/")[0] for name in self.files}
        return [worker for worker in range(self.workers) if worker_folder(worker) in found]

    def nearest(self, worker: int) -> int:
        """Return this worker if its state is in this folder, else another one."""
        present = self.present or [0]
        return worker if worker in present else present[worker % len(present)]

    def identity(self) -> int:
        """Return a number that tells saves apart. All places of one save have the same."""
        state = replace(self.state, elapsed_seconds=0.0)
        return _crc(asdict(replace(self, state=state, config="", files={})))

    def to_json(self) -> str:
        values = asdict(self)
        return json.dumps({**values, "crc": _crc(values)}, indent=1)


class DamagedError(UserError):
    """A file of the checkpoint is missing or has changed since the save."""


def _crc(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


# --- tensors --------------------------------------------------------------------------------------


def inner_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the parameters and the optimizer's state by name, not copied. Create state that does
    not exist yet as the first step does."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"{MODEL}{name}": parameter.detach() for parameter, name in names.items()}
    pairs = [(group, one) for group in optimizer.param_groups for one in group["params"]]
    for group, parameter in pairs:
        state = optimizer.state[parameter]
        if not state:
            state.update(initial_state(group, parameter))
        for key, value in state.items():
            tensors[f"{OPTIMIZER}{key}/{names[parameter]}"] = value
    return tensors


def random_states(device: torch.device, rank: int) -> dict[str, Tensor]:
    """Return copies of a rank's random states by name. `rank`: in its worker."""
    states = {f"{RANDOM}cpu/{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{RANDOM}cuda/{rank}"] = torch.cuda.get_rng_state()
    return states


def worker_folder(worker: int) -> str:
    return f"worker-{worker}"


# --- checks ---------------------------------------------------------------------------------------


def fingerprint(path: Path) -> tuple[int, int]:
    """Return the size and the CRC-32 of a file."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while piece := file.read(2**22):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return size, crc


def read_with_retries(file: Path, read: Callable[[Path], Result]) -> Result:
    """Return `read(file)`. Retry, as errors of a disk may pass. Raise DamagedError if the file is
    missing."""
    pauses = iter(RETRY_AFTER_SECONDS)
    while True:
        try:
            return read(file)
        except FileNotFoundError:
            raise DamagedError(f"{file} is missing") from None
        except OSError as error:
            if (pause := next(pauses, None)) is None:
                raise UserError(
                    f"{file} cannot be read ({error.strerror}), which does not prove that it is "
                    "damaged: start again when the disk answers, or set checkpoint.resume to "
                    "another checkpoint"
                ) from None
            time.sleep(pause)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint `path`, or raise DamagedError."""
    file = path / MANIFEST
    content = read_with_retries(file, Path.read_bytes)
    try:
        values = json.loads(content)
        if not isinstance(values, dict) or values.pop("crc", None) != _crc(values):
            raise UserError("its CRC-32 differs")
        if values.get("version") == VERSION:
            return msgspec.convert(values, Manifest)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise DamagedError(f"{file} cannot be used ({error})") from None
    raise UserError(
        f"{path} was saved in version {values.get('version')} of the schema, and this program "
        f"reads version {VERSION}: resume it with the version of torchtitan_diloco that saved "
        "it, or start a new run"
    )


def check_tokenizer(path: Path | None, manifest: Manifest, name: str, fingerprint: str) -> None:
    """Raise if the tokenizer is another one, for which the same ids mean other text."""
    if manifest.tokenizer not in ("", fingerprint):
        raise UserError(
            f'{path} was trained with another tokenizer than data.tokenizer = "{name}" is now '
            f"(fingerprint {manifest.tokenizer} there, {fingerprint} here): put back the one that "
            "it was trained with, or set data.tokenizer to where that is"
        )


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise DamagedError if one of the files is damaged."""
    for name in names:
        (size, crc), file = manifest.files[name], path / name
        found = read_with_retries(file, fingerprint)
        if found[0] != size:
            raise DamagedError(f"{file} has {found[0]:,} bytes instead of {size:,}")
        if found[1] != crc:
            raise DamagedError(f"{file} has other content than was saved (its CRC-32 differs)")


# --- files of tensors -----------------------------------------------------------------------------


def rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def rows_to_write(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return this rank's rows of sharded tensors, and on the first rank also the tensors that all
    ranks hold whole."""
    return {
        name: local_of(value)
        for name, value in tensors.items()
        if isinstance(value, DTensor) or rank == 0
    }


def write_tensors(folder: Path, rows: dict[str, Tensor], rank: int) -> Path:
    """Write the file of a rank, and flush it to the disk."""
    folder.mkdir(exist_ok=True)
    file = folder / rank_file(rank)
    try:
        save_file(rows, file)
    except SafetensorError as error:  # such as a full disk; it does not name the file
        raise OSError(f"{file} cannot be written ({error})") from error
    file.chmod(folder.stat().st_mode & 0o666)  # safetensors ignores the umask
    flush_to_disk(file)
    return file


class TensorFolder:
    """The tensors in one folder of a checkpoint, of any number of ranks.

    Reads only files in the manifest, whose checksums have been compared before.
    """

    def __init__(self, path: Path, manifest: Manifest, folder: str) -> None:
        self._folder = path / folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[tuple[int, int, Any]]] = {}
        """First row, last row + 1 and file of each rank's rows, by name."""
        count = sum(name.startswith(f"{folder}/") for name in manifest.files)
        for file in (self._folder / rank_file(rank) for rank in range(count)):
            try:
                opened: Any = safe_open(file, "pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file} does not hold tensors ({error})") from None
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                shape = tuple(opened.get_slice(name).get_shape())
                before = self.shapes.get(name, (0,))[:1]
                end = before[0] + shape[0] if shape else 1
                self._parts.setdefault(name, []).append((before[0], end, opened))
                self.shapes[name] = (end, *shape[1:]) if shape else ()

    def fill(self, template: Mapping[str, Tensor]) -> None:
        """Fill the tensors of the template, or this rank's rows of them if they are sharded."""
        for name, tensor in template.items():
            if self.shapes.get(name) != tuple(tensor.shape):
                raise UserError(f"{self._folder} has no {name} of shape {tuple(tensor.shape)}")
            local, first = local_of(tensor), 0
            if isinstance(tensor, DTensor):
                mesh, dim = tensor.device_mesh, tensor.device_mesh.ndim - 1
                first = shard_rows(len(tensor), mesh.get_local_rank(dim), mesh.size(dim)).start
            for start, end, file in self._parts[name]:
                if not tensor.dim():
                    local.copy_(file.get_tensor(name))
                elif (low := max(start, first)) < (high := min(end, first + len(local))):
                    rows = file.get_slice(name)[low - start : high - start]
                    local[low - first : high - first].copy_(rows)
