"""Precedence, inheritance, error messages, and TOML that loads to the same config."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.base.settings import steps_of
from torchtitan_diloco.components.run_plan import plan_run
from torchtitan_diloco.config import (
    Config,
    ConfigError,
    from_command_line,
    load_config,
    parse_config,
    to_toml,
)
from torchtitan_diloco.config.checks import unused_settings
from torchtitan_diloco.config.loader import CONFIGS_FOLDER, shipped_configs, without_settings
from torchtitan_diloco.config.parts import OPTIMIZERS
from torchtitan_diloco.config.schema import flat_settings, flatten
from torchtitan_diloco.diloco.config import Beginning, DiLoCoConfig, advice
from torchtitan_diloco.islands.config import Islands
from torchtitan_diloco.models import build_model
from torchtitan_diloco.models.interface import parameter_counts


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def error_of(name_or_path: str, **settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name_or_path, settings)
    return str(caught.value)


def test_command_line_precedes_a_file_which_precedes_what_it_extends(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "extends = '1b.toml'\n[training]\nsteps = 7\nbatch_size = 3\n")
    write(tmp_path, "middle.toml", "extends = 'base.toml'\n[training]\nbatch_size = 4\n")
    leaf = "extends = 'middle.toml'\n[model]\nlayers = 2\n[run]\nname = ''\nseed = 1\n"
    config = load_config(write(tmp_path, "leaf.toml", leaf), {"run.seed": "5"})
    assert (config.training.steps, config.training.batch_size, config.run.seed) == (7, 4, 5)
    assert (config.model.flavor, config.model.layers) == ("1b", 2)
    assert config.training.z_loss == Config().training.z_loss
    assert config.run.name == "leaf", "an empty name is not set"


def test_a_vocabulary_is_that_of_the_tokenizer_that_is_given_later(tmp_path: Path) -> None:
    """A preset sizes the embedding for its tokenizer, which another may replace."""

    def rows(config: Config) -> int | None:
        assert parse_config(to_toml(config), "saved") == config, "a resume has the same"
        return config.model.vocab_size

    own = "[data]\ntokenizer = 'own.json'\n"
    size = "[model]\nvocab_size = 4096\n"
    other = write(tmp_path, "other.toml", f"extends = '1b.toml'\n{own}")
    sized = write(tmp_path, "sized.toml", f"extends = '1b.toml'\n{own}{size}")
    assert rows(load_config("1b")) == 32_000
    assert rows(load_config("1b", {"data.tokenizer": "own.json"})) is None
    assert rows(load_config("1b", {"data.tokenizer": "x", "model.vocab_size": "99"})) == 99
    assert rows(load_config(other)) is None
    assert rows(load_config(sized)) == 4096
    assert rows(load_config(sized, {"data.tokenizer": "bytes"})) is None
    assert rows(load_config(other, {"model.vocab_size": "99"})) == 99


def test_values_on_the_command_line() -> None:
    words = "--config=35m --training.tokens 25e9 --optimizer.lr=1"
    words += " --run.seed=5 --run.name=--x --training.global_batch_size none"
    words += " --diloco.fragments.pattern sequential --run.description 78 --run.deterministic true"
    words += " --data.shuffle=False --optimizer.weight_decay 0.3 --data.source="
    config = from_command_line(words.split())
    training = config.training
    run = config.run
    # A length of the run replaces the one of the file.
    assert (training.tokens, training.tokens_per_parameter) == (25_000_000_000, 0.0)
    assert isinstance(training.tokens, int)
    assert training.global_batch_size is None
    assert (config.model.flavor, config.optimizer.lr) == ("35m", 1)
    assert (run.name, run.seed, run.description) == ("--x", 5, "78")
    assert (run.deterministic, config.data.shuffle, config.data.source) == (True, False, "")
    assert config.optimizer.weight_decay == 0.3
    assert config.diloco.fragments.pattern == "sequential"


@pytest.mark.parametrize(
    ("words", "warmup", "beginning"),
    [
        ("", 200, 100),
        ("--lr_schedule.warmup 30 --diloco.beginning.length 30", 30, 30),
        ("--lr_schedule.warmup 0 --diloco.beginning.length 0", 0, 0),
        ("--lr_schedule.warmup 0.05 --diloco.beginning.length 0.05", 50, 50),
    ],
)
def test_the_length_that_is_given_last_counts(
    tmp_path: Path, words: str, warmup: int, beginning: int
) -> None:
    lengths = "lr_schedule.warmup = 300\ndiloco.beginning.length = 300\n"
    write(tmp_path, "parent.toml", f"extends = '1b.toml'\n{lengths}")
    lengths = "lr_schedule.warmup = 0.2\ndiloco.beginning.length = 0.1\n"
    child = write(tmp_path, "child.toml", f"extends = 'parent.toml'\n{lengths}")
    config = from_command_line(["--config", child, *words.split()])
    assert steps_of(config.lr_schedule.warmup, 1000) == warmup
    assert config.diloco.beginning.in_steps(1000).length == beginning


@pytest.mark.parametrize(
    ("given", "steps"), [("0", 0), ("1", 1), ("30", 30), ("1e3", 1000), ("0.1", 5), ("0.999", 50)]
)
def test_a_length_is_a_number_of_steps_or_a_share_of_the_run(given: str, steps: int) -> None:
    settings = {"lr_schedule.warmup": given, "diloco.beginning.length": given}
    config = load_config("debug", settings)
    for length in (config.lr_schedule.warmup, config.diloco.beginning.length):
        assert steps_of(length, 50) == steps
        assert isinstance(length, int) == (length >= 1 or given == "0")
    assert Beginning(length=float(given)).in_steps(50).length == steps


@pytest.mark.parametrize("given", ["1.5", "-1", "-0.1", "nan", "half", "true"])
def test_a_length_that_is_none_is_refused(given: str) -> None:
    reason = "expected a whole number of steps of at least 0, or a share of the run below 1"
    for key in ("lr_schedule.warmup", "diloco.beginning.length"):
        with pytest.raises(ConfigError, match=f'{key} = "{given}": {reason}'):
            load_config("debug", {key: given})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("training.steps 3", "give settings as --section.key VALUE"),
        ("--training.steps --run.seed 3", "--training.steps: needs a value"),
        ("--config", "--config: needs a value"),
        ("--run.folder a b", "b: has no key, as --run.folder takes one value: .* in quotes$"),
        ("--config a.toml b", "b: has no key, as --config takes one value"),
        ("--run.foldr a b", r"unknown key; did you mean run.folder\?"),
        ("--compile", r"--compile: is a section: write .*, or --compile.KEY VALUE; compile has"),
        ("--no-such-flag", "--no-such-flag: unknown key; .*--help all` lists all keys"),
        ("--training.stps", r"--training.stps: unknown key; did you mean training.steps\?"),
        ("--training.steps -3", "expected a whole number >= 0"),
        ("--config 1bb.toml", r'--config = "1bb.toml": no such file; .* did you mean 1b\?'),
        ("--config /", r'--config = "/": is a folder: give a TOML file; train_configs/ has'),
        ("--config ~nobody-here/a.toml", r'--config = "~nobody-here/a.toml": .*: give a full path'),
        ("--config " + 300 * "x", "no such file"),
        ("--config /dev/null", "is not a regular file, as all processes of a run read it: give a"),
        (
            "--data.mixture a=1 --run.seed 1 --data.mixture b=1",
            "line: --data.mixture: is given twice: give all values after one --data.mixture$",
        ),
    ],
)
def test_malformed_command_lines(words: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        from_command_line(words.split())


def test_the_last_value_of_a_setting_counts() -> None:
    words = "--config 1b --run.seed 3 --config debug --run.seed=4 --run.name a"
    assert from_command_line(words.split()) == load_config(
        "debug", {"run.seed": "4", "run.name": "a"}
    )


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("diloco.workerz", "3", "did you mean diloco.workers?"),
        ("trainign.steps", "3", "did you mean training.steps?"),
        ("fragments.pattern", "3", "did you mean diloco.fragments.pattern?"),
        ("model.lairs", "3", "did you mean model.layers?"),
        ("compile.mode", "x", "; mode is a key of activation_checkpoint; compile has enable"),
        ("xyzzy.xyzzy", "3", "--help all` lists all keys"),
        ("training.batch_size", "0", ": expected a whole number >= 1"),
        ("training.batch_size", "3\nx = 4", ": expected a whole number"),
        ("training.steps", "1" * 400, ": expected a number that fits in 64 bits"),
        ("training.z_loss", "inf", ": expected a number that fits in 64 bits"),
        ("optimizer.lr", "1e400", ": expected a number that fits in 64 bits"),
        ("model.vocab_size", "9" + 18 * "0", ": expected a whole number <= 1073741824"),
        ("model.width", "9" + 18 * "0", ": expected a whole number <= 1048576"),
        ("optimizer.lr", "101", ": expected a number <= 100.0"),
        ("optimizer.lr", "nan", ": expected a number > 0.0"),
        ("training.tokens", "1M", ": expected a whole number; did you mean 1e6?"),
        ("training.tokens", "2.5b", ": expected a whole number; did you mean 2.5e9?"),
        ("training.tokens", "1,000", ": expected a whole number; did you mean 1000?"),
        ("training.tokens", "-1Gbit", ": expected a whole number"),
        ("optimizer.lr", "4 k", ": expected a number; did you mean 4e3?"),
        ("run.seed", "2e16", "whole number: write it in digits, such as 20000000000000000"),
        ("run.seed", "1e30", ": expected a whole number; it must fit in 64 bits"),
        ("training.global_batch_size", "9.1e15", "in digits, such as 9100000000000000"),
        ("diloco.workers", str(2**63 - 1), ": expected a whole number <= 1048576"),
        ("parallel.fsdp", str(2**63 - 1), ": expected a whole number <= 1048576"),
        ("islands.local", str(2**63 - 1), ": expected a whole number <= 1048576"),
        ("diloco.link.timeout_seconds", "1e10", ": expected a whole number <= 31536000"),
        ("distributed.init_timeout_seconds", "1e10", ": expected a whole number <= 31536000"),
        ("distributed.train_timeout_seconds", "1e10", ": expected a whole number <= 31536000"),
        ("checkpoint.mirror_wait_seconds", "1e10", ": expected a whole number <= 31536000"),
        ("run.deterministic", "1k", ": expected true or false"),
        ("model.qk_norm", "maybe", ': expected true or false, or "none"'),
        ("run.folder", "~a\0b", "has a NUL character, which no path can have: remove it"),
        ("run.name", "a\0b", "has a NUL character, which no path can have: remove it"),
        ("data.cache_folder", "a\0b", "has a NUL character, which no path can have: remove it"),
        ("metrics.boards", "a a", "expected one of tensorboard, wandb:PROJECT, mlflow:EXPERIMENT"),
        (
            "metrics.boards",
            "tensorboard tensorboard",
            ": tensorboard is given several times: give each board once",
        ),
        ("optimizer.weight_decay", "x", ": expected a number, or one of 1/steps"),
        ("run.deterministic", "yes", ": expected true or false"),
        ("lr_schedule.decay", "cosin", "wsd, constant; did you mean cosine?"),
        ("data.phases", "x", ": expected a list of tables, each with start and mixture"),
        (
            "data.phases.start",
            "0.5",
            "is a list of tables, each of which begins with [[data.phases]]",
        ),
        ("run.folder", "~nobody-here/x", ": give a full path"),
        (
            "data.corpus",
            "gr\udcfc.txt",
            "in which settings are saved: give other text, or rename the file",
        ),
        ("data.corpus", "docs,~nobody-here/*.txt", ": give a full path"),
    ],
)
def test_a_mistake_is_one_line_with_origin_key_value_and_remedy(
    key: str, text: str, reason: str
) -> None:
    (line,) = error_of("debug", **{key: text}).splitlines()[1:]
    assert line.startswith(f"  command line: {key} = ")
    assert line.endswith(reason)


def test_all_mistakes_are_listed_with_their_origin(tmp_path: Path) -> None:
    """Also a value of a file that the command line or another file overrides."""
    parent = write(tmp_path, "parent.toml", "[training]\nsteps = 'x'\n[trainnig]\nsteps = 1\n")
    path = write(
        tmp_path,
        "a.toml",
        "extends = 'parent.toml'\nrun = 3\n[data]\n[training]\nsteps = 5\nbatch_size = 0.5\n",
    )
    lines = error_of(path, **{"training.batch_size": "2", "diloco.workerz": "3"}).splitlines()
    assert lines[0] == "5 mistakes in the configuration:"
    assert sorted(line.partition(": ")[0].strip() for line in lines[1:]) == sorted(
        [parent] * 2 + [path] * 2 + ["command line"]
    )
    assert "did you mean training.steps?" in "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[training\n", "is not valid TOML"),
        ("steps = " + "9" * 5000, "is not valid TOML"),
        ("steps = " + "[" * 3000, "is not valid TOML"),
        ("extends = 'a.toml'\n", "must be the name of one other TOML file"),
        ("extends = 3\n", "must be the name of one other TOML file"),
        ("extends = 'b.toml'\n", "no such file"),
        ("compile = 3\n", "compile = 3: is a section: write [compile] in a file, or --compile.KEY"),
        ("[[compile]]\nenable = true\n", "is a section: write [compile] in a file"),
        ("[diloco]\nlink = 3\n", "diloco.link = 3: is a section: write [diloco.link] in a file"),
        ("training.steps = 1979-05-27\n", '"1979-05-27": expected a whole number'),
        ("training.steps = '5'\n", '"5": expected a whole number'),
        ("run.name = 5\n", "run.name = 5: expected text, in quotes"),
        ("[run]\nextends = 'debug'\n", "unknown key: move extends above the first [section]"),
        ("extends = '~nobody-here/x.toml'\n", "does not have: give a full path"),
        ('extends = "~\\u0000"\n', "does not have: give a full path"),
        ("run.name = '\xe9'\n", "is not text in UTF-8: save it with this encoding"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="latin-1")
    (line,) = error_of(str(path)).splitlines()[1:]
    assert str(path) in line
    assert reason in line


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("extends = 'debug.toml'\n", encoding="utf-8-sig")
    assert load_config(str(tmp_path / "a.toml")).diloco.workers == 2


def test_a_key_of_another_section_is_no_suggestion(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", "[model]\nname = 'x'\n[training]\nlr = 1\n")
    name, lr = error_of(path, **{"diloco.quorum": "2"}).splitlines()[1:3]
    assert "name is a key of run, optimizer, diloco.outer_optimizer, islands" in name
    assert "; model has flavor, weights, layers, width," in name
    assert "unknown key; lr is a key of optimizer, diloco.outer_optimizer; training has" in lr


text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=20)
names = text.filter(lambda name: name and not {"/", "\\"} & set(name))


@given(name=names, text=text, seed=st.integers(0, 2**63 - 1), lr=st.floats(1e-12, 10))
def test_saved_toml_loads_to_the_same_config(
    tmp_path_factory: pytest.TempPathFactory, name: str, text: str, seed: int, lr: float
) -> None:
    config = load_config("debug", {"run.name": name, "data.corpus": text, "run.seed": str(seed)})
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=lr))
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(str(path)) == config
    assert parse_config(to_toml(config), "checkpoint") == config


def test_a_saved_config_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"(?s)x: model.lairs = 2: unknown key.*x: model.layers"):
        parse_config("[model]\nlairs = 2\nlayers = -3\n", "x")


def test_a_config_made_in_python_is_checked() -> None:
    wrong: Any = "stream"
    with pytest.raises(ValueError, match=r"method = 'stream': .* streaming\?\n.*workers = 0:"):
        DiLoCoConfig(method=wrong, workers=0)
    with pytest.raises(ValueError, match=r"^DiLoCoConfig.overlap = None: expected Overlap\(...\)$"):
        DiLoCoConfig(overlap=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^Islands.join: expected text, in quotes$"):
        Islands(join=b"a password")  # type: ignore[arg-type]
    assert "password" not in repr(Islands(join="a password"))


def test_a_preset_is_not_replaced_by_a_file_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = load_config("demo")
    write(tmp_path, "demo", "extends = '1b'\n")
    write(tmp_path, "1b", "not TOML")
    write(tmp_path, "demo.toml", "extends = '35m'\n")
    write(tmp_path, "mine", "extends = 'debug'\n")
    assert from_command_line([]) == load_config("demo") == expected
    assert load_config("./demo").model.flavor == "1b"
    assert load_config("demo.toml").model.flavor == "35m"
    assert load_config("mine").model == load_config("debug").model, "there is no such preset"


keys = st.sampled_from(["run.seed", "run.name", "data.corpus", "data.mixture"])
options = st.lists(st.tuples(keys, st.lists(st.sampled_from(["1", "a=1", "-x", "a b"]))))


@given(options, st.sets(keys), st.booleans())
def test_settings_are_taken_out_with_their_values(
    chosen: list[tuple[str, list[str]]], keys: set[str], joined: bool
) -> None:
    def words_of(chosen: list[tuple[str, list[str]]]) -> list[str]:
        words = list[str]()
        for key, values in chosen:
            first = [f"--{key}={values[0]}"] if joined and values else [f"--{key}", *values[:1]]
            words += [*first, *values[1:]]
        return words

    kept = [(key, values) for key, values in chosen if key not in keys]
    assert without_settings(words_of(chosen), keys) == words_of(kept)


# --- shipped files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_configs())
def test_a_config_builds_and_repeats_nothing_that_it_inherits(name: str) -> None:
    config = load_config(name)
    vocabulary = config.model.vocab_size or 320
    model = build_model(config.model, vocabulary, config.training.sequence_length)
    counts = parameter_counts(model)
    size = config.diloco.workers * max(1, config.parallel.fsdp)
    plan = plan_run(
        config.training,
        ranks=size,
        parameters=counts["total"],
        embedding_parameters=counts["embedding"],
        optimizer=OPTIMIZERS[config.optimizer.name],
    )
    assert plan.total_steps > steps_of(config.lr_schedule.warmup, plan.total_steps)
    assert not [line for line in advice(config.diloco, plan.total_steps) if name != "debug"]
    assert not list(unused_settings(config))
    assert config.run.description
    assert not re.search("C4|library", config.run.description), "runs inherit it with other text"
    node = 8 * config.training.batch_size  # of eight devices
    assert (config.training.global_batch_size or node) % node == 0
    table = tomllib.loads((CONFIGS_FOLDER / f"{name}.toml").read_text())
    if parent := table.pop("extends", None):
        inherited = flat_settings(load_config(parent))
        assert not [key for key, value in flatten(table).items() if inherited[key] == value]
