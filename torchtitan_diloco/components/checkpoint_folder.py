"""Checkpoints on disk: one folder each, which appears under its name only when it is complete.

RUN/checkpoints/step-00001000/manifest.json     facts, and size and CRC-32 of every other file
                              shared/           outer parameters, outer optimizer, what came back for fragments in flight
                              worker-0/ ...     each worker's own model, inner optimizer, residuals, random states
"""

import json
import os
import shutil
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

VERSION = 1
MANIFEST = "manifest.json"
INCOMPLETE = ".incomplete"
SHARED = "shared"
_PIECE = 2**22


@dataclass(frozen=True)
class Manifest:
    step: int
    tokens: int
    """Of all workers together, trained so far."""
    position: int
    """In the global order of samples: the next step's first."""
    workers: int
    """Folders of workers; 1 where they have nothing of their own (data parallelism)."""
    ranks_per_worker: int
    data: dict[str, Any]
    """What the position refers to."""
    run: dict[str, Any]
    """Totals and such, to go on with."""
    settings: dict[str, str]
    """The configuration that was saved with, flat."""
    tokenizer: str = ""
    """Its fingerprint; empty in a checkpoint that does not say."""
    outer: list[dict[str, Any]] = field(default_factory=list)
    """Each worker's facts of the outer loop; empty without one."""
    files: dict[str, list[int]] = field(default_factory=dict)
    """Path below the folder -> size in bytes and CRC-32."""
    version: int = VERSION

    def to_json(self) -> str:
        values = asdict(self)
        return json.dumps(values | {"crc": _crc_of(values)}, indent=1)

    @staticmethod
    def from_json(text: str) -> "Manifest":
        """Raises ValueError on anything else than what to_json() made."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("it is no table")
        if values.get("version") != VERSION:
            raise ValueError(
                f"it is of version {values.get('version')}, and this program reads {VERSION}"
            )
        crc = values.pop("crc", None)
        if crc != _crc_of(values):
            raise ValueError("its CRC-32 differs")
        unknown = values.keys() - {one.name for one in fields(Manifest)}
        if unknown:
            raise ValueError(
                f"a newer program saved it: this one does not know {', '.join(sorted(unknown))}"
            )
        return Manifest(**values)


def _crc_of(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def worker_folder(worker: int) -> str:
    return f"worker-{worker}"


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def complete_checkpoints(run: Path) -> list[Path]:
    """Oldest first."""
    return sorted(
        path.parent
        for path in (run / "checkpoints").glob(f"step-*/{MANIFEST}")
        if not is_incomplete(path.parent)
    )


def is_incomplete(path: Path) -> bool:
    return path.name.endswith(INCOMPLETE)


def begin(path: Path) -> Path:
    """An empty folder to write into, beside the place of the finished one. What earlier saves left unfinished goes: it may be
    what fills the disk."""
    for left in path.parent.glob(f"step-*{INCOMPLETE}"):
        shutil.rmtree(left, ignore_errors=True)
    aside = path.with_name(path.name + INCOMPLETE)
    aside.mkdir(parents=True)
    return aside


def complete(aside: Path, path: Path, manifest: Manifest) -> None:
    """The folder gets its name as the last thing: who is killed before leaves nothing that could be taken for a checkpoint."""
    with (aside / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(aside)
    before = path.with_name(f"{path.name}-before{INCOMPLETE}")
    if path.exists():  # the same step, saved again by a run that was taken back to an earlier one
        path.rename(before)
    aside.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(before, ignore_errors=True)


def prune(run: Path, newest: Path, *, keep_latest: int, keep_every: int) -> None:
    """Deletes what is neither among the latest nor at a step that is kept. A folder loses its name first: one that is half
    deleted is no checkpoint."""
    for path in complete_checkpoints(run)[:-keep_latest]:
        if path != newest and (not keep_every or step_of(path) % keep_every):
            doomed = path.with_name(path.name + INCOMPLETE)
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def fingerprint(path: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return [size, crc]


def read_manifest(path: Path) -> Manifest:
    """Raises where `path` is no checkpoint."""
    try:
        return Manifest.from_json((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is no checkpoint: it has no {MANIFEST}{_offer(path)}") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path / MANIFEST} cannot be used ({error}){_offer(path)}") from None


def check_tokenizer(path: Path | str, manifest: Manifest, name: str, fingerprint: str) -> None:
    """A vocabulary of the same size loads as well, and the same ids would mean other text."""
    if manifest.tokenizer not in ("", fingerprint):
        raise ValueError(
            f'{path} was trained with another tokenizer than data.tokenizer = "{name}" is now (fingerprint '
            f"{manifest.tokenizer} there, {fingerprint} here): put back the one that it was trained with, or set "
            "data.tokenizer to where that is"
        )


def damage(path: Path, manifest: Manifest, files: list[str]) -> str:
    """What is wrong with these files of a checkpoint, in words; empty if nothing is."""
    for name in files:
        size, crc = manifest.files[name]
        try:
            found_size = (path / name).stat().st_size
            if found_size != size:
                return f"{path / name} has {found_size:,} bytes instead of {size:,}{_offer(path)}"
            if fingerprint(path / name)[1] != crc:
                return f"{path / name} has other content than was saved (its CRC-32 differs){_offer(path)}"
        except OSError as error:
            return f"{path / name} cannot be read ({error.strerror}){_offer(path)}"
    return ""


def _offer(path: Path) -> str:
    """The checkpoint before a damaged one."""
    earlier = [
        other for other in complete_checkpoints(path.parent.parent) if other.name < path.name
    ]
    if not earlier:
        return ": no earlier checkpoint of this run is there"
    return f": the one before it is {earlier[-1]}; to go on from that, remove the damaged folder"


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
