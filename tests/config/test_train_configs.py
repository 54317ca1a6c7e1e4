"""Every shipped TOML loads, passes all checks, and its model can be built."""

import tomllib

import pytest

from torchtitan_diloco.components.run_plan import plan_run
from torchtitan_diloco.config.checks import unused_settings
from torchtitan_diloco.config.loader import CONFIGS_FOLDER, load_config, shipped_configs
from torchtitan_diloco.config.schema import flat_settings, flatten
from torchtitan_diloco.diloco.config import advice
from torchtitan_diloco.models import build_model


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
