"""Settings that contradict each other are errors; settings that have no effect are pointed out."""

import re
import tomllib

import pytest

from torchtitan_diloco.components.run_plan import plan_run
from torchtitan_diloco.config import ConfigError, load_config
from torchtitan_diloco.config.checks import run_warnings, unused_settings
from torchtitan_diloco.config.loader import CONFIGS_FOLDER, shipped_configs
from torchtitan_diloco.config.schema import flat_settings, flatten
from torchtitan_diloco.diloco.config import advice
from torchtitan_diloco.models import build_model

TOPK = {"diloco.quantization.codec": "topk", "diloco.outer_optimizer.name": "sgd"}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"training.steps": "0"}, "training.steps"),
        ({"training.steps": "5", "training.tokens": "1000"}, "training.tokens"),
        ({"run.name": "../elsewhere"}, "run.name"),
        ({"diloco.overlap.delay": "10"}, "diloco.overlap.delay"),
        ({"diloco.beginning.sync_every": "3"}, "diloco.beginning.sync_every"),
        (
            {"diloco.beginning.steps": "9", "diloco.sync_every": "1", "diloco.overlap.delay": "0"},
            "diloco.beginning.sync_every",
        ),
        (
            {"diloco.beginning.steps": "9", "diloco.beginning.fraction": "0.1"},
            "diloco.beginning.fraction",
        ),
        ({"islands.local": "2", "diloco.beginning.fraction": "0.1"}, "diloco.beginning.fraction"),
        (
            {"lr_schedule.warmup_steps": "3", "lr_schedule.warmup_fraction": "0.1"},
            "lr_schedule.warmup_fraction",
        ),
        ({"diloco.delta_norm_limit": "0.5"}, "diloco.delta_norm_limit"),
        ({"diloco.fragments.pattern": "explicit"}, "diloco.fragments.modules"),
        ({"diloco.quantization.block_size": "65"}, "diloco.quantization.block_size"),
        (TOPK | {"diloco.quantization.top_values": "15"}, "diloco.quantization.top_values"),
        ({"diloco.quantization.top_values": "32"}, "diloco.quantization.top_values"),
        ({"diloco.quantization.codec": "topk"}, "diloco.outer_optimizer.name"),
        (TOPK | {"diloco.quantization.block_size": "32"}, "diloco.quantization.block_size"),
        ({"islands.name": "here"}, "islands.name"),
        ({"islands.join": "nats://127.0.0.1:1#run"}, "islands.name"),
        ({"islands.local": "3", "islands.slots": "1"}, "islands.slots"),
        ({"islands.local": "2", "diloco.link.outer_state": "cpu"}, "diloco.link.outer_state"),
        ({"data.shard_by": "random", "diloco.workers": "1"}, "data.shard_by"),
    ],
)
def test_contradictions_are_errors(settings: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^1 mistake.*\n.*: {key} = "):
        load_config("debug", settings)


WARM = {"lr_schedule.warmup_steps": "200"}


@pytest.mark.parametrize(
    ("steps", "settings", "expected"),
    [
        (2000, {}, []),
        (2000, {"diloco.outer_optimizer.name": "sgd"}, ['0.8 has no effect .*: it is for "nes']),
        (2000, {"diloco.outer_optimizer.epsilon": "1"}, ['has no effect .* it is for "adam"']),
        (2000, {"lr_schedule.decay_fraction": "0.5"}, ['"cosine": it is for "wsd"']),
        (2000, {"diloco.method": "none", "diloco.outer_optimizer.name": "sgd"}, []),
        (2000, TOPK, ["momentum = 0.8 has no effect"]),
        (2000, {"diloco.overlap.mixing": "0", "diloco.outer_optimizer.lr": "2"}, ["unstable"]),
        (200, {"diloco.beginning.steps": "200"}, ["has 200 steps and is not shorter than the run"]),
        (200, {"diloco.beginning.fraction": "1"}, ["has 200 steps and is not shorter than the"]),
        (200, {"diloco.beginning.steps": "199"}, ["the run has 20 outer rounds"]),
        (200, {"diloco.sync_every": "300"}, ["nothing is ever exchanged"]),
        (200, {"diloco.sync_every": "300", "diloco.workers": "1"}, []),
        (199, {"diloco.workers": "1", **WARM}, ["the peak learning rate is never reached"]),
    ],
)
def test_warnings(steps: int, settings: dict[str, str], expected: list[str]) -> None:
    found = run_warnings(load_config("debug", settings), steps)
    for line, words in zip(found, expected, strict=True):
        assert re.search(words, line)


# --- shipped files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_configs())
def test_a_config_builds_and_repeats_nothing_that_it_inherits(name: str) -> None:
    config = load_config(name)
    vocabulary = config.model.vocab_size or 320
    model = build_model(config.model, vocabulary, config.training.sequence_length)
    counts = model.parameter_counts()
    size = config.diloco.workers * max(1, config.parallel.fsdp)
    plan = plan_run(config.training, size, counts["total"], counts["embedding"])
    assert plan.total_steps > config.lr_schedule.warmup(plan.total_steps)
    assert not [line for line in advice(config.diloco, plan.total_steps) if name != "debug"]
    assert not list(unused_settings(config))
    assert config.run.description
    node = 8 * config.training.batch_size  # of eight devices
    assert (config.training.global_batch_size or node) % node == 0
    table = tomllib.loads((CONFIGS_FOLDER / f"{name}.toml").read_text())
    if parent := table.pop("extends", None):
        inherited = flat_settings(load_config(parent))
        assert not [key for key, value in flatten(table).items() if inherited[key] == value]
