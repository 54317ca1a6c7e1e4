"""Print what the running Python lacks of pyproject.toml: `python scripts/requirements.py EXTRAS`.

With `--list EXTRA`, print what the extra asks for, one requirement a line. With `--mend`, look at
.venv after pip was interrupted in it. scripts/environment.sh calls all of them. This file reads
package metadata, as importing torch takes seconds.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("Python 3.11 or newer")

import csv
import shutil
import sysconfig
import tomllib
from collections.abc import Iterator
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
IS_VENV = Path(sys.prefix).resolve() == VENV


def read_project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return project


def requirements(extras: list[str]) -> Iterator["Requirement"]:
    """Yield what pyproject.toml asks for on this machine, with some of its extras."""
    project = read_project()
    lines = list(project["dependencies"])
    if IS_VENV:  # the constraints hold for .venv only
        lines += (REPOSITORY / "constraints.txt").read_text().splitlines()
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
            yield wanted


def lacking(extras: list[str]) -> list[str]:
    """Return the packages that are missing or have another version, and which one."""
    lacks = []
    for wanted in requirements(extras):
        try:
            version = Version(metadata.version(wanted.name))
        except metadata.PackageNotFoundError:
            lacks.append(f"{wanted.name} (not installed)")
            continue
        # Vendors' 2.11.0a0+x is taken for 2.11.0.
        if not wanted.specifier.contains(version.base_version):
            lacks.append(f"{wanted.name}{wanted.specifier} (has {version})")
    return lacks


def main(extras: list[str]) -> None:
    """Exit with a text that names what is missing, or with 0."""
    lacks = lacking(extras)
    if IS_VENV and (VENV / "unfinished").exists():
        lacks.append("the end of an interrupted set-up")
    sys.exit(", ".join(lacks) or 0)


def mend() -> None:
    """Forget the packages that pip was interrupted in, as they look installed and pip would not
    install them again. Exit with a text that names what training then lacks, or with 0."""
    if not IS_VENV:
        sys.exit(f"{sys.prefix} is not {VENV}")
    for info in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
        if not is_whole(metadata.Distribution.at(info)):
            shutil.rmtree(info)
    sys.exit(", ".join(lacking([]) or missing_dependencies()) or 0)


def is_whole(package: metadata.Distribution) -> bool:
    """Return whether pip has written all files of a package, and removed none."""
    installer = package.read_text("INSTALLER")  # written after the files
    if installer is None or installer.strip() != "pip":
        return installer is not None
    files = [row[0] for row in csv.reader((package.read_text("RECORD") or "").splitlines())]
    return all(
        Path(str(package.locate_file(file))).exists() for file in files if not file.endswith(".pyc")
    )


def missing_dependencies() -> list[str]:
    """Return what the packages that training needs ask for in turn, and which is not installed:
    pip may have been interrupted between removing and replacing it."""
    missing = []
    names = [wanted.name for wanted in requirements([])]
    for name in names:
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            missing.append(f"{name} (not installed)")
            continue
        for needed in map(Requirement, lines):
            applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if applies and needed.name not in names:
                names.append(needed.name)
    return missing


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print(*read_project()["optional-dependencies"][sys.argv[2]], sep="\n")
    elif sys.argv[1] == "--mend":
        mend()
    else:
        main(list(filter(None, sys.argv[1].split(","))))
