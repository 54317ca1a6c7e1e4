"""Print what the running Python lacks of pyproject.toml: `python scripts/requirements.py EXTRAS`.

With `--list EXTRA`, print what the extra asks for, one requirement a line. scripts/environment.sh
calls both. It reads package metadata, as importing torch takes seconds.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("Python 3.11 or newer")

import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    from packaging.requirements import Requirement
    from packaging.version import Version
except ImportError:
    try:
        from pip._vendor.packaging.requirements import Requirement
        from pip._vendor.packaging.version import Version
    except ImportError:
        sys.exit("packaging (not installed)")

REPOSITORY = Path(__file__).resolve().parents[1]
VENV = REPOSITORY / ".venv"


def read_project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return project


def main(extras: list[str]) -> None:
    """Exit with a text that names what is missing, or with 0."""
    project = read_project()
    lines = list(project["dependencies"])
    lacks = []
    if Path(sys.prefix).resolve() == VENV:  # the constraints hold for .venv only
        lines += (REPOSITORY / "constraints.txt").read_text().splitlines()
        lacks += ["the end of an interrupted set-up"] if (VENV / "unfinished").exists() else []
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    for line in lines:
        if not line or line.startswith("#"):
            continue
        wanted = Requirement(line)
        if wanted.name == project["name"]:  # an extra that names other extras
            for extra in wanted.extras:
                lines += project["optional-dependencies"][extra]
        elif wanted.marker is None or wanted.marker.evaluate():
            try:
                version = Version(metadata.version(wanted.name))
            except metadata.PackageNotFoundError:
                lacks.append(f"{wanted.name} (not installed)")
                continue
            # Vendors' 2.11.0a0+x is taken for 2.11.0.
            if not wanted.specifier.contains(version.base_version):
                lacks.append(f"{wanted.name}{wanted.specifier} (has {version})")
    sys.exit(", ".join(lacks) or 0)


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print(*read_project()["optional-dependencies"][sys.argv[2]], sep="\n")
    else:
        main(list(filter(None, sys.argv[1].split(","))))
