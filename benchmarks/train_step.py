"""The trainer's step beside a bare PyTorch loop over the same model and the same data, in one process.

    python -m benchmarks.train_step [--rounds 7] [--steps 10] [--section.key value ...]

All loops take turns within one run, so that a machine whose speed drifts treats them alike; ratios are taken per round. The
bare loop materialises all logits, has no z-loss, no guard and no metrics: it does less. With `--compile.enable true` all loops
compile their blocks. Where torchtitan is installed (`pip install --no-deps torchtitan==0.2.2 tyro einops typeguard
docstring-parser`; later ones have no attention for CPUs), its Llama 3 of the same width, depth and heads trains in the bare
loop too, with a feed-forward layer of as many parameters.

A second table has what the outer loop adds to a step in which nothing is sent or applied.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.arguments import config_of, positive
from benchmarks.table import print_table, summary
from torchtitan_diloco.components.metrics import MetricsWriter
from torchtitan_diloco.components.reports import StepReports
from torchtitan_diloco.components.step_time import TimedIterator
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.distributed.world import join_world
from torchtitan_diloco.models.chinchilla.model import Decoder
from torchtitan_diloco.trainer import Trainer
from torchtitan_diloco.utils import GIB, describe_device, logger, peak_flops

Batches = Iterator[tuple[Tensor, Tensor]]
OUTER_STEPS = 1000
"""Calls of the outer loop that are timed together."""


@dataclass
class Loop:
    name: str
    step: Callable[[], object]
    parameters: int
    peak_bytes: int = 0
    """On an accelerator, above what was there before the loop was built."""


@dataclass(frozen=True)
class Turn:
    seconds: float
    cpu_seconds: float
    """Of this process's threads: what other programs do to the clock leaves it alone."""


def own_loop(config: Config, metrics: MetricsWriter) -> tuple[Trainer, Batches, Loop]:
    """The step of a run with its report, as often as a run writes one."""
    world = join_world(
        config.distributed, config.diloco.link, device=config.run.device, workers=1, fsdp=0
    )
    trainer = Trainer(config, world)
    logger.setLevel("ERROR")
    batches = TimedIterator(iter(trainer.loader))
    flops = trainer.model.flops_per_token(config.training.sequence_length)
    reports = StepReports(
        world, trainer.plan, flops, metrics, lag=1, outer=trainer.outer, behind={}
    )

    def step() -> None:
        reports.step_begins()
        reports.step_done(trainer.train_step(batches), batches.take_seconds())
        if trainer.step % config.metrics.log_every == 0:
            reports.open(trainer.step, trainer.lr)
        reports.publish(trainer.step)

    return trainer, batches, Loop("torchtitan_diloco", step, trainer.plan.parameters)


def bare_loop(
    name: str, model: nn.Module, blocks: list[nn.Module], trainer: Trainer, batches: Batches
) -> Loop:
    config, device = trainer.config, trainer.world.device
    if config.compile.enable:
        for block in blocks:
            block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)

    def step() -> None:
        for _ in range(trainer.plan.accumulation):
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
            with trainer.precision:
                loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
            (loss / trainer.plan.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_gradient_norm)
        loss.item()
        optimizer.step()
        optimizer.zero_grad()

    return Loop(name, step, sum(parameter.numel() for parameter in model.parameters()))


def bare_pytorch(trainer: Trainer, batches: Batches) -> Loop:
    config = trainer.config
    model = Decoder(config.model, trainer.vocab_size, config.training.sequence_length).to(
        trainer.world.device
    )
    model.init_weights(config.run.seed)
    return bare_loop("bare PyTorch loop", model, list(model.blocks), trainer, batches)


def titan(trainer: Trainer, batches: Batches) -> Loop:
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs

    shape = trainer.model.shape
    arguments = TransformerModelArgs(
        dim=shape.width,
        n_layers=shape.layers,
        n_heads=shape.heads,
        vocab_size=trainer.vocab_size,
        multiple_of=1,
        ffn_dim_multiplier=shape.feed_forward
        / (4 * shape.width),  # its three matrices then hold what ours do in two
        max_seq_len=trainer.config.training.sequence_length,
    )
    model = Transformer(arguments).to(trainer.world.device)
    with torch.no_grad():
        model.init_weights()
    return bare_loop(
        "torchtitan's Llama 3, bare loop", model, list(model.layers.values()), trainer, batches
    )


def turn(loop: Loop, steps: int, device: torch.device) -> Turn:
    _finish(device)
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loop.step()
    _finish(device)
    return Turn(
        (time.perf_counter() - started) / steps, (time.process_time() - cpu_started) / steps
    )


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warmed_up(loop: Loop, steps: int, device: torch.device, before: int) -> Loop:
    """`before`: bytes that were in use on the device before the loop was built."""
    turn(loop, steps, device)
    if device.type == "cuda":
        loop.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)
    return loop


def row(
    loop: Loop,
    turns: list[Turn],
    ours: list[Turn],
    tokens: int,
    utilisation: Callable[[float], float | None],
) -> list[str]:
    used = utilisation(tokens / sorted(one.seconds for one in turns)[len(turns) // 2])
    return [
        loop.name,
        f"{loop.parameters / 1e6:.1f}",
        summary([tokens / one.seconds for one in turns], 0),
        summary([own.seconds / one.seconds for one, own in zip(turns, ours, strict=True)]),
        summary([1e3 * one.cpu_seconds for one in turns], 1),
        summary([own.cpu_seconds / one.cpu_seconds for one, own in zip(turns, ours, strict=True)]),
        "-" if used is None else f"{used:.1f}",
        f"{loop.peak_bytes / GIB:.2f}" if loop.peak_bytes else "-",
    ]


def outer_loop_seconds(trainer: Trainer, rounds: int) -> list[float]:
    """Of one `outer.step()` between two exchanges, as every step of a run has it."""
    outer = StreamingDiLoCo(trainer.model, None, replace(trainer.config.diloco, method="streaming"))
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(OUTER_STEPS):
            outer.step_count = 0  # in the first step no fragment has its turn
            outer.step()
        found.append((time.perf_counter() - started) / OUTER_STEPS)
    outer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument(
        "--steps", type=positive, default=10, help="steps of each loop in one round"
    )
    own, words = parser.parse_known_args()
    config = config_of(
        parser,
        [*words, "--diloco.workers", "1", "--validation.every", "0", "--diloco.method", "none"],
    )
    with MetricsWriter(None, config.metrics) as metrics:
        trainer, batches, ours = own_loop(config, metrics)
        device = trainer.world.device
        loops = [warmed_up(ours, own.steps, device, before=0)]
        others = [bare_pytorch] + [titan] * (importlib.util.find_spec("torchtitan") is not None)
        for build in others:
            before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            loops.append(warmed_up(build(trainer, batches), own.steps, device, before))
        rounds = [[turn(loop, own.steps, device) for loop in loops] for _ in range(own.rounds)]
        outer = outer_loop_seconds(trainer, own.rounds)

    tokens, peak = trainer.plan.tokens_per_step, peak_flops(device)
    flops = trainer.model.flops_per_token(config.training.sequence_length)

    def utilisation(tokens_per_second: float) -> float | None:
        return None if peak is None else 100 * flops * tokens_per_second / peak

    compiled = "compiled" if config.compile.enable else "not compiled"
    title = (
        f"{config.model.flavor}, {tokens:,} tokens a step, {compiled}; {describe_device(device)}; torch {torch.__version__}; "
        f"n = {own.rounds} rounds of {own.steps} steps; median (min ... max)\n"
        "ratio: of the time of torchtitan_diloco's step to that of this loop's, per round; above 1 the loop is faster"
    )
    header = [
        "loop",
        "M parameters",
        "tokens/s",
        "ratio",
        "CPU ms a step",
        "ratio of CPU time",
        "MFU %",
        "peak GiB",
    ]
    columns = [list(column) for column in zip(*rounds, strict=True)]
    print_table(
        title,
        header,
        [
            row(loop, turns, columns[0], tokens, utilisation)
            for loop, turns in zip(loops, columns, strict=True)
        ],
    )
    step = sorted(one.seconds for one in columns[0])[own.rounds // 2]
    shares = [100 * seconds / step for seconds in outer]
    print_table(
        f"the outer loop in a step without communication, H = {config.diloco.sync_every}; n = {own.rounds} rounds",
        ["microseconds", "% of torchtitan_diloco's step"],
        [[summary([1e6 * seconds for seconds in outer], 1), summary(shares, 4)]],
    )


if __name__ == "__main__":
    main()
