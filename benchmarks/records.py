"""Keep what benchmarks have measured, with what one needs to measure it again.

A record is one line of JSON in a file of `benchmarks/records/`: the measurement itself, and a
`Provenance` that says when, where, with which versions and by which command it was made.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path

import torch

from benchmarks.core import Record
from torchtitan_diloco.base.hardware import describe_device
from torchtitan_diloco.base.user import REPOSITORY
from torchtitan_diloco.components.records import read_json_lines

RECORDS = REPOSITORY / "benchmarks" / "records"
TEXT_SETTINGS = "data.corpus", "data.validation_corpus"
"""Settings whose values are paths of one machine. A record names its text."""
FILE_OPTIONS = "--out", "--work", "--records"
"""Options whose values are folders of one machine, which no record needs."""


@dataclass(frozen=True)
class Provenance:
    date: str
    """UTC, to the minute."""
    commit: str
    """That of the checkout, with "+" if files were changed since; "unknown" without git."""
    command: str
    device: str
    versions: str


def provenance(module: str, words: Sequence[str], device: torch.device) -> Provenance:
    """Return where and how a measurement is made by a module with these words."""
    return Provenance(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        commit=read_commit(),
        command=f".venv/bin/python -m {module} {shlex.join(without_folders(words))}".strip(),
        device=describe_device(device),
        versions=describe_versions(),
    )


def without_folders(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without the options of `FILE_OPTIONS`.

    Of the absolute paths in other words, only the names are kept.
    """
    shortened = list[str]()
    words_left = iter(words)
    for word in words_left:
        name, equals, _ = word.partition("=")
        if name not in FILE_OPTIONS:
            shortened.append(Path(word).name if word.startswith("/") else word)
        elif not equals:
            next(words_left, None)  # its value
    return shortened


def read_commit() -> str:
    """Return the commit of this checkout. The variable COMMIT says it for a copy without git."""

    def ask(*words: str) -> str:
        git = ["git", "-C", str(REPOSITORY), *words]
        return subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL).strip()

    try:
        commit = ask("rev-parse", "--short=12", "HEAD")
        is_changed = bool(ask("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")
    return commit + "+" * is_changed


def describe_versions() -> str:
    parts = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if util.find_spec("triton"):
        parts.append(f"triton {metadata.version('triton')}")
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        parts.append(f"driver {subprocess.check_output(query, text=True).split()[0]}")
    return ", ".join(parts)


def stamped(records: Iterable[Record], made_by: Provenance) -> list[Record]:
    """Return the records with where and how they were made, as far as they do not say it: a run
    that an earlier call has finished does."""
    return [asdict(made_by) | record for record in records]


def write(path: Path, records: Iterable[Record]) -> None:
    """Write records, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")


def read(kind: str, folders: Iterable[Path] = (RECORDS,)) -> list[Record]:
    """Return the records of a kind: those of the files KIND-*.jsonl of these folders, by name."""
    paths = [path for folder in folders for path in sorted(folder.glob(f"{kind}-*.jsonl"))]
    records = list[Record]()
    for path in paths:
        lines, _ = read_json_lines(path)
        if not lines:
            print(f"{path} has no records: it is ignored", file=sys.stderr)
        records += lines
    return records


def file_name(kind: str, made_by: Provenance) -> str:
    """Return the name of a file of records: their kind, day and device."""
    device = re.sub(r"[^a-z0-9]+", "-", made_by.device.partition(",")[0].lower()).strip("-")
    return f"{kind}-{made_by.date[:10]}-{device}.jsonl"
