"""Checks of several settings together: what is refused, and what is warned of."""

import re
from pathlib import Path

import pytest
import tomli_w

from tests.config.test_loader import error_of
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config import (
    ConfigError,
    from_command_line,
    load_config,
)
from torchtitan_diloco.config.checks import run_warnings
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.islands.config import Islands, own_loop_settings

TOPK = {
    "diloco.quantization.codec": "topk",
    "diloco.outer_optimizer.name": "sgd",
    "diloco.outer_optimizer.lr": "1",
}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"training.steps": "0"}, "training.steps"),
        ({"training.steps": "5", "training.tokens": "1000"}, "training.tokens"),
        ({"run.name": "../elsewhere"}, "run.name"),
        ({"training.steps": "4", "training.stop_after": "9"}, "training.stop_after"),
        ({"diloco.overlap.delay": "10"}, "diloco.overlap.delay"),
        ({"diloco.beginning.sync_every": "3"}, "diloco.beginning.sync_every"),
        (
            {"diloco.beginning.length": "9", "diloco.sync_every": "1", "diloco.overlap.delay": "0"},
            "diloco.beginning.sync_every",
        ),
        ({"islands.local": "2", "diloco.beginning.length": "0.1"}, "diloco.beginning.length"),
        ({"diloco.delta_norm_limit": "0.5"}, "diloco.delta_norm_limit"),
        ({"diloco.quantization.block_size": "65"}, "diloco.quantization.block_size"),
        (TOPK | {"diloco.quantization.top_values": "15"}, "diloco.quantization.top_values"),
        ({"diloco.quantization.top_values": "32"}, "diloco.quantization.top_values"),
        ({"diloco.quantization.codec": "topk"}, "diloco.outer_optimizer.name"),
        (TOPK | {"diloco.outer_optimizer.lr": "0.4"}, "diloco.outer_optimizer.lr"),
        (TOPK | {"diloco.outer_optimizer.warmup": "0.1"}, "diloco.outer_optimizer.warmup"),
        (TOPK | {"diloco.overlap.mixing": "1"}, "diloco.overlap.mixing"),
        (TOPK | {"diloco.overlap.mixing_end": "1"}, "diloco.overlap.mixing_end"),
        (TOPK | {"diloco.quantization.block_size": "32"}, "diloco.quantization.block_size"),
        ({"islands.name": "here"}, "islands.name"),
        ({"islands.join": "runs/shared"}, "islands.name"),
        ({"islands.join": "ftp://host/run", "islands.name": "a"}, "islands.join"),
        ({"islands.local": "2"} | TOPK, "diloco.quantization.codec"),
        (
            {"islands.local": "2", "diloco.quantization.codec": "topk"},
            "diloco.quantization.codec",
        ),
        ({"islands.local": "3", "islands.slots": "1"}, "islands.slots"),
        ({"islands.local": "2", "islands.sync": "true"}, "islands.sync"),
        ({"islands.local": "2", "islands.name": "here"}, "islands.name"),
        ({"islands.sync": "true"}, "islands.sync"),
        ({"islands.join": 5000 * "x", "islands.name": "a"}, "islands.join"),
        ({"islands.join": "~nobody-here/x"}, "islands.join"),
        ({"islands.join": "s3:/bucket/x", "islands.name": "a"}, "islands.join"),
        ({"run.folder": "~nobody-here/x", "checkpoint.mirror": "b"}, "run.folder"),
        ({"islands.local": "2", "diloco.method": "none"}, "diloco.method"),
        ({"data.shard_by": "random", "diloco.workers": "1"}, "data.shard_by"),
        ({"parallel.reduce_dtype": "bfloat16"}, "parallel.reduce_dtype"),
    ],
)
def test_contradictions_are_errors(settings: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^1 mistake.*\n.*: {key}( = |: )"):
        load_config("debug", settings)


@pytest.mark.parametrize(
    ("settings", "deciders"),
    [
        ({"islands.name": "here"}, "islands.join"),
        ({"islands.sync": "true"}, "islands.join"),
        ({"islands.begin": "2"}, "islands.join (or islands.local)"),
    ],
)
def test_what_a_setting_of_islands_needs_is_not_refused_beside_it(
    settings: dict[str, str], deciders: str
) -> None:
    assert error_of("debug", **settings).endswith(
        f"is only used with {deciders}: set that too, or remove this setting"
    )


def test_the_home_of_an_unknown_user_is_no_location_in_an_own_loop() -> None:
    with pytest.raises(UserError, match=r"islands\.join.*whom this machine does not have"):
        own_loop_settings(Islands(join="~nobody-here/x", name="a"), DiLoCoConfig())


def test_an_island_in_a_store_may_have_its_copies_in_host_memory(tmp_path: Path) -> None:
    settings = {"islands.join": str(tmp_path), "islands.name": "here"}
    config = load_config("debug", settings | {"diloco.link.outer_state": "cpu"})
    _, used = own_loop_settings(config.islands, config.diloco)
    assert used.link.outer_state == "cpu"
    assert used.workers == 1


LOGIN = {"location": "s3://islands", "access_key_id": "lab", "secret_access_key": "open-sesame"}
SITE = {"name": "lab", "prefix": "mirror/lab/"}


@pytest.mark.parametrize(
    ("join", "name", "says"),
    [
        (LOGIN | SITE, "lab", ""),
        (LOGIN | SITE, "lab.2", ""),
        (LOGIN | {"name": "owner", "prefix": "mirror/owner/"}, "anything", ""),
        (LOGIN | SITE, "a", r'islands\.name = "a": must be lab, the login in .*: give lab\.a$'),
        (LOGIN | SITE, "lab-2", r"begin with it and a dot: give lab\.lab-2$"),
        (LOGIN | SITE, ".lab", r"and begin with a letter, a digit or"),
        (
            {**LOGIN, "secret_access_key": ""},
            "a",
            r"islands\.join: .*join\.toml: secret_access_key is missing; use the newest join file",
        ),
    ],
)
def test_an_island_has_the_name_of_its_login(
    tmp_path: Path, join: dict[str, str], name: str, says: str
) -> None:
    path = tmp_path / "join.toml"
    path.write_text(tomli_w.dumps(join))
    settings = {"islands.join": str(path), "islands.name": name}
    if not says:
        assert load_config("debug", settings).islands.name == name
        return
    with pytest.raises(ConfigError, match=says) as raised:
        load_config("debug", settings)
    assert "open-sesame" not in str(raised.value)


def test_data_parallelism_may_average_gradients_in_bf16() -> None:
    words = "--config debug --diloco.method none --parallel.reduce_dtype bfloat16"
    assert from_command_line(words.split()).parallel.reduce_dtype == "bfloat16"


WARM = {"lr_schedule.warmup": "200"}


@pytest.mark.parametrize(
    ("steps", "settings", "expected"),
    [
        (2000, {}, []),
        (2000, {"diloco.outer_optimizer.name": "sgd"}, ['0.8 has no effect .*: it is for "nes']),
        (2000, {"diloco.outer_optimizer.epsilon": "1"}, ['has no effect .* it is for "adam"']),
        (2000, {"lr_schedule.decay_fraction": "0.5"}, ['"cosine": it is for "wsd"']),
        (2000, {"diloco.method": "none", "diloco.outer_optimizer.name": "sgd"}, []),
        (2000, TOPK, ["momentum = 0.8 has no effect"]),
        (2000, {"data.mixture": "a=0.7 b=0.3"}, []),
        (2000, {"data.mixture": "a=0.123456789 b=1"}, ["data.mixture are rounded to multiples of"]),
        (
            2000,
            {"data.phases": "[{start = 0.5, mixture = {a = 0.123456789, b = 1}}]"},
            [r"data.phases\[0\] are rounded"],
        ),
        (2000, {"diloco.overlap.mixing": "0", "diloco.outer_optimizer.lr": "2"}, ["unstable"]),
        (
            200,
            {"diloco.beginning.length": "200"},
            ["has 200 steps, at least as many as"],
        ),
        (200, {"diloco.beginning.length": "0.999"}, ["has 200 steps, at least as many as"]),
        (200, {"diloco.beginning.length": "199"}, ["the run has 20 outer rounds"]),
        (
            2000,
            {"diloco.beginning.length": "0.5", "diloco.outer_optimizer.warmup": "1001"},
            ["warmup has 1001 steps, more than the 1000 of the run after its beginning"],
        ),
        (200, {"diloco.sync_every": "300"}, ["never exchange anything"]),
        (200, {"diloco.sync_every": "300", "diloco.workers": "1"}, []),
        (
            2000,
            {"training.tokens": "9", "training.stop_after": "2001"},
            ["the end of the run of 20"],
        ),
        (2000, {"profiling.start": "1999"}, []),
        (2000, {"profiling.start": "2000"}, ["which trains 2000 steps, so no step is traced: low"]),
        (
            2000,
            {"profiling.start": "9", "training.steps": "2000", "training.stop_after": "9"},
            ["profiling.start = 9 is after the end of this process, which trains 9 steps"],
        ),
        (199, {"diloco.workers": "1", **WARM}, ["the peak learning rate is never reached"]),
    ],
)
def test_warnings(steps: int, settings: dict[str, str], expected: list[str]) -> None:
    found = run_warnings(load_config("debug", settings), steps)
    for line, words in zip(found, expected, strict=True):
        assert re.search(words, line)


def test_a_resumed_run_that_ends_before_its_profile_is_a_warning() -> None:
    config = load_config("debug", {"profiling.start": "500"})
    assert not run_warnings(config, 2000, start_step=1499)
    (line,) = run_warnings(config, 2000, start_step=1500)
    assert "profiling.start = 500 is after the end of this process, which trains 500" in line
