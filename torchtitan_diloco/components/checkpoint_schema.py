"""The folder of a checkpoint: its files, the names of its tensors, its manifest, and checks.

RUN/checkpoints/step-00001000/manifest.json  `Manifest`
                              shared/        outer loop: `SavedState.shared`
                              worker-0/ ...  each worker: its model, inner optimizer and random
                                             states, and `SavedState.own` of the outer loop

Folders of tensors are in the format of
`torch.distributed.checkpoint` (DCP). Whatever a checkpoint holds, reading it runs no code of it.
"""

import json
import pickle
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from torchtitan_diloco.components.checkpoint_folders import MANIFEST
from torchtitan_diloco.components.muon import initial_state

Result = TypeVar("Result")
VERSION = 4
METADATA, SHARED = ".metadata", "shared"
RETRY_AFTER_SECONDS = (0.2, 1.0, 3.0)
MODEL, OPTIMIZER, RANDOM = "model/", "optimizer/", "random/"
"""Prefixes of the tensors in a worker's folder; all other names there are the outer loop's."""


@dataclass(frozen=True)
class RunState:
    """The state of a run beside its tensors. A new run starts from `RunState()`."""

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
    """Sums over the run and all ranks: bytes, seconds."""
    totals_after: int = 0
    """Step after which the totals were counted."""
    elapsed_seconds: float = 0.0


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json: the description of a checkpoint."""

    state: RunState
    workers: int
    """Workers that were saved; 1 with data parallelism."""
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
    """Size in bytes and CRC-32 of every other file, by path below the folder. Where places have no
    common disk, each has `shared/` and the folders of its own workers."""
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
        """Return this worker if its state is in this folder, else another one that is."""
        present = self.present or [0]
        return worker if worker in present else present[worker % len(present)]

    def identity(self) -> int:
        """Return a number that tells saves apart. It is the same in the parts of one save."""
        state = replace(self.state, elapsed_seconds=0.0)
        return _crc(asdict(replace(self, state=state, config="", files={})))

    def to_json(self) -> str:
        values = asdict(self)
        return json.dumps({**values, "crc": _crc(values)}, indent=1)


class DamagedError(ValueError):
    """A file of the checkpoint is missing, or has other content than was saved."""


class UnreadableError(ValueError):
    """A file could not be read, which does not prove that it is damaged."""


def _crc(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


# --- tensors --------------------------------------------------------------------------------------


def inner_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the parameters and the optimizer's state by name: the tensors themselves.

    State that does not exist yet is created as in the first step.
    """
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
    """Return copies of the random states of a rank in its worker, by name."""
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


def read_patiently(read: Callable[[], Result]) -> Result:
    """Return what `read` returns. Errors of a disk may pass: it is called four times."""
    pauses = iter(RETRY_AFTER_SECONDS)
    while True:
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError as error:
            if (pause := next(pauses, None)) is None:
                raise UnreadableError(
                    f"{error.filename} cannot be read ({error.strerror}), which does not prove "
                    "that it is damaged: start again when the disk answers, or set "
                    "checkpoint.resume to another checkpoint"
                ) from None
            time.sleep(pause)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in the folder `path`, or raise DamagedError."""
    file = path / MANIFEST
    try:
        values = json.loads(read_patiently(lambda: file.read_text(encoding="utf-8")))
        if not isinstance(values, dict) or values.pop("crc", None) != _crc(values):
            raise ValueError("its CRC-32 differs")
        if values.get("version") == VERSION:
            return msgspec.convert(values, Manifest)
    except FileNotFoundError:
        raise DamagedError(f"{path} has no {MANIFEST}") from None
    except UnreadableError:
        raise
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise DamagedError(f"{file} cannot be used ({error})") from None
    raise ValueError(
        f"{path} was saved in version {values.get('version')} of the schema, and this program "
        f"reads version {VERSION}: resume it with the version of torchtitan_diloco that saved "
        "it, or start a new run"
    )


def check_tokenizer(path: Path | str, manifest: Manifest, name: str, fingerprint: str) -> None:
    """Raise if the tokenizer is another one: the same ids would stand for other text."""
    if manifest.tokenizer not in ("", fingerprint):
        raise ValueError(
            f'{path} was trained with another tokenizer than data.tokenizer = "{name}" is now '
            f"(fingerprint {manifest.tokenizer} there, {fingerprint} here): put back the one that "
            "it was trained with, or set data.tokenizer to where that is"
        )


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise DamagedError if one of these files of a checkpoint is damaged."""
    for name in names:
        size, crc = manifest.files[name]
        file = path / name
        try:
            found = read_patiently(partial(fingerprint, file))
        except FileNotFoundError:
            raise DamagedError(f"{file} is missing") from None
        if found[0] != size:
            raise DamagedError(f"{file} has {found[0]:,} bytes instead of {size:,}")
        if found[1] != crc:
            raise DamagedError(f"{file} has other content than was saved (its CRC-32 differs)")


# --- reading tensors ------------------------------------------------------------------------------


class TensorFolder(FileSystemReader):
    """Reads the tensors in one folder of a checkpoint.

    All that is read must be in the manifest, whose checksums have been compared before.
    """

    def __init__(self, path: Path, manifest: Manifest, folder: str) -> None:
        super().__init__(path / folder)
        file = path / folder / METADATA
        try:
            with file.open("rb") as content:
                metadata: Metadata = _MetadataUnpickler(content).load()
            known = metadata.state_dict_metadata.items()
            used = {METADATA, *(info.relative_path for info in metadata.storage_data.values())}
        except Exception as error:
            raise ValueError(f"{file} does not describe tensors ({error})") from error
        if unknown := [name for name in used if f"{folder}/{name}" not in manifest.files]:
            raise ValueError(f"{path / MANIFEST} has no checksum of {folder}/{unknown[0]}")
        self._metadata = metadata
        self.tensors = {name: one for name, one in known if isinstance(one, TensorStorageMetadata)}
        """Size and type of each tensor, by name."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def fill(self, template: dict[str, Tensor]) -> None:
        """Fill the tensors of the template, whatever ranks wrote them.

        Each rank reads its own part.
        """
        if not template:
            return
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(template, storage_reader=self, no_dist=True)
        except CheckpointException as error:
            raise ValueError(f"{self.path} cannot be read: {cause_in_dcp(error)}") from error


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses all but the classes that describe tensors.

    `BytesStorageMetadata` is none of them: DCP unpickles such entries without any limit.
    """

    ALLOWED = {
        "pathlib": {"PosixPath"},
        "pathlib._local": {"PosixPath"},  # Python 3.13
        "torch": {"Size", "float64", "float32", "bfloat16", "float16", "int64", "uint8"},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.metadata": {
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return super().find_class(module, name)


def cause_in_dcp(error: BaseException) -> str:
    """Return the first cause of an error: DCP wraps the errors of all ranks."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    hint = ", which a full disk may cause" if "inline_container" in str(error) else ""
    return f"{type(error).__name__}: {error}".splitlines()[0] + hint
