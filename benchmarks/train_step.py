"""The trainer's step beside a bare PyTorch loop over the same model and the same data, in one process.

    python -m benchmarks.train_step [--rounds 7] [--steps 10] [--section.key value ...]

Both take turns within one run, so that a machine whose speed drifts treats them alike; the ratio is taken per round.
The bare loop materialises all logits, has no z-loss, no guard and no metrics: it does less.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.table import print_table, summary
from torchtitan_diloco.components.metrics import MetricsWriter
from torchtitan_diloco.components.reports import StepReports
from torchtitan_diloco.components.step_time import TimedIterator
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.distributed.world import join_world
from torchtitan_diloco.models.chinchilla.model import Decoder
from torchtitan_diloco.tools.device import describe_device
from torchtitan_diloco.tools.logging import logger
from torchtitan_diloco.trainer import Trainer


def bare_steps(trainer: Trainer, config: Config) -> Callable[[Iterator[tuple[Tensor, Tensor]]], None]:
    device = trainer.world.device
    model = Decoder(config.model, trainer.vocab_size, config.training.sequence_length).to(device)
    model.init_weights(config.run.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)

    def step(batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        for _ in range(trainer.plan.accumulation):
            inputs, targets = (tensor.to(device) for tensor in next(batches))
            with trainer.precision:
                loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
            (loss / trainer.plan.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def seconds(steps: int, step: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps of each loop in one round")
    own, words = parser.parse_known_args()
    config = from_command_line([*words, "--diloco.workers", "1", "--validation.every", "0", "--diloco.method", "none"])
    assert config is not None
    world = join_world(config.distributed, config.diloco.link, device=config.run.device, workers=1, fsdp=0)
    trainer = Trainer(config, world)
    bare, batches = bare_steps(trainer, config), TimedIterator(iter(trainer.loader))
    flops = trainer.model.flops_per_token(config.training.sequence_length)
    logger.setLevel("ERROR")
    with MetricsWriter(None, config.metrics) as metrics:
        reports = StepReports(world, trainer.plan, flops, metrics, lag=1, outer=trainer.outer, behind={})

        def ours() -> None:
            """A step of the run with its report, as often as a run writes one."""
            reports.step_begins()
            reports.step_done(trainer.train_step(batches), batches.take_seconds())
            if trainer.step % config.metrics.log_every == 0:
                reports.open(trainer.step, trainer.lr)
            reports.publish(trainer.step)

        for step in (ours, lambda: bare(batches)):  # warm-up
            seconds(own.steps, step)
        rounds = [(seconds(own.steps, ours), seconds(own.steps, lambda: bare(batches))) for _ in range(own.rounds)]

    tokens = trainer.plan.tokens_per_step
    title = (
        f"{config.model.flavor}, {trainer.plan.parameters / 1e6:.1f}M parameters, {tokens:,} tokens a step; "
        f"{describe_device(world.device)}; torch {torch.__version__}; n = {own.rounds} rounds of {own.steps} steps; "
        "median (min ... max)"
    )
    rows = [
        ["torchtitan_diloco", summary([tokens / mine for mine, _ in rounds], 0)],
        ["bare PyTorch loop", summary([tokens / theirs for _, theirs in rounds], 0)],
        ["ratio, per round", summary([theirs / mine for mine, theirs in rounds])],
    ]
    print_table(title, ["loop", "tokens/s"], rows)


if __name__ == "__main__":
    main()
