"""Precedence, inheritance, error messages, and TOML that loads to the same config."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.config import (
    Config,
    ConfigError,
    from_command_line,
    load_config,
    parse_config,
    to_toml,
)
from torchtitan_diloco.config.loader import REMOVED
from torchtitan_diloco.config.schema import format_value
from torchtitan_diloco.diloco.config import DiLoCoConfig, Overlap
from torchtitan_diloco.diloco.fields import field_mistakes


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def error_of(name_or_path: str, **settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name_or_path, {key.replace("__", "."): text for key, text in settings.items()})
    return str(caught.value)


def test_command_line_precedes_toml_and_toml_precedes_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", "[training]\nsteps = 7\nbatch_size = 3\n[run]\nname = ''\n")
    config = load_config(path, {"training.batch_size": "5"})
    assert (config.training.steps, config.training.batch_size) == (7, 5)
    assert config.training.sequence_length == Config().training.sequence_length
    assert config.run.name == "a", "an empty name is not set"


def test_extends_inherits_from_a_file_beside_or_a_shipped_config(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "extends = '1b.toml'\n[training]\nsteps = 7\nbatch_size = 3\n")
    write(tmp_path, "middle.toml", "extends = 'base.toml'\n[training]\nbatch_size = 4\n")
    leaf = write(tmp_path, "leaf.toml", "extends = 'middle.toml'\n[model]\nlayers = 2\n")
    config = load_config(leaf)
    assert (config.training.steps, config.training.batch_size) == (7, 4)
    assert (config.model.flavor, config.model.layers) == ("1b", 2)
    assert config.run.name == "leaf"


def test_values_on_the_command_line() -> None:
    settings = {"training.tokens": "25e9", "profiling.ranks": "0,3", "optimizer.lr": "1"}
    modules = {"pattern": "explicit", "modules": '[["blocks.0", "head"], ["blocks.1"]]'}
    settings |= {f"diloco.fragments.{name}": text for name, text in modules.items()}
    config = load_config("debug", settings | {"run.name": "7"})
    assert config.training.tokens == 25_000_000_000
    assert isinstance(config.training.tokens, int)
    assert (config.profiling.ranks, config.optimizer.lr, config.run.name) == ((0, 3), 1.0, "7")
    assert config.diloco.fragments.modules == (("blocks.0", "head"), ("blocks.1",))
    removed = load_config("35m", {"training.global_batch_size": "none"})
    assert removed.training.global_batch_size is None
    # A length of the run replaces the one of the file.
    training = load_config("1b", {"training.steps": "100"}).training
    assert (training.steps, training.tokens_per_parameter) == (100, 0.0)


def test_forms_of_the_command_line() -> None:
    words = "--config=35m --optimizer.lr 1e-3 --run.seed=4 --run.seed 5 --run.name=--x"
    config = from_command_line(words.split())
    assert config is not None
    assert (config.model.flavor, config.optimizer.lr, config.run.seed) == ("35m", 1e-3, 5)
    assert config.run.name == "--x"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("training.steps 3", "look like --section.key VALUE"),
        ("--training.steps", "needs a value"),
        ("--training.steps --run.seed 3", "--training.steps: needs a value"),
        ("--training.steps -3", "must be an integer >= 0"),
    ],
)
def test_malformed_command_lines(words: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        from_command_line(words.split())


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("diloco.workerz", "did you mean diloco.workers?"),
        ("training.lr", "did you mean optimizer.lr?"),
        ("trainign.steps", "did you mean training.steps?"),
        ("model.flavour", "did you mean model.flavor?"),
        ("steps", "did you mean training.steps?"),
        ("diloco.overlap", "is a section: set one of its keys"),
        ("xyzzy.xyzzy", "--help` lists all keys"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(key: str, reason: str) -> None:
    message = error_of("debug", **{key: "3"})
    assert f'command line: {key} = "3": ' in message
    assert reason in message


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("training.batch_size", "0", "must be an integer >= 1"),
        ("training.batch_size", "two", "must be an integer >= 1"),
        ("training.batch_size", "2.5", "must be an integer >= 1"),
        ("training.batch_size", "true", "must be an integer >= 1"),
        ("training.batch_size", "3\nx = 4", "must be an integer >= 1"),
        ("training.steps", "1" * 400, "must fit in 64 bits"),
        ("training.steps", "1e300", "must fit in 64 bits"),
        ("run.seed", str(2**70), "must fit in 64 bits"),
        ("optimizer.lr", "0", "must be a number > 0 and <= 100"),
        ("optimizer.lr", "nan", "must be a number > 0 and <= 100"),
        ("optimizer.lr", "inf", "must be a number > 0 and <= 100"),
        ("optimizer.beta2", "1.0", "must be a number >= 0 and < 1"),
        ("optimizer.weight_decay", "1/step", "must be a number >= 0 or 1/steps"),
        ("run.deterministic", "yes", "must be true or false"),
        ("model.norm", "rms", "must be one of rmsnorm, layernorm (did you mean rmsnorm?)"),
        ("profiling.ranks", "0,x", "must be a list of integers >= 0"),
    ],
)
def test_a_wrong_value_is_refused_with_origin_key_value_and_remedy(
    key: str, text: str, reason: str
) -> None:
    (line,) = error_of("debug", **{key: text}).splitlines()[1:]
    assert line.startswith(f"  command line: {key} = ")
    assert line.endswith((f": {reason}", f": is too large: it {reason}"))


def test_all_mistakes_are_listed_with_their_origin(tmp_path: Path) -> None:
    """Also a value of a file that the command line or another file overrides."""
    parent = write(tmp_path, "parent.toml", "[training]\nsteps = 'x'\n[trainnig]\nsteps = 1\n")
    path = write(
        tmp_path,
        "a.toml",
        "extends = 'parent.toml'\nrun = 3\n[zebra]\n[training]\nsteps = 5\nbatch_size = 0.5\n",
    )
    lines = error_of(path, training__batch_size="2", diloco__workerz="3").splitlines()
    assert lines[0] == "6 mistakes in the configuration:"
    assert sorted(line.partition(": ")[0].strip() for line in lines[1:]) == sorted(
        [parent] * 2 + [path] * 3 + ["command line"]
    )
    assert "did you mean training?" in "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[training\n", "is not valid TOML"),
        ("steps = " + "9" * 5000, "is not valid TOML"),
        ("steps = " + "[" * 3000, "is not valid TOML"),
        ("extends = 'a.toml'\n", "extends itself"),
        ("extends = 3\n", "must be the name of one TOML file"),
        ("extends = 'b.toml'\n", "no such file"),
        ("training = 3\n", "training = 3: is a section"),
        ("training.steps = 1979-05-27\n", '"1979-05-27": must be an integer'),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, reason: str) -> None:
    (line,) = error_of(write(tmp_path, "a.toml", text)).splitlines()[1:]
    assert str(tmp_path / "a.toml") in line
    assert reason in line
    assert '--config = "1bb.toml": no such file; did you mean 1b?' in error_of("1bb.toml")


text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
names = text.filter(lambda name: name and not {"/", "\\"} & set(name))


@given(name=names, text=text, seed=st.integers(0, 2**63 - 1), lr=st.floats(1e-12, 10))
def test_toml_loads_to_the_same_config(
    tmp_path_factory: pytest.TempPathFactory, name: str, text: str, seed: int, lr: float
) -> None:
    config = load_config("debug", {"run.name": name, "data.corpus": text, "run.seed": str(seed)})
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=lr))
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(str(path)) == config
    assert parse_config(to_toml(config), "checkpoint") == config


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_says_so_unless_it_had_no_effect(key: str) -> None:
    harmless, reason = REMOVED[key]
    message = f'command line: {key} = "3": was removed: {reason}; leave it out'
    assert message in error_of("debug", **{key: "3"})
    assert parse_config(f"{key} = {format_value(harmless)}\nrun.seed = 4", "x").run.seed == 4


def test_a_removed_value_says_so() -> None:
    assert "; it was removed" in error_of("debug", **{"diloco.outer_optimizer.name": "adam"})
    assert "removed" not in error_of("debug", **{"diloco.outer_optimizer.name": "none"})


def test_a_saved_config_is_checked() -> None:
    assert parse_config("[training]\nsteps = 3\n", "x").training.steps == 3
    with pytest.raises(ConfigError) as caught:
        parse_config("[model]\nlairs = 2\nlayers = -3\n", "checkpoint")
    assert "checkpoint: model.lairs = 2: unknown key; did you mean" in str(caught.value)
    assert "checkpoint: model.layers = -3: must be an integer >= 1" in str(caught.value)


def test_print_config_and_help_print_and_stop(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert from_command_line(["--config", "1b", "--print-config", "--run.seed", "9"]) is None
    again = load_config(write(tmp_path, "printed.toml", capsys.readouterr().out))
    assert (again.model.flavor, again.run.seed, again.run.name) == ("1b", 9, "1b")
    assert from_command_line(["--help"]) is None
    assert "--run.seed" in capsys.readouterr().out


def test_a_config_made_in_python_is_checked() -> None:
    wrong = DiLoCoConfig(workers=0, method="stream", overlap=Overlap(mixing=2), link=None)  # type: ignore[arg-type]
    assert field_mistakes(wrong, "diloco") == [
        ("diloco.method", "is 'stream': must be one of streaming, none (did you mean streaming?)"),
        ("diloco.workers", "is 0: must be an integer >= 1"),
        ("diloco.overlap.mixing", "is 2: must be a number >= 0 and <= 1"),
        ("diloco.link", "is None: must be a section"),
    ]
    assert field_mistakes(DiLoCoConfig(), "diloco") == []
