"""A worker of torchft's DiLoCo that trains what our trainer trains: the same words on the command line, the same model, data
order, inner optimizer and fragments. Writes metrics.jsonl with the keys of our trainer.

    NNODES=2 NODE_RANK=0 LIGHTHOUSE=10.0.0.1 ADDRESS=10.0.0.1 python -m benchmarks.torchft_train --section.key value ...

NNODES, NODE_RANK: workers, this one; LIGHTHOUSE: address of worker 0, which serves it; ADDRESS: of this worker.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.torchft_manager import serve_lighthouse, start_manager
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.optimizer import (
    build_optimizer,
    clip_gradients,
    lr_factor,
    set_lr,
)
from torchtitan_diloco.components.run_plan import RunPlan, plan_run, vocabulary_rows
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.data.loader import build_train_loader, open_split, open_tokenizer
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.models import MODELS

LIGHTHOUSE_PORT = 29510
TIMEOUT = timedelta(hours=1)


def main(words: list[str]) -> None:
    config = from_command_line(words)
    assert config is not None
    worker, workers = int(os.environ["NODE_RANK"]), int(os.environ["NNODES"])
    world = World(worker, workers, workers, torch.device("cpu"))
    tokenizer = open_tokenizer(config.data)
    tokens = open_split(config.data, tokenizer, "train")
    spec = MODELS[config.model.name]
    with torch.device("meta"):
        rows = vocabulary_rows(config.model, tokenizer.vocab_size)
        model = spec.build(config.model, rows, config.training.sequence_length)
    spec.materialize(model, world.device, config.run.seed)
    counts = model.parameter_counts()
    plan = plan_run(config.training, world, counts["total"], counts["embedding"])
    loader = build_train_loader(
        tokens,
        sequence_length=config.training.sequence_length,
        batch_size=config.training.batch_size,
        accumulation=plan.accumulation,
        rank=worker,
        ranks=workers,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        processes=config.data.loader_processes,
        start=0,
    )
    train(config, plan, world, model, iter(loader))


def train(
    config: Config,
    plan: RunPlan,
    world: World,
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
) -> None:
    from torchft.local_sgd import DiLoCo

    logging.disable(logging.INFO)
    manager, served = meet(world, model)
    optimizer = build_optimizer(model, config.optimizer, plan.total_steps)
    outer = config.diloco.outer_optimizer
    # Its fragments are modules; a dictionary of the same parameters is one.
    parts = [fragment.parts for fragment in build_fragments(model, config.diloco.fragments)]
    fragments = [
        nn.ParameterDict({part.name.replace(".", "_"): part.parameter for part in group})
        for group in parts
    ]
    loop = DiLoCo(
        manager,
        list(fragments),
        optimizer,
        [
            torch.optim.SGD(part.parameters(), lr=outer.lr, momentum=outer.momentum, nesterov=True)
            for part in fragments
        ],
        sync_every=config.diloco.sync_every,
        fragment_sync_delay=config.diloco.overlap.delay,
        fragment_update_alpha=config.diloco.overlap.mixing,
    )
    # It hangs itself into the optimizer's step: what is not the step itself is exposed communication.
    inner_ended = [0.0]
    optimizer.register_step_post_hook(lambda *_: inner_ended.__setitem__(0, time.perf_counter()))
    log = Log(config, plan, world)
    with loop:
        for step in range(1, plan.total_steps + 1):
            set_lr(
                optimizer,
                config.optimizer.lr * lr_factor(step, plan.total_steps, config.lr_schedule),
            )
            cross_entropy = accumulate_gradients(config, plan, world, model, batches)
            clip_gradients(model.parameters(), config.training.max_gradient_norm, None)
            optimizer.step()
            log.exposed_seconds += time.perf_counter() - inner_ended[0]
            optimizer.zero_grad()
            log.step_done(step, cross_entropy / (plan.tokens_per_step / world.size))
    manager.shutdown(wait=False)
    if served is not None:
        time.sleep(1)  # the others may still be told that their last step counts
        served.shutdown()


def accumulate_gradients(
    config: Config,
    plan: RunPlan,
    world: World,
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
) -> float:
    """As in the trainer's step. The sum of the cross-entropy over this worker's tokens."""
    total = torch.zeros(())
    for inputs, targets in islice(batches, plan.accumulation):
        head = loss_head(
            targets, z_loss=config.training.z_loss, chunk_tokens=config.training.loss_chunk_tokens
        )
        sums = model(inputs, head=head)
        (sums.objective * (world.size / plan.tokens_per_step)).backward()
        total += sums.cross_entropy
    return total.item()


def meet(world: World, model: nn.Module) -> tuple[Any, Any]:
    """torchft's manager of this worker, and on worker 0 the lighthouse at which they meet."""
    served = (
        serve_lighthouse(f"0.0.0.0:{LIGHTHOUSE_PORT}", world.size, join_seconds=60)
        if world.is_first
        else None
    )
    lighthouse = f"http://{os.environ['LIGHTHOUSE']}:{LIGHTHOUSE_PORT}"
    own = os.environ["ADDRESS"]
    manager = start_manager(
        model, world.worker, world.size, lighthouse=lighthouse, address=own, timeout=TIMEOUT
    )
    return manager, served


class Log:
    """Records of the same steps as our trainer's."""

    def __init__(self, config: Config, plan: RunPlan, world: World) -> None:
        self._every, self._tokens, self.exposed_seconds = (
            config.metrics.log_every,
            plan.tokens_per_step,
            0.0,
        )
        self._path = Path(config.run.folder) / "metrics.jsonl" if world.is_first else None
        self._last, self._since = 0, time.perf_counter()
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def step_done(self, step: int, loss: float) -> None:
        if step != 1 and step % self._every:
            return
        now = time.perf_counter()
        seconds = (now - self._since) / (step - self._last)
        record = {
            "step": step,
            "train/loss_nats_per_token_global": loss,
            "speed/seconds_per_step": seconds,
            "speed/tokens_per_second_global": self._tokens / seconds,
            "diloco/exposed_seconds_mean_over_ranks": self.exposed_seconds,
        }
        self._last, self._since, self.exposed_seconds = step, now, 0.0
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
