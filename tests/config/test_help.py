"""The help of a training has what it says, without torch."""

import re
from pathlib import Path

import pytest

from torchtitan_diloco import cli
from torchtitan_diloco.base.registry import Entry
from torchtitan_diloco.cli import COMMANDS
from torchtitan_diloco.config import Config, load_config
from torchtitan_diloco.config.help import MATTER_MOST, print_help
from torchtitan_diloco.config.loader import ConfigError, shipped_configs
from torchtitan_diloco.config.parts import BOARDS, SCHEDULES, BoardEntry
from torchtitan_diloco.config.schema import flat_settings

WARMUP = "lr_schedule.warmup"
TEXTS = {name: text for name, (_, text) in COMMANDS.items()}


def entries(text: str) -> dict[str, str]:
    """Return the text of each option."""
    found = re.split(r"\n\W{2,4}--(?=\w)", text)[1:]
    return {entry.split()[0]: " ".join(entry.replace("│", " ").split()) for entry in found}


def test_a_short_help_has_the_settings_that_matter_and_the_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert print_help(["--run.seed", "x", "--help"], TEXTS)
    text = capsys.readouterr().out
    shown = entries(text)
    defaults = flat_settings(Config())
    assert list(shown) == ["config", "print-config", "help", *MATTER_MOST]
    assert len(MATTER_MOST) == 20
    for key in MATTER_MOST:
        default = defaults[key] if defaults[key] not in (None, "") else "not set"
        assert re.search(rf"\. \(default: {default}(; demo.toml: [^ ;]+)?\)", shown[key]), key
    assert "Number of workers. (default: 1; demo.toml: 2)" in shown["diloco.workers"]
    assert ", ".join(shipped_configs()) in shown["config"].replace("- ", "-")
    assert re.findall(r"^    (\w+) {2,}\w", text, re.M) == list(COMMANDS)
    assert f"All {len(defaults)} settings: " in text
    assert len(text.splitlines()) < 100


def test_a_command_of_the_help_is_in_one_line_however_long_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for length in (10, 60, 100):
        program = f"/{'x' * length}/python"
        monkeypatch.setattr("sys.executable", program)
        assert print_help(["--help"], TEXTS)
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        command = f"{program} -m torchtitan_diloco"
        assert f"{command} COMMAND --help" in lines
        assert f"All {len(flat_settings(Config()))} settings: {command} train --help all" in lines


@pytest.mark.parametrize("words", ["--help all", "-h all", "--help=all"])
def test_the_long_help_has_every_setting_with_its_text_and_default(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_help(words.split(), TEXTS)
    shown = entries(capsys.readouterr().out)
    assert shown.pop("config").startswith("config NAME_OR_PATH A TOML file, or the name of one in")
    assert shown.keys() - {"help"} == flat_settings(Config()).keys()
    for key in flat_settings(Config()):
        assert ". (default: " in shown[key], f"{key} has no docstring"
    assert "share of the run if below 1. (default: 1000; demo.toml: 0.2)" in shown[WARMUP]
    assert shown["run.seed"].startswith("run.seed INT Seed of the initial weights")


@pytest.mark.parametrize("words", ["--help diloco", "-h diloco.overlap", "--help=diloco"])
def test_the_help_of_a_section_has_its_settings(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_help(["--run.seed", "3", *words.split(), "--config", "1b"], TEXTS)
    shown = entries(capsys.readouterr().out)
    of_section = {key for key in flat_settings(Config()) if key.startswith("diloco.")}
    assert shown.keys() - {"help", "config"} == of_section
    assert shown["diloco.workers"].startswith("diloco.workers INT Number of workers.")
    assert shown["diloco.workers"].endswith(" (default: 1; 1b.toml: 2)")
    assert "; 1b.toml: fp4_e3m0)" in shown["diloco.quantization.codec"]
    assert "toml" not in shown["diloco.link.timeout_seconds"]


def test_the_help_shows_the_values_of_the_config_that_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "35m.toml"\n[data]\nphases = [{start = 0.5, mixture = {a = 1}}]\n')
    assert print_help(["--help", "--config", str(path)], TEXTS)
    shown = entries(capsys.readouterr().out)
    assert "(default: 1000; mine.toml: 0.1)" in shown[WARMUP]
    assert "(default: not set; mine.toml: 32)" in shown["training.global_batch_size"]
    assert print_help(["--help", "data", f"--config={path}"], TEXTS)
    phases = entries(capsys.readouterr().out)["data.phases"]
    assert "; mine.toml: [{start = 0.5, mixture = {a = 1.0}}])" in phases
    with pytest.raises(ConfigError, match=r"--config = .*no such file"):
        print_help(["--help", "--config", "nothere"], TEXTS)


def test_the_help_has_the_names_that_others_have_added(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEDULES, "mine", Entry(build=str))
    monkeypatch.setitem(BOARDS, "mine", BoardEntry(build=str, takes="FILE"))
    assert print_help(["--help", "lr_schedule"], TEXTS)
    shown = entries(capsys.readouterr().out)["lr_schedule.decay"]
    assert "{cosine,linear,wsd,constant,mine} Shape" in shown
    assert print_help(["--help", "metrics"], TEXTS)
    assert "mlflow:EXPERIMENT,mine:FILE}" in entries(capsys.readouterr().out)["metrics.boards"]


def test_the_help_of_no_section_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["__main__.py"])  # else it notes who has started it
    assert cli.run(["train", "--help", "optimzer"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --help optimzer: there is no such section; did you mean opt")
    assert "; give all, or one of run, model, data, " in line


def test_settings_are_no_question() -> None:
    assert not print_help([], TEXTS)
    assert not print_help(["--run.name", "all", "--config", "debug"], TEXTS)
    assert load_config("debug", {"run.name": "help"}).run.name == "help"
