"""What a user's loop may do to the model, and what it is told when that cannot work."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.diloco.test_against_reference import Net, batch, inner_step
from tests.processes import ProcessPool
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco import (
    DiLoCoConfig,
    Fragments,
    Link,
    OuterOptimizer,
    Overlap,
    Quantization,
    StreamingDiLoCo,
)
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.distributed.world import FSDP, WORKER, join_world

EACH_STEP = DiLoCoConfig(
    sync_every=1,
    fragments=Fragments(layers_per_fragment=0),
    overlap=Overlap(delay=0, mixing=0.0),
    outer_optimizer=OuterOptimizer(name="sgd", lr=0.5),
)


def test_parameters_that_moved_to_other_memory_are_still_exchanged() -> None:
    model = Net()
    outer = StreamingDiLoCo(model, None, EACH_STEP)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() + 1.0
    before = outer.global_state_dict()
    outer.step()
    for name, value in outer.global_state_dict().items():
        torch.testing.assert_close(value, before[name] + 0.5)
        assert torch.equal(model.state_dict()[name], value)


def test_a_new_parameter_in_the_place_of_an_exchanged_one_is_refused() -> None:
    model = Net()
    outer = StreamingDiLoCo(model, None, EACH_STEP)
    model.load_state_dict(Net().state_dict(), assign=True)
    with pytest.raises(ValueError, match=r"new parameter in the place of .*assign=False"):
        outer.step()
    with pytest.raises(ValueError, match="new parameter in the place of"):
        outer.global_state_dict()


def test_rounds_without_a_change_leave_bf16_models_alone() -> None:
    """The shared copy is finer than bf16: rounding must not be taken for a change that pulls it back."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).bfloat16()
    model.get_parameter("0.weight").data.fill_(1.0)
    outer = StreamingDiLoCo(
        model, None, replace(EACH_STEP, outer_optimizer=OuterOptimizer(name="sgd", lr=0.1))
    )
    model.get_parameter("0.weight").data.add_(0.015625)
    outer.step()
    moved = outer.global_state_dict()["0.weight"].item()
    assert moved == pytest.approx(1.0015625)
    for _ in range(30):
        outer.step()
    assert outer.global_state_dict()["0.weight"].item() == moved


@pytest.mark.parametrize("weight", [math.inf, math.nan, -1.0])
def test_a_weight_that_is_no_weight(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of a step"):
        StreamingDiLoCo(Net(), None, EACH_STEP).step(weight)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"method": "none"}, "diloco.method"),
        ({"workers": 3}, "diloco.workers"),
        ({"sync_every": 2.5}, "diloco.sync_every"),
        ({"overlap": Overlap(delay=100)}, "diloco.overlap.delay"),
        ({"overlap": Overlap(mixing=50.0)}, "diloco.overlap.mixing"),
        ({"fragments": Fragments(pattern="stride")}, "diloco.fragments.pattern"),  # type: ignore[arg-type]
        ({"fragments": Fragments(pattern="explicit")}, "diloco.fragments.modules"),
        ({"outer_optimizer": OuterOptimizer(name="adamw")}, "diloco.outer_optimizer.name"),  # type: ignore[arg-type]
        ({"quantization": Quantization(codec="fp5")}, "diloco.quantization.codec"),  # type: ignore[arg-type]
        (
            {"quantization": Quantization(codec="int8", block_size=48)},
            "block_size.*is 48.* 16, 32, 64, .*: take 32",
        ),
        (
            {"quantization": Quantization(codec="int8", gather_codec="bf16")},
            "diloco.quantization.gather_codec",
        ),
        (
            {"quantization": Quantization(codec="bf16", block_size=32)},
            "block_size.*is 32, and bf16 has no blocks",
        ),
        ({"quantization": Quantization(rounding="stochastic")}, "diloco.quantization.rounding"),
        ({"quantization": Quantization(error_feedback=True)}, "diloco.quantization.error_feedback"),
        ({"link": Link(drop_probability=5.0)}, "diloco.link.drop_probability"),
    ],
)
def test_a_config_made_in_python_is_checked_too(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        StreamingDiLoCo(Net(), None, replace(DiLoCoConfig(), **changes))


def test_experts_inside_a_block_are_no_blocks() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(8))})
        for _ in range(4)
    )
    names = [fragment.name for fragment in build_fragments(model, Fragments(layers_per_fragment=2))]
    assert names == ["layers.0, layers.2", "layers.1, layers.3"]


def test_blocks_that_cannot_be_fragments() -> None:
    model = Net()
    with pytest.raises(
        ValueError, match=r'blocks = "block" is no module of the model; did you mean blocks'
    ):
        build_fragments(model, Fragments(blocks="block"))
    model.blocks.requires_grad_(False)
    with pytest.raises(ValueError, match=r"have no trainable parameter.*layers_per_fragment = 0"):
        build_fragments(model, Fragments())


def _sharded(spoil: bool) -> tuple[float, float, bool]:
    """2 workers x 2 ranks; a forward pass without gradient between the optimizer's step and the outer one."""
    world = join_world(Distributed(), Link(), device="cpu", workers=2, fsdp=2)
    assert world.mesh is not None
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh[FSDP])
    fully_shard(model, mesh=world.mesh[FSDP])
    chosen = replace(EACH_STEP, sync_every=2)
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen, shard_group=world.shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, targets = batch(0, 99)

    def loss() -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(model(tokens), targets).item()

    for step in range(1, 3):
        inner_step(model, optimizer, world.worker, step)
        loss()
        if spoil and step == 2 and world.rank == 2:  # one shard of worker 1
            weight = model.get_parameter("blocks.0.weight").data
            assert isinstance(weight, DTensor)
            weight.to_local()[0, 0] = math.nan
        outer.step()
    seen = loss()
    model.reshard()  # type: ignore[operator]
    participants = outer.metrics()["diloco/participants"]
    return seen, loss(), participants == 1.0


def test_a_forward_pass_after_an_apply_sees_what_was_applied(processes: ProcessPool) -> None:
    for seen, fresh, alone in processes.run(_sharded, 4, False):
        assert seen == fresh
        assert not alone


def test_shards_agree_that_a_delta_is_not_finite(processes: ProcessPool) -> None:
    for seen, _, alone in processes.run(_sharded, 4, True):
        assert alone, "all shards of worker 1 are left out, not only the one with the NaN"
        assert math.isfinite(seen)
