"""Hints name the program that the user started: run_train.sh or torchtitan-diloco."""

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from torchtitan_diloco import cli
from torchtitan_diloco.base.user import STARTED_BY, command_line, installed
from torchtitan_diloco.cli import COMMANDS

PYTHON = f"{sys.executable} -m"


@pytest.fixture(autouse=True)
def in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(STARTED_BY, "")


def test_how_to_start_a_command() -> None:
    assert command_line("train") == f"{PYTHON} torchtitan_diloco train"
    assert command_line("report") == f"{PYTHON} torchtitan_diloco report"


def test_after_run_train_sh_the_installed_command_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "re po"
    scripts = tmp_path / "re po/.venv/bin"
    scripts.mkdir(parents=True)
    monkeypatch.setenv(STARTED_BY, f"{root}/run_train.sh")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(scripts))
    without = f"PYTHONPATH={REPOSITORY} {PYTHON} torchtitan_diloco report"
    assert command_line("report") == without, "PYTHON is one that lacks the package"
    Path(installed("torchtitan-diloco")).touch()
    assert command_line("report") == without, "of another version, or copied by hand"
    origin = scripts / "torchtitan_diloco-0.2.0.dist-info/direct_url.json"
    origin.parent.mkdir()
    origin.write_text(json.dumps({"url": "file:///another/checkout"}))
    assert command_line("report") == without, "of another checkout"
    origin.write_text(json.dumps({"url": REPOSITORY.as_uri()}))
    assert command_line("report") == "'re po/.venv/bin/torchtitan-diloco' report"
    monkeypatch.chdir(root)
    assert command_line("train") == "./run_train.sh"
    assert command_line("report") == ".venv/bin/torchtitan-diloco report"
    monkeypatch.chdir(scripts)
    assert command_line("train") == f"'{root}/run_train.sh'"


@pytest.mark.parametrize(
    ("name", "hint"), [("trian", "; did you mean train?"), ("xyzzy", ""), ("", "")]
)
def test_a_command_that_does_not_exist(
    name: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    assert cli.run([name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    usage = f"`{PYTHON} torchtitan_diloco --help` lists them"
    assert line == f"error: there is no command {name}{hint}; {usage}"


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"train"}))
def test_a_wrong_option_is_answered_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    try:
        code: object = cli.run([name, "--failures", "--islands", "x"])
    except SystemExit as ended:  # of a parser of options
        code = ended.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith("error: ")
