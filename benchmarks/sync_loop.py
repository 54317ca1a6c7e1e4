"""Measured loop of `benchmarks.sync`: in each process one sync after the other, each preceded by a
flat all-reduce."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.network import loopback_bytes
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
from torchtitan_diloco.distributed.world import WORKER, World, join_world

WORKERS = 2
WIDTH = 256
TIMEOUT = 600
SMALLEST = 8
"""MB of one block, an embedding and a head."""


@dataclass(frozen=True)
class Case:
    megabytes: float
    fragments: int
    delay: int
    codec: str
    rounds: int
    inner_seconds: float
    measured: bool = False
    """Measure norms, cosines and drift in all rounds; otherwise in none."""

    @property
    def config(self) -> DiLoCoConfig:
        """A cycle has `delay` + 1 steps for each fragment, in which one sync begins and ends."""
        strides = self.fragments - 1  # of the blocks; the last fragment is the rest
        layers = block_count(self.megabytes) // strides if strides else 0
        return DiLoCoConfig(
            sync_every=self.fragments * (self.delay + 1),
            measure_every=int(self.measured),
            fragments=Fragments(layers_per_fragment=layers),
            overlap=Overlap(delay=self.delay, mixing=0.5 if self.delay else 0.0),
            outer_optimizer=OuterOptimizer(name="nesterov", lr=0.7, momentum=0.9),
            quantization=Quantization(codec=self.codec),  # type: ignore[arg-type]
        )


@dataclass
class Sync:
    """One sync of one worker, in seconds and bytes. CPU seconds are those of all its threads."""

    all_reduce: float
    all_reduce_cpu: float
    exposed: float
    cpu: float
    on_the_wire: int
    """Of both workers; 0 if other programs share the interface."""
    sent: int


Measured = tuple[list[Sync], float]
"""The syncs, and the MB by which the peak memory exceeds that of the same loop without syncs."""


# --- the model: parameters in the shapes of a decoder, without computation ------------------------


def block_count(megabytes: float) -> int:
    return max(1, round(megabytes * 1e6 / 8 / (16 * WIDTH**2)))


def build_model(megabytes: float) -> nn.ModuleDict:
    """Build a model with half of its values in blocks, the rest in an embedding and a head."""
    shapes = {
        "norm": (WIDTH,),
        "qkv": (3 * WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (8 * WIDTH, WIDTH),
        "down": (WIDTH, 4 * WIDTH),
    }
    blocks = nn.ModuleList(
        nn.ParameterDict({name: 0.02 * torch.randn(shape) for name, shape in shapes.items()})
        for _ in range(block_count(megabytes))
    )
    left = round(megabytes * 1e6 / 4) - sum(parameter.numel() for parameter in blocks.parameters())
    rows = max(1, left // WIDTH // 2)
    embedding, head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, rows, bias=False)
    return nn.ModuleDict({"blocks": blocks, "embedding": embedding, "head": head})


@torch.no_grad()
def inner_step(model: nn.Module, worker: int) -> None:
    """Move the parameters of the workers apart, as training on different data does."""
    for parameter in model.parameters():
        parameter.mul_(0.999 - 0.0001 * worker)


# --- measuring ------------------------------------------------------------------------------------


def measure(case: Case) -> Measured:
    """Measure StreamingDiLoCo on this rank."""
    world, model, plain = start(case)
    outer = StreamingDiLoCo(model, world.group(WORKER), case.config)
    for _ in range(case.config.sync_every - 1):  # nothing is sent in the first cycle
        outer.step()

    def sent() -> int:
        metrics = outer.metrics()
        assert metrics["diloco/fragments_applied"] == 1, "one sync begins and ends in a window"
        return int(metrics["diloco/sent_bytes"])

    sizes = [fragment.parameters for fragment in outer.fragments]
    return measure_syncs(case, world, model, sizes, outer.step, sent), peak_megabytes() - plain


def start(case: Case) -> tuple[World, nn.ModuleDict, float]:
    """Join the others; return the model and the peak memory in MB of steps without syncs."""
    link = Link(timeout_seconds=TIMEOUT)
    world = join_world(Distributed(), link, device="cpu", workers=WORKERS, fsdp=0)
    model = build_model(case.megabytes)
    values = torch.ones(round(case.megabytes * 1e6 / 4 / case.fragments))
    for _ in range(3):
        inner_step(model, world.worker)
        time_all_reduce(values)
    return world, model, peak_megabytes()


def measure_syncs(
    case: Case,
    world: World,
    model: nn.Module,
    sizes: list[int],
    step: Callable[[], None],
    sent: Callable[[], int] = lambda: 0,
) -> list[Sync]:
    """Measure a sync of each fragment in each round.

    Args:
        sizes: values in each fragment.
        step: what follows an inner step.
        sent: returns the bytes sent since the last call.
    """
    measured = []
    values = torch.ones(max(sizes))
    for number in range((case.rounds + 1) * case.fragments):
        inner_step(model, world.worker)
        floor = time_all_reduce(values[: sizes[number % case.fragments]])
        exposed, cpu, wire = time_window(step, case)
        sync = Sync(*floor, exposed, cpu, wire, sent())
        if number >= case.fragments:  # the first round touches all buffers for the first time
            measured.append(sync)
    return measured


def time_all_reduce(values: Tensor) -> tuple[float, float]:
    """Return seconds and CPU seconds."""
    dist.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    dist.all_reduce(values)
    return time.perf_counter() - started, time.process_time() - cpu


def time_window(step: Callable[[], None], case: Case) -> tuple[float, float, int]:
    """Return exposed seconds, CPU seconds and bytes on the wire of one sync."""
    dist.barrier()
    wire = loopback_bytes()
    dist.barrier()
    exposed, cpu = 0.0, time.process_time()
    for number in range(case.delay + 1):
        if number:
            time.sleep(case.inner_seconds)
        started = time.perf_counter()
        step()
        exposed += time.perf_counter() - started
    cpu = time.process_time() - cpu
    dist.barrier()
    return exposed, cpu, loopback_bytes() - wire


def peak_megabytes() -> float:
    """Return the peak of this program's resident memory. getrusage would include its parent's."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024 / 1e6
