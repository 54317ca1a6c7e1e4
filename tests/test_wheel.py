"""A source archive and a wheel are complete: what they install trains, in an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import REPOSITORY
from torchtitan_diloco import __version__

ROOT_FILES = ("CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md")
PACKAGE = REPOSITORY / "torchtitan_diloco"
SETTINGS = (
    "--training.steps 6 --lr_schedule.warmup 1 --model.layers 2 --training.batch_size 2 "
    "--training.sequence_length 64 --validation.sequences 8 --diloco.sync_every 4 --run.folder run"
)


class Installed(NamedTuple):
    """A wheel in an environment of its own."""

    wheel: Path
    environment: Path

    def run(self, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run the console script in a folder, with no other variables than these."""
        home = {"HOME": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [self.environment / "bin" / "torchtitan-diloco", *words],
            cwd=folder,
            env=home | {"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )


def build(folder: Path, kind: str, out: Path) -> Path:
    """Build as a front end of PEP 517 does, without the isolation, which needs an index."""
    program = f"import sys; from setuptools import build_meta as b; b.build_{kind}(sys.argv[1])"
    command = [sys.executable, "-c", program, str(out)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Install the wheel that is built from the source archive, which is built from the sources.

    The environment has the packages of this Python, such as torch, but not the package itself.
    """
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    unpacked = folder / "unpacked"
    for name in ("torchtitan_diloco", "train_configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "constraints.txt", *ROOT_FILES):
        shutil.copy(REPOSITORY / name, source)
    archive = build(source, "sdist", folder / "sdist")
    with tarfile.open(archive) as packed:
        packed.extractall(unpacked, filter="data")
    (root,) = unpacked.iterdir()
    assert {*ROOT_FILES} <= {path.name for path in root.iterdir()}
    wheel = build(root, "wheel", folder / "wheel")

    environment = folder / "environment"
    venv.EnvBuilder(symlinks=True).create(environment)
    (packages,) = environment.glob("lib/*/site-packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    pip += ["--python", str(environment / "bin" / "python"), "install", "--quiet", "--no-index"]
    # From another folder and with force: pip takes an egg-info of the checkout for the package.
    pip += ["--no-deps", "--no-compile", "--force-reinstall", str(wheel)]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(pip, cwd=folder, env=variables, check=True)
    # A folder that is named in a .pth file is searched for packages, but not for more .pth files,
    # such as that of an editable install of the checkout.
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    return Installed(wheel, environment)


def files_of(names: Sequence[str]) -> set[str]:
    ignored = ("__pycache__", ".dist-info")
    return {name for name in names if not any(part in name for part in ignored)}


def test_the_wheel_has_every_file_of_the_package(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        there = files_of(wheel.namelist())
        (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        assert f"\nVersion: {__version__}\n" in wheel.read(metadata).decode()
    sources = [*PACKAGE.rglob("*"), *(PACKAGE / "train_configs").glob("*.toml")]
    here = [str(path.relative_to(REPOSITORY)) for path in sources if path.is_file()]
    assert there == files_of(here)
    assert "torchtitan_diloco/report/page.html.jinja" in there


def test_the_wheel_trains_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    trained = installed.run(tmp_path, "train", *SETTINGS.split())
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert f"torchtitan_diloco {__version__}, torch" in trained.stdout
    lines = (tmp_path / "run/worker-1/metrics.jsonl").read_text().splitlines()
    assert [one["step"] for one in map(json.loads, lines) if "loss/train" in one][-1] == 6
    assert "sent by each worker" in trained.stdout
    reported = installed.run(tmp_path, "report", "run")
    assert reported.returncode == 0, reported.stderr
    assert "<html" in (tmp_path / "run/report.html").read_text()
    program = "import torchtitan_diloco; print(torchtitan_diloco.__file__)"
    python = installed.environment / "bin" / "python"
    found = subprocess.check_output([python, "-c", program], cwd=tmp_path, env={}, text=True)
    assert Path(found.strip()).is_relative_to(installed.environment)


def test_the_wheel_gives_one_command(installed: Installed, tmp_path: Path) -> None:
    assert (
        'flavor = "1b"'
        in installed.run(tmp_path, "train", "--config", "1b", "--print-config").stdout
    )
    assert "islands" in installed.run(tmp_path, "--help").stdout
    assert installed.run(tmp_path, "--version").stdout == f"torchtitan_diloco {__version__}\n"
    command = str(installed.environment / "bin" / "torchtitan-diloco")
    assert installed.run(tmp_path, "train", "--help").stdout.startswith(
        f"usage: {command} train [--config"
    )
    wrong = installed.run(tmp_path, "trane")
    error = f"error: there is no command trane; did you mean train?; `{command} --help` lists them"
    assert (wrong.returncode, wrong.stderr.splitlines()) == (2, [error])
