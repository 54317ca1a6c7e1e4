"""What each of the two processes of `benchmarks.sync` does: one sync after the other, a flat all-reduce before each."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import link
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco import (
    DiLoCoConfig,
    Fragments,
    OuterOptimizer,
    Overlap,
    StreamingDiLoCo,
)
from torchtitan_diloco.diloco.config import Link, Quantization
from torchtitan_diloco.distributed.world import WORKER, World, join_world

WORKERS = 2
WIDTH = 256
TIMEOUT = 600


@dataclass(frozen=True)
class Case:
    """A cycle has one window of delay + 1 steps for every fragment: one sync begins and ends in each."""

    megabytes: float
    fragments: int
    delay: int
    codec: str
    rounds: int
    inner_seconds: float

    @property
    def sync_every(self) -> int:
        return self.fragments * (self.delay + 1)

    @property
    def mixing(self) -> float:
        return 0.5 if self.delay else 0.0

    @property
    def config(self) -> DiLoCoConfig:
        return DiLoCoConfig(
            sync_every=self.sync_every,
            fragments=Fragments(pattern="explicit", modules=tuple(fragment_names(self))),
            overlap=Overlap(delay=self.delay, mixing=self.mixing),
            outer_optimizer=OuterOptimizer(name="nesterov", lr=0.7, momentum=0.9),
            quantization=Quantization(codec=self.codec),  # type: ignore[arg-type]
        )


@dataclass
class Sync:
    """One sync on one worker: seconds of the training thread, seconds of all threads' CPU time, bytes."""

    floor: float
    floor_cpu: float
    exposed: float
    cpu: float
    on_the_wire: int
    """Of both workers; 0 where other programs share the interface."""
    sent: int = 0


Measured = tuple[list[Sync], float]
"""The syncs, and by how many MB the peak memory rose over that of the same loop without them."""


# --- the model: parameters with the shapes of a decoder, and nothing to compute -------------------------------------


def block_count(megabytes: float) -> int:
    return max(1, round(megabytes * 1e6 / 8 / (16 * WIDTH**2)))


def build_model(megabytes: float) -> nn.ModuleDict:
    """Half of the values in blocks, the rest in an embedding and a head."""

    def block() -> nn.Module:
        shapes = {
            "norm": (WIDTH,),
            "qkv": (3 * WIDTH, WIDTH),
            "out": (WIDTH, WIDTH),
            "up": (8 * WIDTH, WIDTH),
        }
        shapes["down"] = (WIDTH, 4 * WIDTH)
        return nn.ParameterDict(
            {name: nn.Parameter(torch.randn(shape) * 0.02) for name, shape in shapes.items()}
        )

    blocks = nn.ModuleList(block() for _ in range(block_count(megabytes)))
    left = round(megabytes * 1e6 / 4) - sum(parameter.numel() for parameter in blocks.parameters())
    rows = max(1, left // WIDTH // 2)
    model = nn.ModuleDict({"blocks": blocks})
    model["embedding"] = nn.Embedding(rows, WIDTH)
    model["head"] = nn.Linear(WIDTH, rows, bias=False)
    return model


def fragment_names(case: Case) -> list[tuple[str, ...]]:
    """The modules of each fragment: what is outside the blocks is the last one, of about half the bytes."""
    blocks, rest = (
        [f"blocks.{number}" for number in range(block_count(case.megabytes))],
        ("embedding", "head"),
    )
    if case.fragments == 1:
        return [(*blocks, *rest)]
    if case.fragments - 1 > len(blocks):
        raise ValueError(
            f"--fragments {case.fragments} is more than the {len(blocks)} blocks of this model and the rest"
        )
    return [
        *(tuple(blocks[first :: case.fragments - 1]) for first in range(case.fragments - 1)),
        rest,
    ]


@torch.no_grad()
def inner_step(model: nn.Module, worker: int) -> None:
    """Moves the parameters apart, as training on different data does."""
    for parameter in model.parameters():
        parameter.mul_(0.999 - 0.0001 * worker)


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(case: Case) -> Measured:
    """StreamingDiLoCo."""
    world, model, plain = start(case)
    outer = StreamingDiLoCo(model, world.group(WORKER), case.config)
    for _ in range(case.sync_every - 1):  # the first cycle sends nothing
        outer.step()

    def sent() -> int:
        metrics = outer.metrics()
        assert metrics["diloco/fragments_applied"] == 1, "one sync begins and ends in a window"
        return int(metrics["diloco/sent_bytes"])

    sizes = [fragment.parameters for fragment in outer.fragments]
    return measure_syncs(case, world, model, sizes, outer.step, sent), peak_megabytes() - plain


def start(case: Case) -> tuple[World, nn.ModuleDict, float]:
    """The process, its model, and the peak of its memory in MB after steps without an outer loop."""
    world = join_world(
        Distributed(), Link(timeout_seconds=TIMEOUT), device="cpu", workers=WORKERS, fsdp=0
    )
    model = build_model(case.megabytes)
    floor = torch.ones(round(case.megabytes * 1e6 / 4 / case.fragments))
    for _ in range(3):
        inner_step(model, world.worker)
        one_all_reduce(floor)
    del floor
    return world, model, peak_megabytes()


def measure_syncs(
    case: Case,
    world: World,
    model: nn.Module,
    sizes: list[int],
    step: Callable[[], None],
    sent: Callable[[], int],
) -> list[Sync]:
    """`sizes`: values in each fragment; `step`: what follows an inner step; `sent`: bytes since the last call."""
    measured = []
    floor = torch.ones(max(sizes))
    for number in range((case.rounds + 1) * case.fragments):
        inner_step(model, world.worker)
        floor_seconds, floor_cpu = one_all_reduce(floor[: sizes[number % case.fragments]])
        exposed, cpu, wire = one_window(step, case)
        sync = Sync(floor_seconds, floor_cpu, exposed, cpu, wire, sent())
        if number >= case.fragments:  # the first round touches every buffer for the first time
            measured.append(sync)
    return measured


def one_all_reduce(values: Tensor) -> tuple[float, float]:
    dist.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    dist.all_reduce(values)
    return time.perf_counter() - started, time.process_time() - cpu


def one_window(step: Callable[[], None], case: Case) -> tuple[float, float, int]:
    """Seconds exposed, CPU seconds, bytes on the wire."""
    dist.barrier()
    wire = link.bytes_on_the_wire() if link.in_own_network() else 0
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
    return exposed, cpu, link.bytes_on_the_wire() - wire if link.in_own_network() else 0


def peak_megabytes() -> float:
    """The kernel's mark of this program's largest resident set (getrusage's also remembers the parent's)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024 / 1e6
