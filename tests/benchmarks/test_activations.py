"""Check what each mode of activation checkpointing keeps, and what it computes again."""

import pytest
import torch

from benchmarks.activations import Memory, build_forward, memory_of
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.schema import ActivationCheckpoint
from torchtitan_diloco.models import build_model
from torchtitan_diloco.models.activations import activation_bytes

BLOCKS = 3
CONFIG = load_config(
    "debug",
    {
        "model.layers": str(BLOCKS),
        "training.batch_size": "2",
        "training.sequence_length": "64",
        "training.steps": "1",
    },
)
ROWS = 320
"""Rows of the embedding with the default tokenizer."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured() -> dict[str, Memory]:
    modes = {
        "none": ActivationCheckpoint("none"),
        "full": ActivationCheckpoint("full"),
        "all products": ActivationCheckpoint("selective", every=1000),
        "half": ActivationCheckpoint("selective", every=2),
        "attention": ActivationCheckpoint("selective", every=1),
    }
    return {name: memory_of(build_forward(CONFIG, mode, CPU), CPU) for name, mode in modes.items()}


def test_less_is_kept_the_more_is_recomputed(measured: dict[str, Memory]) -> None:
    kept = [measured[name].kept for name in ("none", "all products", "half", "attention", "full")]
    assert kept == sorted(kept, reverse=True)
    assert len({*kept}) == len(kept)
    assert measured["half"].kept < 0.5 * measured["none"].kept


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpoint.mode": "full"},
        {"activation_checkpoint.mode": "every_nth"},
        {"activation_checkpoint.mode": "selective"},
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.every": "1"},
        {"model.activation": "gelu", "model.heads": "4", "model.kv_heads": "2"},
        {"model.qk_norm": "false"},
    ],
)
def test_the_estimate_before_training_is_what_is_kept(changes: dict[str, str]) -> None:
    """Without the gradient of the output matrix, which a forward pass also computes."""
    shape = {"model.layers": "3", "training.batch_size": "2", "training.sequence_length": "64"}
    config = load_config("debug", {**shape, "training.steps": "1", **changes})
    mode = config.activation_checkpoint
    model = build_model(config.model, ROWS, 64)
    estimate = activation_bytes(model, tokens=2 * 64, element_bytes=4, checkpoint=mode)
    kept = memory_of(build_forward(config, mode, CPU), CPU).kept - 4 * ROWS * 96
    assert estimate == pytest.approx(kept, rel=0.1)


def test_only_the_chosen_products_are_computed_again(measured: dict[str, Memory]) -> None:
    """Recompute every second one of qkv, out, gate, up and down, and keep the others.

    These are out and up. Nothing needs down again.
    """
    flops = {name: one.product_flops for name, one in measured.items()}
    assert flops["all products"] == flops["none"]
    shape = CONFIG.model
    tokens = 2 * 64
    assert shape.flavor == "debug"
    width = 96
    heads_width = 3 * 32
    inner = 256
    again = 2 * tokens * BLOCKS * (heads_width * width + width * inner)
    assert flops["half"] - flops["none"] == again
    all_but_down = 2 * tokens * BLOCKS * (4 * heads_width * width + 2 * width * inner)
    assert flops["attention"] - flops["none"] == all_but_down
    assert flops["full"] == flops["attention"]
