"""A small model, its training step and its process groups, for the tests of the outer loop."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco import (
    DiLoCoConfig,
    Fragments,
    Link,
    OuterOptimizer,
    Overlap,
    StreamingDiLoCo,
)
from torchtitan_diloco.distributed.world import FSDP, WORKER, World, join_world


class Net(nn.Module):
    """Sizes that divide nothing evenly: with two ranks a worker, one has no row of the gain."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7, bias=index % 2 == 0) for index in range(8))
        self.gain = nn.Parameter(torch.ones(1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: Tensor = (self.gain * x) @ self.embedding.weight.t()
        return logits


def config(layers: int = 2, delay: int = 1, mixing: float = 0.5, **outer: object) -> DiLoCoConfig:
    """`layers` 0, 8 and 2 make 1, 2 and 5 fragments of the eight blocks and the rest of Net."""
    return DiLoCoConfig(
        sync_every=8,
        measure_every=1,
        fragments=Fragments(layers_per_fragment=layers),
        overlap=Overlap(delay=delay, mixing=mixing),
        outer_optimizer=OuterOptimizer(**{"lr": 0.7, **outer}),  # type: ignore[arg-type]
    )


AVERAGE_EVERY_STEP = replace(config(0, 0, 0.0, name="sgd", lr=1.0), sync_every=1)


def join(workers: int, ranks: int = 1, timeout: int = 600, streams: int = 1) -> World:
    given: dict[str, Any] = {"device": "cpu", "workers": workers, "fsdp": ranks}
    link = Link(timeout_seconds=timeout, streams=streams)
    return join_world(Distributed(), link, **given, outer_loop=streams != 1)


def sharded(world: World) -> Net:
    """Net under FSDP2, if the worker has several ranks."""
    model = Net()
    if world.mesh is not None and world.ranks_per_worker > 1:
        for block in model.blocks[::4]:
            fully_shard(block, mesh=world.mesh[FSDP])
        fully_shard(model, mesh=world.mesh[FSDP])
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    tokens, targets = torch.randint(0, 11, (2, 6), generator=generator)
    return tokens, targets


def loss(model: nn.Module, worker: int, step: int) -> Tensor:
    tokens, targets = batch(worker, step)
    return nn.functional.cross_entropy(model(tokens), targets)


Started = tuple[StreamingDiLoCo, Net, torch.optim.Optimizer]


def start(
    chosen: DiLoCoConfig,
    workers: int = 2,
    ranks: int = 1,
    *,
    world: World | None = None,
    adam: bool = False,
    **options: Any,
) -> Started:
    """Return the outer loop of this rank, Net under FSDP2, and its optimizer.

    Join the other ranks, if `world` does not say that this has been done.
    """
    world = world or join(workers, ranks)
    model = sharded(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02) if adam else sgd(model)
    options = {"shard_group": world.shards, **options}
    return StreamingDiLoCo(model, world.group(WORKER), chosen, **options), model, optimizer


def alone(chosen: DiLoCoConfig, **options: Any) -> Started:
    """Return the outer loop of a single worker in this process, Net and its optimizer."""
    model = Net()
    return StreamingDiLoCo(model, None, chosen, **options), model, sgd(model)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    loss(model, worker, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    outer: StreamingDiLoCo,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
) -> None:
    for step in steps:
        inner_step(model, optimizer, outer.worker, step)
        outer.step()


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def fused(mean: Tensor, values: Tensor, share: float) -> None:
    """Add to a mean as with fused multiply-adds."""
    mean.copy_(torch.lerp(mean.double(), values.double(), share))
