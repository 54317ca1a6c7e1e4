"""Muon: torch's own on one rank, and the same bits on any number of ranks."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.diloco.toy import join, parameters
from tests.processes import ProcessPool
from torchtitan_diloco.components.optimizer import build_optimizer, set_lr
from torchtitan_diloco.config.schema import Optimizer
from torchtitan_diloco.distributed.world import FSDP

SETTINGS = Optimizer(name="muon", lr=0.03, matrix_lr=0.02, momentum=0.9, weight_decay=0.1)


class Net(nn.Module):
    """Tall, wide and narrow matrices, whose rows divide nothing evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, rows) for rows in (7, 21, 3, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = distribute_tensor(parameter.grad, mesh, placements)


def train(workers: int, ranks: int) -> dict[str, Tensor]:
    world, model = join(workers, ranks), Net()
    if world.mesh is not None:
        fully_shard(model, mesh=world.mesh if workers > 1 else world.mesh[FSDP])
    optimizer = build_optimizer(model, SETTINGS, total_steps=10)
    for step in range(3):
        set_lr(optimizer, 1 / (1 + step))
        set_gradients(model, step)
        optimizer.step()
    return parameters(model)


def test_it_is_torchs_muon_beside_adamw() -> None:
    """torch's works in bf16, of which the matrices show the rounding."""
    model = Net()
    matrices = [block.weight for block in model.blocks]
    vectors = [block.bias for block in model.blocks]
    decay = SETTINGS.weight_decay
    muon = torch.optim.Muon(
        matrices,  # type: ignore[arg-type]
        lr=0.02,
        momentum=0.9,
        weight_decay=decay,  # type: ignore[arg-type]
        adjust_lr_fn="match_rms_adamw",
    )
    groups = [{"params": [model.embedding.weight]}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.03, betas=(0.9, 0.99), weight_decay=decay, fused=True)  # type: ignore[arg-type]
    for step in range(3):
        for optimizer, lr in ((muon, 0.02), (adamw, 0.03)):
            for group in optimizer.param_groups:
                group["lr"] = lr / (1 + step)
        set_gradients(model, step)
        muon.step()
        adamw.step()
    found, expected, before = train(1, 1), parameters(model), parameters(Net())
    for name, value in expected.items():
        error, change = found[name] - value, value - before[name]
        in_bf16 = name.startswith("blocks.") and name.endswith("weight")
        assert error.norm() < (0.02 if in_bf16 else 1e-6) * change.norm(), name


@pytest.mark.parametrize(("workers", "ranks"), [(1, 2), (1, 4), (2, 2)])
def test_any_number_of_ranks_gives_the_same(
    processes: ProcessPool, workers: int, ranks: int
) -> None:
    """Two workers are in data parallelism. The rows of one rank alone would give another result."""
    expected = train(1, 1)
    for found in processes.run(train, workers * ranks, workers, ranks):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
