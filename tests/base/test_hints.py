"""Hints name the program that the user started: run_train.sh or torchtitan-diloco."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from torchtitan_diloco import cli
from torchtitan_diloco.base.user import (
    STARTED_BY,
    Parser,
    command_line,
    installed,
    paths_of_option,
    training_command,
)
from torchtitan_diloco.cli import COMMANDS
from torchtitan_diloco.planner.plan import parse_bandwidth

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
    root, scripts = tmp_path / "re po", tmp_path / "re po/.venv/bin"
    scripts.mkdir(parents=True)
    monkeypatch.setenv(STARTED_BY, f"{root}/run_train.sh")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(scripts))
    without = f"PYTHONPATH={REPOSITORY} {PYTHON} torchtitan_diloco report"
    assert command_line("report") == without, "PYTHON is one that lacks the package"
    Path(installed("torchtitan-diloco")).touch()
    assert command_line("report") == "'re po/.venv/bin/torchtitan-diloco' report"
    monkeypatch.chdir(root)
    assert command_line("train") == "./run_train.sh"
    assert command_line("report") == ".venv/bin/torchtitan-diloco report"
    monkeypatch.chdir(scripts)
    assert command_line("train") == f"'{root}/run_train.sh'"


def test_a_training_is_started_by_the_program_of_the_user_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may add a model that `train` does not know."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(tmp_path / "means.py"))
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert training_command() == command_line("train"), "one process"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    torchrun = f"{PYTHON} torch.distributed.run"
    assert training_command() == f"{torchrun} --standalone --nproc-per-node 3 ./means.py"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setattr(main, "__spec__", ModuleSpec("my.means", None))
    assert training_command() == f"{torchrun} ... -m my.means"
    monkeypatch.setattr(main, "__file__", str(REPOSITORY / "torchtitan_diloco/train.py"))
    assert training_command() == command_line("train")


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--count x", '--count: "x": give a whole number'),
        ("--count 1.5", '--count: "1.5": give a whole number'),
        ("--share x", '--share: "x": give a number'),
        ("--out ~nobody-here/x", '--out: "~nobody-here/x" is in the home folder of a user whom '),
        ("--text a,~nobody-here/x", '--text: "a,~nobody-here/x" is in the home folder of a user'),
        ("--rate -1Gbit", '--rate: "-1Gbit" is not a bandwidth: give 2Gbit, '),
        ("--rate -.5Gbit", '--rate: "-.5Gbit" is not a bandwidth: give 2Gbit, '),
    ],
)
def test_a_wrong_value_of_an_option_is_named_with_a_remedy(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = Parser(prog="program")
    parser.add_argument("--count", type=int)
    parser.add_argument("--share", type=float)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text", type=paths_of_option)
    parser.add_argument("--rate", type=parse_bandwidth)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"error: argument {message}")
    options, settings = parser.parse_known_args(["--count", "-3", "--training.steps", "-3"])
    assert (options.count, settings) == (-3, ["--training.steps=-3"])
