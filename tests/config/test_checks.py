"""Settings that contradict each other are errors; settings that have no effect are pointed out."""

import pytest

from torchtitan_diloco.config import ConfigError, load_config
from torchtitan_diloco.config.checks import run_warnings, unused_settings
from torchtitan_diloco.diloco.config import advice

TOPK = {"diloco.quantization.codec": "topk"}
PLAIN = {"diloco.outer_optimizer.name": "sgd", "diloco.outer_optimizer.lr": "1"}


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
        ({"diloco.delta_norm_limit": "0.5"}, "diloco.delta_norm_limit"),
        ({"diloco.fragments.pattern": "explicit"}, "diloco.fragments.modules"),
        ({"diloco.quantization.block_size": "65"}, "diloco.quantization.block_size"),
        (TOPK | {"diloco.quantization.top_values": "15"}, "diloco.quantization.top_values"),
        ({"diloco.quantization.top_values": "32"}, "diloco.quantization.top_values"),
        ({"diloco.quantization.residual_decay": "0.9"}, "diloco.quantization.residual_decay"),
        (TOPK | {"diloco.quantization.block_size": "32"}, "diloco.quantization.block_size"),
        ({"islands.name": "here"}, "islands.name"),
        ({"islands.join": "nats://127.0.0.1:1#run"}, "islands.name"),
        ({"islands.local": "3", "islands.slots": "1"}, "islands.slots"),
        ({"islands.local": "2", "diloco.link.outer_state": "cpu"}, "diloco.link.outer_state"),
    ],
)
def test_contradictions_are_errors(settings: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^1 mistake.*\n.*: {key} = "):
        load_config("debug", settings)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"diloco.outer_optimizer.name": "sgd"},
            'momentum = 0.8 has no effect with diloco.outer_optimizer.name = "sgd": it is for "nes',
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


def test_a_run_too_short_for_its_settings_is_warned_of() -> None:
    chosen = {"lr_schedule.warmup_steps": "30", "diloco.workers": "1"}
    (warmup,) = run_warnings(load_config("debug", chosen), total_steps=20)
    assert "the peak learning rate is never reached" in warmup


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"diloco.beginning.steps": "20"}, "beginning.steps = 20 is not shorter than the run"),
        ({"diloco.beginning.steps": "19"}, "the run has 2 outer rounds"),
        ({"diloco.sync_every": "30"}, "nothing is ever exchanged"),
        ({"diloco.sync_every": "30", "diloco.workers": "1"}, None),
        (TOPK | {"diloco.workers": "1"}, "does not go with outer momentum"),
        (TOPK | PLAIN | {"diloco.workers": "1"}, None),
        ({"diloco.overlap.mixing": "0", "diloco.outer_optimizer.lr": "2"}, "to be unstable"),
    ],
)
def test_advice(settings: dict[str, str], words: str | None) -> None:
    config = load_config("debug", settings)
    found = advice(config.diloco, total_steps=20)
    assert words in "\n".join(found) if words else not found
