"""Check what a release promises: pinned dependencies, a workflow, a citation, AGENTS.md."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import REPOSITORY
from tests.test_docs import blocks
from torchtitan_diloco import __version__
from torchtitan_diloco.base.hardware import NEWEST_TORCH

GITHUB = REPOSITORY / ".github"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
LOCK = REPOSITORY / "requirements.lock"
SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.citation-file-format": "CITATION.cff",
}
"""Schemas that check-jsonschema brings, and the files that follow each."""


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def asked() -> Iterator[Requirement]:
    """Yield the dependencies of the package and of all extras."""
    groups = PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()
    for requirement in (Requirement(line) for group in groups for line in group):
        if requirement.name != PROJECT["name"]:
            yield requirement


# --- the lock -------------------------------------------------------------------------------------


def test_the_lock_pins_what_the_project_asks_for() -> None:
    """If this fails, run ./scripts/lock.sh, which needs a network."""
    pins: dict[str, list[str]] = {}
    for line in lines(LOCK):
        assert "/" not in line, "no index and no folder of a machine is named"
        pin = Requirement(line)
        (exact,) = pin.specifier
        assert exact.operator == "=="
        pins.setdefault(canonicalize_name(pin.name), []).append(exact.version)
    constraints = (Requirement(line) for line in lines(REPOSITORY / "constraints.txt"))
    for requirement in [*asked(), *constraints]:
        versions = pins.get(canonicalize_name(requirement.name), [])
        assert versions, f"{requirement} is not in {LOCK.name}: run ./scripts/lock.sh"
        for version in versions:
            fits = requirement.specifier.contains(version, prereleases=True)
            assert fits, f"{requirement}, but {LOCK.name} has {version}: run ./scripts/lock.sh"


def test_the_lock_names_the_command_that_the_pages_name() -> None:
    (command,) = re.findall(r"^#    (.*)", LOCK.read_text(), re.M)
    shown = [block.strip() for block in blocks(REPOSITORY / "CONTRIBUTING.md", "shell")]
    assert command in shown


def test_without_uv_the_lock_is_left_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "lock.sh"
    script.parent.mkdir()
    script.symlink_to(REPOSITORY / "scripts/lock.sh")
    (tmp_path / LOCK.name).write_text("kept")
    done = subprocess.run(
        [script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    error = "error: uv is not installed: .venv/bin/python -m pip install uv\n"
    assert (done.returncode, done.stderr) == (2, error)
    assert (tmp_path / LOCK.name).read_text() == "kept"


# --- the workflow and the templates ---------------------------------------------------------------


def read_workflow() -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load((GITHUB / "workflows/tests.yml").read_text())
    return workflow


def test_the_workflow_covers_all_supported_versions() -> None:
    matrix = read_workflow()["jobs"]["versions"]["strategy"]["matrix"]
    python = "Programming Language :: Python :: 3."
    supported = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if python in one]
    assert matrix["python"] == supported
    assert PROJECT["requires-python"] == f">={supported[0]}"
    (torch,) = (one for one in asked() if one.name == "torch")
    (oldest,) = torch.specifier
    first, last = (int(one.split(".")[1]) for one in (oldest.version, NEWEST_TORCH))
    minors = [f"==2.{minor}.*" for minor in range(first, last + 1)]
    assert matrix["torch"] == [*minors, f">={oldest.version}"], "and whatever is newest"


def test_the_workflow_runs_the_commands_of_the_pages() -> None:
    jobs = read_workflow()["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    pages = "".join((REPOSITORY / name).read_text() for name in ("README.md", "AGENTS.md"))
    own = [command for command in commands if command.startswith((".", "/"))]
    assert {command.split()[0] for command in own} == {
        "./run_train.sh",
        "./run_tests.sh",
        ".ci/run",
    }
    for command in own:
        assert command in pages, command
    (install,) = (command for command in commands if command not in own)
    (extras,) = re.findall(r"-e '\.\[([\w,]+)\]'", install)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize(("schema", "files"), SCHEMAS.items())
def test_files_for_the_host_follow_their_schemas(schema: str, files: str) -> None:
    found = sorted(REPOSITORY.glob(files))
    assert found
    for path in found:
        assert yaml.safe_load(path.read_text())
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    command += map(str, found)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_citation_and_changelog_have_the_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["license"])
    headings = re.findall(r"^## (.*)", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert __version__ in headings


# --- the page for newcomers -----------------------------------------------------------------------


def test_agents_page_has_the_commands_of_ci() -> None:
    (block,) = blocks(REPOSITORY / "AGENTS.md", "shell")
    commands = [line.partition(" #")[0].split() for line in block.splitlines()]
    for program, *_ in commands:
        path = REPOSITORY / program
        assert path.is_file(), program
        assert path.stat().st_mode & 0o111, f"{program} can be run"
    tests = [word for _, *words in commands for word in words if word.startswith("tests/")]
    assert tests
    assert all((REPOSITORY / name).exists() for name in tests)


def test_ci_runs_the_tests_as_the_readme_says_before_it_installs_anything() -> None:
    """Otherwise a test could need what only CI has."""
    script = (REPOSITORY / ".ci/run").read_text()
    tests = script.index('\ncheck "tests" run_tests\n')
    assert re.search(r"^    \./run_tests\.sh 2>&1 ", script, re.M)
    assert script.index('\ncheck "lint, format and types" ./scripts/check.sh\n') > tests
    for word in ("environment.sh", "prepare_", "pip install", "PYTHON="):
        assert word not in script, word
    checks = (REPOSITORY / "scripts/check.sh").read_text()
    for command in ("ruff check", "ruff format --check", "mypy"):
        assert f"\ncheck {command}\n" in checks


def test_agents_page_names_every_folder_of_the_package() -> None:
    page = (REPOSITORY / "AGENTS.md").read_text()
    for path in (REPOSITORY / "torchtitan_diloco").iterdir():
        internal = path.name.startswith(("_", "train_configs"))
        if path.is_dir() and not internal:
            assert f"`torchtitan_diloco/{path.name}/`" in page, path
