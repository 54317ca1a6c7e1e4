"""The format of a checkpoint: its folders, the names of its tensors, and its manifest.

RUN/checkpoints/step-00001000/manifest.json  `Manifest`
                              shared/        outer loop: `SavedState.shared`
                              worker-0/ ...  each worker: its model, inner optimizer and random
                                             states, and `SavedState.own` of the outer loop

The folder has its name only once it is complete. Folders of tensors are in the format of
`torch.distributed.checkpoint`.
"""

import json
import os
import re
import shutil
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

VERSION = 2
MANIFEST, SHARED, INCOMPLETE = "manifest.json", "shared", ".incomplete"
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
    """Number of worker folders; 1 with data parallelism."""
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
    """Size in bytes and CRC-32 of every other file, by path below the folder."""
    version: int = VERSION

    @property
    def step(self) -> int:
        return self.state.step

    def to_json(self) -> str:
        values = asdict(self)
        return json.dumps({**values, "crc": _crc(values)}, indent=1)

    @staticmethod
    def from_json(text: str) -> "Manifest":
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        if values.get("version") != VERSION:
            raise OtherVersionError(values.get("version"))
        if values.pop("crc", None) != _crc(values):
            raise ValueError("its CRC-32 differs")
        return msgspec.convert(values, Manifest)


class OtherVersionError(ValueError):
    """The checkpoint is whole, but of another version of the schema."""

    def __init__(self, found: object) -> None:
        super().__init__(
            f"was saved in version {found} of the schema, and this program reads version "
            f"{VERSION}: resume it with the version of torchtitan_diloco that saved it, or start "
            "a new run"
        )


def _crc(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def worker_folder(worker: int) -> str:
    return f"worker-{worker}"


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = (path.parent for path in (run / "checkpoints").glob(f"step-*/{MANIFEST}"))
    return sorted((path for path in found if re.fullmatch(r"step-\d+", path.name)), key=step_of)


def begin(path: Path) -> None:
    """Create an empty folder beside `path` to write into.

    Folders that earlier saves have not completed are deleted: they may be what fills the disk.
    """
    for left in path.parent.glob(f"step-*{INCOMPLETE}"):
        shutil.rmtree(left, ignore_errors=True)
    incomplete(path).mkdir(parents=True)


def incomplete(path: Path) -> Path:
    """Return the folder that a checkpoint is written to."""
    return path.with_name(path.name + INCOMPLETE)


def complete(path: Path, manifest: Manifest) -> None:
    """Write the manifest and give the folder its name, which makes the checkpoint visible."""
    written = incomplete(path)
    with (written / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(written)
    replaced = path.with_name(f"{path.name}-replaced{INCOMPLETE}")
    if path.exists():  # saved before by a run that was later resumed from an earlier checkpoint
        path.rename(replaced)
    written.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def prune(run: Path, newest: Path, *, keep_latest: int, keep_every: int) -> None:
    """Delete all checkpoints but the latest and those at steps to keep."""
    for path in complete_checkpoints(run)[:-keep_latest]:
        if path != newest and (not keep_every or step_of(path) % keep_every):
            path.rename(incomplete(path))  # a folder that is half deleted is no checkpoint
            shutil.rmtree(incomplete(path), ignore_errors=True)


def fingerprint(path: Path) -> tuple[int, int]:
    """Return the size and the CRC-32 of a file."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while piece := file.read(2**22):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return size, crc


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in the folder `path`."""
    try:
        return Manifest.from_json((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} has no {MANIFEST}: give the folder of a run or of one of its checkpoints"
        ) from None
    except OtherVersionError as error:
        raise ValueError(f"{path} {error}") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path / MANIFEST} cannot be used ({error}){_offer(path)}") from None


def check_tokenizer(path: Path | str, manifest: Manifest, name: str, fingerprint: str) -> None:
    """Raise if the tokenizer is another one: the same ids would stand for other text."""
    if manifest.tokenizer not in ("", fingerprint):
        raise ValueError(
            f'{path} was trained with another tokenizer than data.tokenizer = "{name}" is now '
            f"(fingerprint {manifest.tokenizer} there, {fingerprint} here): put back the one that "
            "it was trained with, or set data.tokenizer to where that is"
        )


def damage(path: Path, manifest: Manifest, files: list[str]) -> str:
    """Return what is wrong with these files of a checkpoint, or an empty string."""
    for name in files:
        size, crc = manifest.files[name]
        file = path / name
        try:
            found = file.stat().st_size
            if found != size:
                return f"{file} has {found:,} bytes instead of {size:,}{_offer(path)}"
            if fingerprint(file)[1] != crc:
                return f"{file} has other content than was saved (its CRC-32 differs){_offer(path)}"
        except OSError as error:
            return f"{file} cannot be read ({error.strerror}){_offer(path)}"
    return ""


def _offer(path: Path) -> str:
    """Name the checkpoint before a damaged one."""
    own = complete_checkpoints(path.parent.parent)
    earlier = [one for one in own if one.name < path.name]
    if not earlier:
        return ": there is no earlier checkpoint, so start a new run in another run.folder"
    return f": the one before it is {earlier[-1]}; to resume from that, remove the damaged folder"


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
