"""The folder of a checkpoint: its name, its manifest, its beginning and its end."""

import json
import re
import shutil
import zlib
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from torchtitan_diloco.base.hardware import flush_to_disk, write_whole
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.mixture import SavedPosition
from torchtitan_diloco.diloco.state_dict import OuterFacts

Files = dict[str, tuple[int, int]]
VERSION = 12
MANIFEST = "manifest.json"

# --- the manifest ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json: the description of a checkpoint."""

    step: int
    tokens: int
    """Tokens of all workers together."""
    workers: int
    """Workers that have saved this step; 1 with data parallelism."""
    config: str
    """Settings of the run, as TOML."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer."""
    begins_documents: bool = False
    """Whether documents begin with the begin token of the tokenizer."""
    run: str = ""
    """Identity of the run, which goes on with it."""
    schedule_tokens: float = 0.0
    """As in `RunPlan`."""
    position: SavedPosition | None = None
    """Position in the data. None: at their beginning."""
    parts: dict[str, Any] = field(default_factory=dict)
    """States of the parts of a run by their names, as JSON."""
    outer: OuterFacts | None = None
    """None with data parallelism."""
    files: Files = field(default_factory=dict)
    """Size in bytes and CRC-32 of every other file."""
    save: int = 0
    """CRC-32 over those of all workers, which tells saves of the same step apart."""
    version: int = VERSION

    def to_json(self) -> str:
        values = asdict(self)
        return json.dumps({**values, "crc": crc_of(values)}, indent=1)


def crc_of(values: object) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def fingerprint(path: Path) -> tuple[int, int]:
    """Return the size and the CRC-32 of a file."""
    size = 0
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(2**22):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return size, crc


class DamagedError(UserError):
    """A file of the checkpoint is missing or has changed since the save."""


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint `path`, or raise DamagedError."""
    file = path / MANIFEST
    try:
        content = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error
    return parse_manifest(content, str(file))


def parse_manifest(content: bytes, origin: str) -> Manifest:
    """Return the manifest that a file at `origin` has as its content, or raise DamagedError."""
    try:
        values = json.loads(content)
        if not isinstance(values, dict) or values.pop("crc", None) != crc_of(values):
            raise UserError("its CRC-32 differs")
        if values.get("version") == VERSION:
            return msgspec.convert(values, Manifest)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise DamagedError(f"{origin} cannot be used ({error})") from None
    raise UserError(
        f"{origin} is of version {values.get('version')} of the schema, and this program "
        f"reads version {VERSION}: resume it with the version of torchtitan_diloco that saved it"
    )


def _unreadable(file: Path, error: OSError) -> UserError:
    kind = UserError if isinstance(error, PermissionError) else DamagedError
    if isinstance(error, FileNotFoundError):
        return kind(f"{file} is missing")
    return kind(f"{file} cannot be read ({error})")


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise DamagedError if one of the files is damaged."""
    for name in names:
        file = path / name
        saved_size, saved_crc = manifest.files[name]
        try:
            size, crc = fingerprint(file)
        except OSError as error:
            raise _unreadable(file, error) from error
        if size != saved_size:
            raise DamagedError(f"{file} has {size:,} bytes instead of {saved_size:,}")
        if crc != saved_crc:
            raise DamagedError(f"{file} has different content than was saved (its CRC-32 differs)")


# --- names, beginning and end ---------------------------------------------------------------------


def folder_of_worker(run: Path, worker: int) -> Path:
    """Return where a worker has its checkpoints, records and TensorBoard."""
    return run / f"worker-{worker}"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the folder of a step, in the folder of a worker."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a worker, oldest first."""
    complete = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(complete, key=step_of)


def incomplete(path: Path) -> Path:
    """Return the folder that a checkpoint is written into."""
    return path.with_name(f"{path.name}.incomplete")


def begun_checkpoints(folder: Path) -> set[str]:
    """Return the names of the checkpoints of a worker that it has begun and not completed."""
    return {path.stem for path in folder.glob("step-*.incomplete")}


def begin(path: Path, only: Set[Path] | None = None) -> None:
    """Create the folder to write the checkpoint `path` into, which must not exist.

    Delete what earlier saves have not completed: it may be what fills the disk. `only`: the
    checkpoints of which something may be deleted. None: all, as no other run is in the folder.
    """
    if path.exists():
        raise OSError(f"{path} exists already")
    for incomplete_folder in path.parent.glob("step-*.incomplete"):
        if only is None or incomplete_folder in map(incomplete, only):
            shutil.rmtree(incomplete_folder, ignore_errors=True)
    try:
        incomplete(path).mkdir(parents=True)
    except FileExistsError:
        reason = "may be of another run in this folder: delete it if there is none"
        raise OSError(f"{incomplete(path)} {reason}") from None


def complete(path: Path, manifest: str) -> None:
    """Write the last file and rename the folder, which makes the checkpoint visible."""
    write_whole(incomplete(path) / MANIFEST, manifest.encode())
    flush_to_disk(incomplete(path))
    incomplete(path).rename(path)
    flush_to_disk(path.parent)


def discard(path: Path) -> None:
    """Delete a checkpoint, whether it is complete or not, as far as that is possible."""
    with suppress(OSError):  # a folder that is half deleted is no checkpoint
        path.rename(incomplete(path))
    shutil.rmtree(incomplete(path), ignore_errors=True)


def prune(
    folder: Path,
    keep_latest: int,
    keep_every: int,
    held: Set[Path] = frozenset(),
    only: Set[Path] | None = None,
) -> None:
    """Delete a worker's checkpoints but the latest, those at steps to keep, and those in use.
    `only`: as in `begin`."""
    for path in complete_checkpoints(folder)[:-keep_latest]:
        may_delete = path not in held and (only is None or path in only)
        if may_delete and (not keep_every or step_of(path) % keep_every):
            discard(path)
