"""The wheel can be installed, and its one command runs anywhere."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY


def test_a_wheel_gives_one_command(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    for name in ("torchtitan_diloco", "train_configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile"]
    subprocess.run([*pip, *options, "--target", str(site), str(source)], check=True)

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(site / "bin" / "torchtitan-diloco"), *words]
        environment = {"PYTHONPATH": str(site)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    assert 'flavor = "1b"' in run("train", "--config", "1b", "--print-config").stdout
    assert "islands" in run("--help").stdout
    command = f"{site}/bin/torchtitan-diloco".removeprefix(f"{tmp_path}/")
    assert run("train", "--help").stdout.startswith(f"usage: {command} train [--config")
    wrong = run("trane")
    error = f"error: there is no command trane; did you mean train?; `{command} --help` lists them"
    assert (wrong.returncode, wrong.stderr.splitlines()) == (2, [error])
