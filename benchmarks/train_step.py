"""Compare the trainer's step with a bare PyTorch loop on the same model and data.

    .venv/bin/python -m benchmarks.train_step [--rounds 7] [--steps 10] [--section.key value ...]

On a CPU all loops run in turns in one process, and ratios are computed for each round. On a GPU
each has a process of its own, as their optimizers need the memory; peaks of the other loops include
the parameters of our model. The bare loop does less: it materializes all logits and has no z-loss,
no guard and no metrics. With `--compile.enable true` all loops compile their blocks. If torchtitan
0.2.2 is installed (later versions have no attention for CPUs), its Llama 3 of the same width,
depth, heads and number of feed-forward parameters also trains in the bare loop.

A second table has the cost of the outer loop in a step without exchanges, and of a step of each
inner optimizer.
"""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import core
from torchtitan_diloco.base.hardware import GIB, describe_device, peak_flops, peak_memory_bytes
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.components.optimizer import build_optimizer, set_lr
from torchtitan_diloco.components.telemetry import Telemetry
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.parts import OPTIMIZERS
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.distributed.collectives import Asked, PendingSum
from torchtitan_diloco.distributed.world import join_world, leave_world, pick_device
from torchtitan_diloco.models.decoder import Decoder, resolve_shape, shape_of
from torchtitan_diloco.models.interface import flops_per_token, init_weights
from torchtitan_diloco.trainer import Trainer

Batches = Iterator[tuple[Tensor, Tensor]]
ONE_WORKER = {"diloco.workers": "1", "validation.every": "0", "diloco.method": "none"}
OURS = "torchtitan_diloco"
BARE = "bare PyTorch loop"
TITAN = "torchtitan's Llama 3, bare loop"
OUTER_STEPS = 1000
"""Number of calls of the outer loop that are timed together."""
HEADER = "loop | tokens/s | ratio | CPU ms a step | MFU % | peak GiB"
Loop = Callable[[], None]
"""A training step."""


@dataclass
class Result:
    loop: str
    wall: list[float]
    """Mean seconds of a step in each round."""
    cpu: list[float]
    """The same of all threads' CPU time."""
    tokens: int
    """Tokens of a step."""
    mfu_percent: float
    """MFU of our model, or 0 if the peak of the device is not known."""
    peak_bytes: int
    """Peak memory of an accelerator."""


def build_trainer_loop(config: Config) -> tuple[Trainer, Batches, Loop]:
    """Build the step of a run, including its telemetry."""
    link = config.diloco.link
    world = join_world(config.distributed, link, device=config.run.device, workers=1, fsdp=0)
    trainer = Trainer(config, world)
    logger.setLevel("ERROR")
    flops = flops_per_token(trainer.model, config.training.sequence_length)
    parts = world, None, trainer.plan, trainer.outer
    telemetry = Telemetry(config.metrics, *parts, step=0, flops_per_token=flops)
    telemetry.__enter__()  # it writes no files that have to be closed
    trainer.begin()
    batches = telemetry.timed(trainer.data.loader)

    def step() -> None:
        telemetry.measure(lambda: trainer.train_step(batches))
        numbers = telemetry.numbers(agreement_seconds=0.0)
        if trainer.step % config.metrics.log_every == 0:
            sums = PendingSum(world, [*Asked(), *numbers], "in a benchmark")
            telemetry.open_record(trainer.step, trainer.lr, sums)
        telemetry.publish()

    return trainer, batches, step


def bare_loop(model: nn.Module, blocks: nn.Module, trainer: Trainer, batches: Batches) -> Loop:
    config = trainer.config
    device = trainer.world.device
    if config.compile.enable:
        for block in blocks.children():
            block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)

    def step() -> None:
        for _ in range(trainer.plan.accumulation):
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
            (loss / trainer.plan.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_gradient_norm)
        loss.item()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare_pytorch(trainer: Trainer, batches: Batches) -> Loop:
    config = trainer.config
    model = Decoder(resolve_shape(config.model), trainer.vocab_size).to(trainer.world.device)
    init_weights(model, config.run.seed)
    if config.model.document_mask:
        model.end_of_document = trainer.tokenizer.end_of_document
    return bare_loop(model, model.blocks, trainer, batches)


def bare_torchtitan(trainer: Trainer, batches: Batches) -> Loop:
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs

    shape = shape_of(trainer.model)
    matrices = 3 if shape.activation == "swiglu" else 2
    arguments = TransformerModelArgs(
        dim=shape.width,
        n_layers=shape.layers,
        n_heads=shape.heads,
        vocab_size=trainer.vocab_size,
        multiple_of=1,
        # Its three matrices then have as many parameters as our two or three.
        ffn_dim_multiplier=matrices * shape.feed_forward / (8 * shape.width),
        max_seq_len=trainer.config.training.sequence_length,
    )
    model = Transformer(arguments).to(trainer.world.device)
    with torch.no_grad():
        model.init_weights()
    return bare_loop(model, model.layers, trainer, batches)


def titan_loops() -> list[str]:
    """Return the name of torchtitan's loop if the version that it is written for is installed."""
    with suppress(PackageNotFoundError):
        return [TITAN] if version("torchtitan") == "0.2.2" else []
    return []


def run_steps(loop: Loop, steps: int, device: torch.device) -> core.Seconds:
    """Return the mean time of a step."""

    def run() -> None:
        for _ in range(steps):
            loop()

    seconds = core.timed(run, device)
    return core.Seconds(seconds.wall / steps, seconds.cpu / steps)


def measure(names: Sequence[str], settings: core.Settings, rounds: int, steps: int) -> list[Result]:
    """Measure loops in turns."""
    config = core.load(settings | ONE_WORKER)
    trainer, batches, our_loop = build_trainer_loop(config)
    device = trainer.world.device
    builders = {BARE: bare_pytorch, TITAN: bare_torchtitan}
    loops = {name: builders[name](trainer, batches) if name != OURS else our_loop for name in names}
    turns = {name: partial(run_steps, loop, steps, device) for name, loop in loops.items()}
    times_of_loop = core.take_turns(turns, rounds)
    tokens = trainer.plan.tokens_per_step
    peak = peak_flops(device)
    flops = tokens * flops_per_token(trainer.model, config.training.sequence_length)
    memory = peak_memory_bytes(device) if device.type == "cuda" else 0
    results = []
    for name, times in times_of_loop.items():
        wall, cpu = map(list, zip(*times, strict=True))
        mfu = 0.0 if peak is None else 100 * flops / statistics.median(wall) / peak
        results.append(Result(name, wall, cpu, tokens, mfu, memory))
    leave_world(trainer.world)
    return results


def measure_alone(name: str, settings: core.Settings, rounds: int, steps: int) -> Result:
    """Measure a loop in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        (result,) = pool.submit(measure, [name], settings, rounds, steps).result()
    return result


def build_row(result: Result, ours: Result) -> list[str]:
    ratios = [our / other for other, our in zip(result.wall, ours.wall, strict=True)]
    return [
        result.loop,
        core.summary([result.tokens / seconds for seconds in result.wall], ",.0f"),
        core.summary(ratios),
        core.summary(result.cpu, ",.1f", 1e3),
        f"{result.mfu_percent:.1f}" if result.mfu_percent else "-",
        f"{result.peak_bytes / GIB:.2f}" if result.peak_bytes else "-",
    ]


def part_seconds(trainer: Trainer, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of an `outer.step()` between exchanges, and of inner optimizers."""
    config = trainer.config
    device = trainer.world.device
    streaming = replace(config.diloco, method="streaming")
    outer = StreamingDiLoCo(trainer.model, None, streaming, total_steps=trainer.plan.total_steps)

    def between_exchanges() -> None:
        for _ in range(OUTER_STEPS):
            outer.loop.step = 0  # nothing is sent after the first step
            outer.step()

    name = f"outer loop between exchanges, H = {streaming.sync_every}"
    seconds_of_part = {
        name: [core.timed(between_exchanges).wall / OUTER_STEPS for _ in range(rounds)]
    }
    outer.close()
    steps = {}
    for name in OPTIMIZERS:
        inner = replace(config.optimizer, name=name)
        optimizer = build_optimizer(trainer.model, inner, trainer.plan.total_steps)
        set_lr(optimizer, 0.0)
        steps[name] = partial(core.timed, optimizer.step, device)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for name, times in core.take_turns(steps, rounds).items():
        seconds_of_part[name] = [seconds.wall for seconds in times]
    return seconds_of_part


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--rounds", type=core.positive, default=7)
    parser.add_argument("--steps", type=core.positive, default=10, help="of each loop in a round")
    options, words = parser.parse_known_args()
    settings = core.parse_settings(parser, words)
    counts = (options.rounds, options.steps)
    config = core.load(settings | ONE_WORKER)
    device = pick_device(config.run.device, 0)
    names = [OURS, BARE, *titan_loops()]
    if device.type == "cuda":
        results = [measure_alone(name, settings, *counts) for name in names]
    else:
        results = measure(names, settings, *counts)
    trainer = build_trainer_loop(config)[0]
    ours = results[0]
    parts = part_seconds(trainer, options.rounds)
    leave_world(trainer.world)

    compiled = "compiled" if config.compile.enable else "not compiled"
    title = (
        f"{config.model.flavor}, {ours.tokens:,} tokens a step, {compiled}; "
        f"{describe_device(device)}; torch {torch.__version__}; n = {options.rounds} rounds of "
        f"{options.steps} steps; median (min ... max)\n"
        f"ratio: time of {OURS} / time of this loop, per round; above 1 this loop is faster"
    )
    core.print_table(title, HEADER, [build_row(result, ours) for result in results])
    rows = [[name, core.summary(times, ".4f", 1e3)] for name, times in parts.items()]
    core.print_table(f"parts of a step; n = {options.rounds}", "part | milliseconds", rows)


if __name__ == "__main__":
    main()
