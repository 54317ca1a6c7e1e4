"""Precedence, inheritance, and what a user is told about a mistake."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.config import Config, ConfigError, from_command_line, load_config, to_toml


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def mistakes(name_or_path: str, **settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(
            name_or_path, {key.replace("__", "."): value for key, value in settings.items()}
        )
    return str(caught.value)


def test_command_line_goes_before_toml_and_toml_before_default(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", "[training]\nsteps = 7\nbatch_size = 3\n")
    config = load_config(path, {"training.batch_size": "5"})
    assert (config.training.steps, config.training.batch_size) == (7, 5)
    assert config.training.sequence_length == Config().training.sequence_length
    assert config.run.name == "a"


def test_extends_inherits_what_is_not_said(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "[training]\nsteps = 7\nbatch_size = 3\n[model]\nflavor = '35m'\n")
    write(tmp_path, "middle.toml", "extends = 'base.toml'\n[training]\nbatch_size = 4\n")
    config = load_config(
        write(tmp_path, "leaf.toml", "extends = 'middle.toml'\n[model]\nlayers = 2\n")
    )
    assert (config.training.steps, config.training.batch_size) == (7, 4)
    assert (config.model.flavor, config.model.layers) == ("35m", 2)
    assert config.run.name == "leaf"


def test_extends_finds_a_shipped_config_by_name(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, "mine.toml", "extends = '1b'\n[training]\nbatch_size = 2\n")
    )
    assert (config.model.flavor, config.training.batch_size) == ("1b", 2)


def test_a_circle_of_extends_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", "extends = 'b.toml'\n")
    write(tmp_path, "b.toml", "extends = 'a.toml'\n")
    assert "extends itself" in mistakes(str(tmp_path / "a.toml"))


@pytest.mark.parametrize("name", ["1b", "1b.toml"])
def test_a_bare_name_is_found_in_train_configs(name: str) -> None:
    assert load_config(name).model.flavor == "1b"


def test_an_unknown_config_names_the_nearest() -> None:
    message = mistakes("1bb.toml")
    assert "1bb.toml" in message
    assert "did you mean 1b?" in message


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("diloco.workerz", "diloco.workers"),
        ("training.lr", "optimizer.lr"),
        ("trainign.steps", "training.steps"),
        ("model.flavour", "model.flavor"),
        ("steps", "training.steps"),
    ],
)
def test_an_unknown_key_names_the_one_that_was_meant(key: str, named: str) -> None:
    message = mistakes("debug", **{key: "3"})
    assert f"{key} = " in message
    assert named in message


def test_an_unknown_key_without_a_neighbour_lists_the_section() -> None:
    assert "[compile] has enable" in mistakes("debug", compile__xyzzy="1")


def test_unknown_toml_keys_and_sections_name_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.toml", "[trainnig]\nsteps = 1\n[training]\nsteps = 3\nstps = 1\n[zebra]\n"
    )
    message = mistakes(path)
    assert message.count(path) == 3
    assert "did you mean training.steps" in message
    assert "[zebra]" in message


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("training.batch_size", "0", "must be >= 1"),
        ("training.batch_size", "two", "must be an integer"),
        ("training.batch_size", "2.5", "must be an integer"),
        ("training.batch_size", "true", "must be an integer"),
        ("optimizer.lr", "0", "must be > 0"),
        ("optimizer.lr", "nan", "must be a number"),
        ("optimizer.beta2", "1.0", "must be >= 0 and < 1"),
        ("optimizer.weight_decay", "1/step", "1/steps"),
        ("run.deterministic", "yes", "true or false"),
        ("model.norm", "rms", 'did you mean "rmsnorm"'),
        ("profiling.ranks", "0,x", "must be an integer"),
        ("diloco", "3", "is a section; set one of its keys: "),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_remedy(
    key: str, value: str, reason: str
) -> None:
    message = mistakes("debug", **{key: value})
    assert reason in message
    assert message.splitlines()[1].startswith(f"  command line: {key} = ")


def test_several_mistakes_are_reported_together(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.toml", "[training]\nstps = 1\nbatch_size = -1\n[model]\nlayers = 'six'\n"
    )
    message = mistakes(path, diloco__workerz="3")
    assert message.startswith("4 mistakes")
    for key in ("training.stps", "training.batch_size", "model.layers", "diloco.workerz"):
        assert key in message


def test_a_value_where_a_section_stands_and_broken_toml(tmp_path: Path) -> None:
    assert "write it as [training]" in mistakes(write(tmp_path, "a.toml", "training = 3\n"))
    assert "not valid TOML" in mistakes(write(tmp_path, "b.toml", "[training\n"))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"training.steps": "0"}, "training.steps"),
        ({"run.name": "../elsewhere"}, "run.name"),
        ({"diloco.overlap.delay": "10"}, "diloco.overlap.delay"),
        ({"diloco.fragments.pattern": "explicit"}, "diloco.fragments.modules"),
        ({"diloco.outer_optimizer.decay": "cosine"}, "diloco.outer_optimizer.decay_rounds"),
        ({"training.steps": "5", "training.tokens": "1000"}, "training.tokens"),
        ({"training.global_batch_size": "17"}, "training.global_batch_size"),
        ({"data.shard_by": "clusters", "diloco.workers": "1"}, "data.shard_by"),
        ({"data.shard_by": "random", "diloco.method": "none"}, "data.shard_by"),
        ({"optimizer.beta1": "0.99", "optimizer.beta2": "0.9"}, "optimizer.beta1"),
        ({"run.device": "cpu", "parallel.compute_dtype": "bfloat16"}, "parallel.compute_dtype"),
        ({"profiling.every": "2", "profiling.steps": "3"}, "profiling.every"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config("debug", settings)


def test_a_length_given_on_the_command_line_takes_back_the_presets_own() -> None:
    training = load_config("1b", {"training.steps": "100"}).training
    assert (training.steps, training.tokens_per_parameter) == (100, 0.0)


def test_numbers_as_humans_write_them() -> None:
    config = load_config(
        "debug", {"training.tokens": "25e9", "profiling.ranks": "0,3", "optimizer.lr": "1"}
    )
    assert config.training.tokens == 25_000_000_000
    assert config.profiling.ranks == (0, 3)
    assert config.optimizer.lr == 1.0
    assert (
        load_config("35m", {"training.global_batch_size": "none"}).training.global_batch_size
        is None
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["training.steps", "3"], "look like --section.key value"),
        (["--training.steps"], "needs a value"),
        (["--training.steps", "--run.seed", "3"], "--training.steps: needs a value"),
    ],
)
def test_malformed_command_lines(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        from_command_line(words)


def test_command_line_forms() -> None:
    config = from_command_line(
        ["--config=35m", "--optimizer.lr", "1e-3", "--run.seed=4", "--run.seed", "5"]
    )
    assert config is not None
    assert (config.model.flavor, config.optimizer.lr, config.run.seed) == ("35m", 1e-3, 5)


text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
names = text.filter(lambda name: not {"/", "\\"} & set(name))


@given(
    name=names,
    description=text,
    seed=st.integers(0, 2**40),
    lr=st.floats(1e-12, 10),
    layers=st.none() | st.integers(1, 99),
)
def test_what_is_written_loads_to_the_same_config(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    description: str,
    seed: int,
    lr: float,
    layers: int | None,
) -> None:
    before = load_config("debug")
    before = dataclasses.replace(
        before,
        run=dataclasses.replace(before.run, name=name, description=description, seed=seed),
        optimizer=dataclasses.replace(before.optimizer, lr=lr),
        model=dataclasses.replace(before.model, layers=layers),
    )
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(to_toml(before), encoding="utf-8")
    assert load_config(str(path)) == before


def test_print_config_and_help_print_and_stop(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert from_command_line(["--config", "1b", "--print-config", "--run.seed", "9"]) is None
    printed = capsys.readouterr().out
    again = load_config(write(tmp_path, "printed.toml", printed))
    assert (again.model.flavor, again.run.seed, again.run.name) == ("1b", 9, "1b")
    assert from_command_line(["--help"]) is None
    help_text = capsys.readouterr().out
    assert "--optimizer.weight_decay  (number >= 0 | 1/steps; default: 0.1)" in help_text
