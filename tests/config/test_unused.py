"""Settings that would be skipped in silence are pointed out."""

import pytest

from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.fields import field_specs
from torchtitan_diloco.config.loader import shipped_configs
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.config.unused import READ_BY, unused_settings


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (
            {"diloco.outer_optimizer.name": "sgd"},
            'momentum = 0.8 does nothing with diloco.outer_optimizer.name = "sgd"',
        ),
        (
            {"diloco.outer_optimizer.beta2": "0.9"},
            'beta2 = 0.9 does nothing with diloco.outer_optimizer.name = "nesterov"',
        ),
        (
            {"diloco.outer_optimizer.decay_rounds": "9"},
            'decay_rounds = 9 does nothing with diloco.outer_optimizer.decay = "constant"',
        ),
        (
            {"lr_schedule.decay_fraction": "0.5"},
            'decay_fraction = 0.5 does nothing with lr_schedule.decay = "cosine": it is for "wsd"',
        ),
        (
            {"diloco.fragments.layers_per_fragment": "0", "diloco.fragments.pattern": "balanced"},
            "the whole model is one fragment",
        ),
    ],
)
def test_a_setting_that_is_not_read_is_named_with_what_decides(
    chosen: dict[str, str], told: str
) -> None:
    (line,) = unused_settings(load_config("debug", chosen))
    assert told in line


def test_without_an_outer_loop_its_settings_are_not_looked_at() -> None:
    nothing = {
        "diloco.method": "none",
        "diloco.sync_every": "1",
        "diloco.outer_optimizer.name": "sgd",
    }
    assert not list(unused_settings(load_config("debug", nothing)))


@pytest.mark.parametrize("name", shipped_configs())
def test_presets_set_nothing_in_vain(name: str) -> None:
    assert not list(unused_settings(load_config(name)))


def test_the_table_names_settings_there_are() -> None:
    keys = {spec.key for spec in field_specs(Config)}
    assert {*READ_BY, *(decider for decider, _ in READ_BY.values())} <= keys
