"""Every shipped TOML loads, passes the checks across settings, and its model can be built."""

import dataclasses
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchtitan_diloco.components.run_plan import plan_run
from torchtitan_diloco.config.loader import CONFIGS_FOLDER, load_config, shipped_configs
from torchtitan_diloco.diloco.config import advice
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.models import MODELS

NAMES = shipped_configs()


def test_there_are_presets() -> None:
    assert {"debug", "35m", "100m", "200m", "300m", "500m", "1b", "4b"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_preset_builds(name: str) -> None:
    config = load_config(name)
    vocabulary = config.model.vocab_size or 320
    with torch.device("meta"):
        model = MODELS[config.model.name].build(
            config.model, vocabulary, config.training.sequence_length
        )
    counts = model.parameter_counts()
    size = config.diloco.workers * max(1, config.parallel.fsdp)
    world = World(rank=0, size=size, workers=config.diloco.workers, device=torch.device("cpu"))
    plan = plan_run(config.training, world, counts["total"], counts["embedding"])
    assert plan.total_steps > config.lr_schedule.warmup_steps, (
        "the run would end within its warm-up"
    )
    assert not [line for line in advice(config.diloco, plan.total_steps) if name != "debug"]
    assert config.run.description, "a preset says what it is"


@pytest.mark.parametrize("name", NAMES)
def test_presets_run_on_one_node_of_eight_devices(name: str) -> None:
    config = load_config(name)
    share = 8 * config.training.batch_size
    assert (config.training.global_batch_size or share) % share == 0


def test_a_preset_says_only_what_differs() -> None:
    """A setting with the value it would have anyway is noise that hides the differences."""
    for path in CONFIGS_FOLDER.glob("*.toml"):
        table = tomllib.loads(path.read_text())
        parent = table.pop("extends", None)
        inherited: dict[str, object] = {}
        if parent is not None:
            inherited = dict(leaves(dataclasses.asdict(load_config(parent))))
        for key, value in leaves(table):
            assert inherited.get(key) != value, f"{path.name}: {key} = {value} is inherited already"


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
