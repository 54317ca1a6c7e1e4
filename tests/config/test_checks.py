"""Settings that contradict each other are errors; settings that have no effect are pointed out."""

import pytest

from torchtitan_diloco.config import Config, ConfigError, load_config
from torchtitan_diloco.config.checks import READ_WITH, unused_settings
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.diloco.config import advice

TOPK = {"diloco.quantization.codec": "topk"}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"training.steps": "0"}, "training.steps"),
        ({"training.steps": "5", "training.tokens": "1000"}, "training.tokens"),
        ({"training.global_batch_size": "17"}, "training.global_batch_size"),
        ({"run.name": "../elsewhere"}, "run.name"),
        ({"diloco.overlap.delay": "10"}, "diloco.overlap.delay"),
        ({"diloco.beginning.sync_every": "3"}, "diloco.beginning.sync_every"),
        (
            {"diloco.beginning.steps": "9", "diloco.sync_every": "1", "diloco.overlap.delay": "0"},
            "diloco.beginning.sync_every",
        ),
        ({"diloco.delta_norm_limit": "0.5"}, "diloco.delta_norm_limit"),
        ({"diloco.fragments.pattern": "explicit"}, "diloco.fragments.modules"),
        ({"diloco.quantization.block_size": "65"}, "diloco.quantization.block_size"),
        (TOPK | {"diloco.quantization.top_values": "15"}, "diloco.quantization.top_values"),
        (TOPK | {"diloco.quantization.top_values": "258"}, "diloco.quantization.top_values"),
        ({"diloco.quantization.top_values": "32"}, "diloco.quantization.top_values"),
        (TOPK | {"diloco.quantization.block_size": "32"}, "diloco.quantization.block_size"),
        ({"data.shard_by": "random", "diloco.workers": "1"}, "data.shard_by"),
        ({"data.shard_by": "random", "diloco.method": "none"}, "data.shard_by"),
        ({"optimizer.beta1": "0.99", "optimizer.beta2": "0.9"}, "optimizer.beta1"),
        ({"run.device": "cpu", "parallel.compute_dtype": "bfloat16"}, "parallel.compute_dtype"),
        ({"profiling.every": "2", "profiling.steps": "3"}, "profiling.every"),
    ],
)
def test_contradictions_are_errors(settings: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf": {key} = "):
        load_config("debug", settings)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"diloco.outer_optimizer.name": "sgd"},
            'momentum = 0.8 has no effect with diloco.outer_optimizer.name = "sgd"',
        ),
        (
            {"lr_schedule.decay_fraction": "0.5"},
            'decay_fraction = 0.5 has no effect with lr_schedule.decay = "cosine": it is for "wsd"',
        ),
        ({"diloco.method": "none", "diloco.outer_optimizer.name": "sgd"}, None),
    ],
)
def test_settings_without_effect_are_named(settings: dict[str, str], line: str | None) -> None:
    found = list(unused_settings(load_config("debug", settings)))
    assert len(found) == (line is not None)
    assert line is None or line in found[0]


def test_table_of_unused_settings_has_known_keys() -> None:
    deciders = {decider for decider, _ in READ_WITH.values()}
    assert {*READ_WITH, *deciders} <= set(flat_settings(Config()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"diloco.beginning.steps": "20"}, "beginning.steps = 20 is not shorter than the run"),
        ({"diloco.beginning.steps": "19"}, "the run has 2 outer rounds"),
        ({"diloco.sync_every": "30"}, "nothing is ever exchanged"),
        ({"diloco.sync_every": "30", "diloco.average_at_end": "true"}, "the run has 0 outer"),
    ],
)
def test_advice_counts_the_beginning_and_the_end(settings: dict[str, str], words: str) -> None:
    config = load_config("debug", {"diloco.sync_every": "10"} | settings)
    assert words in advice(config.diloco, total_steps=20)[0]


def test_one_worker_gets_no_advice_about_several() -> None:
    config = load_config("debug", {"diloco.workers": "1"})
    assert not advice(config.diloco, total_steps=5)


def test_advice_about_the_largest_values() -> None:
    plain = {"diloco.outer_optimizer.name": "sgd", "diloco.outer_optimizer.lr": "1"}
    assert not advice(load_config("debug", TOPK | plain).diloco, total_steps=10**4)
    found = advice(load_config("debug", TOPK).diloco, total_steps=10**4)
    assert "does not go with outer momentum" in found[-1]
