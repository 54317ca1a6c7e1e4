"""Compare the modes of activation checkpointing: memory, and the time of a pass.

    .venv/bin/python -m benchmarks.activations [--rounds 5] [--section.key value ...]

Kept: bytes that a forward pass leaves allocated for the backward pass; on a CPU the profiler of
torch counts them. Peak: of both passes, above what was there before, on a GPU only. Products: FLOPs
of the matrix products in both passes, as a share of those without checkpointing. The modes run in
turns in one process, each on a model of its own with the same weights.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import core
from torchtitan_diloco.base.hardware import GIB, describe_device
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.schema import ActivationCheckpoint, Compile, Parallel
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.distributed.world import pick_device
from torchtitan_diloco.models import build_model, vocabulary_rows
from torchtitan_diloco.models.parallelize import compute_dtype, materialize, parallelize

MODES = {
    "none": ActivationCheckpoint("none"),
    "every_nth, every = 2": ActivationCheckpoint("every_nth", 2),
    "selective, every = 4": ActivationCheckpoint("selective", 4),
    "selective, every = 2": ActivationCheckpoint("selective", 2),
    "selective, every = 1": ActivationCheckpoint("selective", 1),
    "full": ActivationCheckpoint("full"),
}
HEADER = "mode | kept MiB | peak GiB | products | seconds | time against none"
MIB = 2**20
RESERVED = ("activation_checkpoint.mode", "activation_checkpoint.every")
Forward = Callable[[], Tensor]
"""A forward pass, which returns what to start the backward pass with."""


class Memory(NamedTuple):
    kept: int
    """Bytes between the passes."""
    peak: int
    """Bytes, 0 if they are not known."""
    product_flops: int


def build_forward(config: Config, mode: ActivationCheckpoint, device: torch.device) -> Forward:
    """Build a model, and return its forward pass over one batch of random tokens."""
    training = config.training
    tokenizer = build_tokenizer(config.data.tokenizer)
    rows = vocabulary_rows(config.model, tokenizer.vocab_size)
    length = training.sequence_length
    model = build_model(config.model, rows, length, end_of_document=tokenizer.end_of_document)
    parallelize(
        model,
        None,
        parallel=Parallel(),
        activation_checkpoint=mode,
        compile=Compile(),
        compute_dtype=torch.float32,
    )
    materialize(model, device, config.run.seed)
    model.to(compute_dtype(config.parallel.compute_dtype, device))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, rows, (training.batch_size, length + 1), generator=generator)
    return partial(objective, model, tokens.to(device))


def objective(model: nn.Module, tokens: Tensor) -> Tensor:
    sums = model(tokens[:, :-1], head=loss_head(tokens[:, 1:], z_loss=0.0))
    total: Tensor = sums.objective
    return total


def memory_of(forward: Forward, device: torch.device) -> Memory:
    """Return what both passes take, after a first time that allocates the gradients."""
    forward().backward()
    with FlopCounterMode(display=False) as counter:
        forward().backward()
    flops = sum(
        flops_of_kind for name, flops_of_kind in operations(counter).items() if "mm" in name
    )
    gc.collect()
    if device.type != "cuda":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss = forward()  # held until its events are read
        events = profiler.key_averages()
        return Memory(sum(event.self_cpu_memory_usage for event in events), 0, flops)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    loss = forward()
    kept_bytes = torch.cuda.memory_allocated(device) - before
    loss.backward()
    return Memory(kept_bytes, torch.cuda.max_memory_allocated(device) - before, flops)


def operations(counter: FlopCounterMode) -> dict[str, int]:
    """Return the FLOPs of each kind of operation."""
    return {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--rounds", type=core.positive, default=5)
    options, words = parser.parse_known_args()
    config = core.load(core.parse_settings(parser, words, RESERVED))
    device = pick_device(config.run.device, 0)
    forwards = {name: build_forward(config, mode, device) for name, mode in MODES.items()}
    memory = {name: memory_of(forward, device) for name, forward in forwards.items()}

    def run_both_passes(forward: Forward) -> None:
        forward().backward()

    turns = {
        name: partial(core.timed, partial(run_both_passes, forward), device)
        for name, forward in forwards.items()
    }
    seconds = {
        name: [duration.wall for duration in times]
        for name, times in core.take_turns(turns, options.rounds).items()
    }
    rows = []
    for name, memory_of_mode in memory.items():
        ratios = [
            mode / without for mode, without in zip(seconds[name], seconds["none"], strict=True)
        ]
        rows.append(
            [
                name,
                f"{memory_of_mode.kept / MIB:,.1f}",
                f"{memory_of_mode.peak / GIB:.2f}" if memory_of_mode.peak else "-",
                f"{100 * memory_of_mode.product_flops / memory['none'].product_flops:.0f} %",
                core.summary(seconds[name], ".3f"),
                core.summary(ratios),
            ]
        )
    shape = f"{config.training.batch_size} x {config.training.sequence_length} tokens"
    title = (
        f"{config.model.flavor}, {shape}; {describe_device(device)}; torch {torch.__version__}; "
        f"n = {options.rounds}; median (min ... max)"
    )
    core.print_table(title, HEADER, rows)


if __name__ == "__main__":
    main()
