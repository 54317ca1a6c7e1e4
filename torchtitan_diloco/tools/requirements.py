"""Whether the running Python has what pyproject.toml asks for.

scripts/environment.sh runs this file by its path before anything is installed, so it needs the standard library alone,
and it reads versions from package metadata, because importing torch takes seconds.

    python -P torchtitan_diloco/tools/requirements.py COMMAND VENV EXTRAS

`missing` prints what is not installed, or not at a fitting version. `current` says (by its exit code) whether VENV is
complete. `stamp` notes in VENV that it is. `extras` prints EXTRAS and those that VENV was made with.
"""

import hashlib
import platform
import re
import sys
import tomllib
from collections.abc import Callable, Collection
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
STAMP = "torchtitan_diloco.stamp"
UNFINISHED = "torchtitan_diloco.unfinished"
"""Lies in a virtual environment while pip works in it (scripts/environment.sh)."""

Version = tuple[int, ...]
OPERATORS: dict[str, Callable[[Version, Version], bool]] = {
    ">=": lambda have, want: _padded(have, want) >= _padded(want, have),
    "<=": lambda have, want: _padded(have, want) <= _padded(want, have),
    "==": lambda have, want: _padded(have, want) == _padded(want, have),
    "!=": lambda have, want: _padded(have, want) != _padded(want, have),
    ">": lambda have, want: _padded(have, want) > _padded(want, have),
    "<": lambda have, want: _padded(have, want) < _padded(want, have),
}


def fits(version: str, specifiers: str) -> bool:
    """Whether `2.13.0+cpu` fits `>=2.11,<2.14`.

    Only the numbers count: `2.11.0a0+vendor`, as in vendors' container images, is taken for 2.11.0.
    """
    for specifier in filter(None, (part.strip() for part in specifiers.split(","))):
        match = re.fullmatch(r"(>=|<=|==|!=|>|<)\s*([0-9.]+)", specifier)
        if match is None:
            raise ValueError(
                f"cannot read the version specifier {specifier!r}; use one of {' '.join(OPERATORS)}"
            )
        if not OPERATORS[match[1]](_numbers(version), _numbers(match[2])):
            return False
    return True


def requirements(project: dict[str, Any], extras: Collection[str]) -> dict[str, str]:
    """Package -> version specifiers, of the dependencies and of `extras`, and of the extras that those name."""
    found: dict[str, str] = {}
    waiting = list(project["dependencies"])
    for extra in extras:
        waiting += project["optional-dependencies"][extra]
    while waiting:
        line = waiting.pop()
        match = re.fullmatch(r"([\w.-]+)\s*(?:\[([\w\s,-]+)\])?\s*([^;]*?)\s*(?:;(.*))?", line)
        if match is None:
            raise ValueError(
                f"cannot read the requirement {line!r} of pyproject.toml; use NAME[EXTRAS]SPECIFIERS"
            )
        name, inner_extras, specifiers, condition = match.groups()
        if condition and not holds(condition):
            continue
        if name == project["name"]:
            for extra in inner_extras.split(","):
                waiting += project["optional-dependencies"][extra.strip()]
        else:
            found[name] = specifiers
    return found


def holds(condition: str) -> bool:
    """Whether `platform_system == 'Linux' and platform_machine == 'x86_64'` is said of this machine."""
    known = {"platform_system": platform.system(), "platform_machine": platform.machine()}
    for part in condition.split(" and "):
        match = re.fullmatch(r"\s*(\w+)\s*==\s*'([^']*)'\s*", part)
        if match is None or match[1] not in known:
            raise ValueError(
                f"cannot read the condition {condition.strip()!r}; use {' and '.join(known)} with == 'VALUE'"
            )
        if known[match[1]] != match[2]:
            return False
    return True


def missing(wanted: dict[str, str], installed: Callable[[str], str]) -> list[str]:
    """What is not there, in words; `installed` is a package's version or raises PackageNotFoundError."""
    lacks = []
    for name, specifiers in sorted(wanted.items()):
        try:
            version = installed(name)
        except metadata.PackageNotFoundError:
            lacks.append(f"{name} (not installed)")
            continue
        if not fits(version, specifiers):
            lacks.append(f"{name} ({version}, needs {specifiers})")
    return lacks


def fingerprint(files: Collection[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def is_current(venv: Path, asked: set[str], print_of_files: str) -> bool:
    """Whether the stamp is of these files and covers the extras. A virtual environment without one that no start of
    ours has left unfinished is somebody's own: it is complete when nothing is missing."""
    stamp = _read_stamp(venv)
    if stamp is None:
        return not (venv / UNFINISHED).exists()
    return stamp[0] == print_of_files and asked <= stamp[1]


def main(words: list[str]) -> int:
    command, venv, extras = (
        words[0],
        Path(words[1]),
        {extra for extra in words[2].split(",") if extra},
    )
    if command == "extras":
        stamp = _read_stamp(venv)
        print(",".join(sorted(extras | stamp[1] if stamp else extras)))
        return 0
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lacks = missing(requirements(project, extras), metadata.version)
    if command == "missing":
        print(", ".join(lacks))
        return 1 if lacks else 0
    print_of_files = fingerprint([REPOSITORY / "pyproject.toml", REPOSITORY / "constraints.txt"])
    if command == "current":
        return 0 if is_current(venv, extras, print_of_files) and not lacks else 1
    assert command == "stamp", command
    if lacks:
        print(", ".join(lacks))
        return 1
    (venv / STAMP).write_text(f"{print_of_files}\n{','.join(sorted(extras))}\n")
    return 0


def _read_stamp(venv: Path) -> tuple[str, set[str]] | None:
    try:
        lines = (venv / STAMP).read_text().splitlines()
    except OSError:
        return None
    return (lines[0], set(filter(None, lines[1].split(",")))) if len(lines) == 2 else None


def _numbers(version: str) -> Version:
    match = re.match(r"[0-9]+(\.[0-9]+)*", version)
    if match is None:
        raise ValueError(f"cannot read the version {version!r}")
    return tuple(int(number) for number in match[0].split("."))


def _padded(version: Version, other: Version) -> Version:
    return version + (0,) * (len(other) - len(version))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
