"""Settings of the outer loop: the `[diloco]` section, its checks, and advice."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from msgspec import Meta

from torchtitan_diloco.base.registry import OneOf
from torchtitan_diloco.base.settings import (
    Fraction,
    Length,
    Mistakes,
    NotNegative,
    Positive,
    Seconds,
    Section,
    Workers,
    steps_of,
)
from torchtitan_diloco.diloco.formats import FORMATS, NAME_BYTES, Format, island_formats
from torchtitan_diloco.diloco.outer_optimizers import OUTER_OPTIMIZERS, OuterRule

MOST_STREAMS = 32
STREAM_BYTES = 3_000_000
"""Bytes that a TCP stream carries in a round trip: its window, which Linux limits by default.
Setting buffers by hand would switch off the kernel's own tuning of it."""


@dataclass(frozen=True)
class Fragments(Section):
    """Partition of the model into fragments, which synchronize in turn."""

    pattern: Literal["strided", "sequential"] = "strided"
    """Blocks of each of P fragments. `strided`: fragment p holds blocks p, p + P, p + 2P, ...
    `sequential`: consecutive blocks."""
    layers_per_fragment: NotNegative = 3
    """Blocks per fragment. Parameters outside the blocks (embedding, head, final norm) form a
    separate fragment. 0: the whole model is one fragment (DiLoCo without streaming)."""
    blocks: str = ""
    """Name of the module that contains the blocks. Empty: the longest ModuleList."""


@dataclass(frozen=True)
class OuterOptimizer(Section):
    """Outer optimizer, which applies the workers' mean change to the shared parameters."""

    name: Annotated[str, OneOf(OUTER_OPTIMIZERS)] = "nesterov"
    """Update rule. `sgd` with lr 1 is plain averaging (FedAvg, Local SGD)."""
    lr: Annotated[float, Meta(gt=0, le=100)] = 0.4
    """Outer learning rate."""
    warmup: Length = 0
    """Length of the linear warm-up of the outer learning rate, in steps, or as a share of the run
    if below 1. It begins with the run, or after `diloco.beginning`. 0: none."""
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay rate of the momentum, or of the first moment of `adam`. Not for `sgd`."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    """Decay rate of the second moment of `adam`."""
    epsilon: Annotated[float, Meta(gt=0)] = 0.1
    """Term that `adam` adds to the root of the second moment. The paper needs a large one."""

    @property
    def rule(self) -> OuterRule:
        return OUTER_OPTIMIZERS[self.name]

    def in_steps(self, total_steps: int) -> "OuterOptimizer":
        """Return the same outer optimizer with its warm-up in steps, for a run of `total_steps`
        steps."""
        return replace(self, warmup=steps_of(self.warmup, total_steps))

    def lr_after(self, done: float) -> float:
        """Return the learning rate for deltas that are taken after `done` steps of training with
        this optimizer. On islands, `done` and `warmup` are tokens."""
        if not self.warmup:
            return self.lr
        return self.lr * min(1.0, max(0.0, done) / self.warmup)


@dataclass(frozen=True)
class Overlap(Section):
    """Overlap of training and communication."""

    delay: NotNegative = 1
    """Inner steps between sending a fragment and applying the result (tau). 0: wait for the result
    immediately."""
    mixing: Fraction = 0.5
    """Weight of the local parameters when a result is applied (alpha). 0: take the shared
    parameters. 1: keep the local ones."""
    mixing_end: Fraction | None = None
    """Weight at the end of the run; it changes linearly from `mixing`. Not set: constant."""

    def mixing_at(self, progress: float) -> float:
        """Return alpha after this share of the run, from 0 to 1."""
        end = self.mixing if self.mixing_end is None else self.mixing_end
        return self.mixing + (end - self.mixing) * min(1.0, progress)


@dataclass(frozen=True)
class Beginning(Section):
    """First steps of a run, in which workers diverge most easily."""

    length: Length = 0
    """Length of the initial phase, in steps, or as a share of the run if below 1. In this phase,
    fragments are exchanged more often, training waits for them, and they are plainly averaged. 0:
    none."""
    sync_every: Positive = 2
    """Inner steps between two exchanges of the same fragment in the initial phase."""

    def in_steps(self, total_steps: int) -> "Beginning":
        """Return the same beginning with its length in steps, for a run of `total_steps` steps."""
        return replace(self, length=steps_of(self.length, total_steps))


@dataclass(frozen=True)
class Quantization(Section):
    """Format of the fragments on the wire. Sums are always computed in fp32."""

    codec: Annotated[str, OneOf(FORMATS)] = "fp32"
    """Format of the deltas that workers send, and of the means that come back
    (docs/algorithm.md). The paper uses `fp4_e3m0`. `topk` sends only the largest values; the others
    stay in the worker's parameters until they are large enough. `topk` needs the outer `sgd`
    with lr 1, ignores `mixing` below 1, and takes 4 bytes more per parameter."""
    block_size: Positive = 64
    """Values that share one 8-bit scale: 16, 32, 64, 128, 256, 512 or 1024. Only for formats of 4
    and 8 bits."""
    top_values: Positive = 16
    """How many of every 1,024 values `topk` sends, an even number up to 256."""

    @property
    def format(self) -> Format:
        return FORMATS[self.codec]


@dataclass(frozen=True)
class Link(Section):
    """Communication between workers."""

    interface: str = ""
    """Network interface between workers, such as `eth0`. Empty: gloo chooses one."""
    streams: Annotated[int, Meta(ge=1, le=MOST_STREAMS)] = 8
    """TCP streams between two workers, which the ranks of a machine share, or from an island to the
    store. A long link needs several; within one machine there is one. `doctor` measures how many
    a link needs."""
    timeout_seconds: Seconds = 600
    """Seconds that a transfer may take before the run ends on all workers. A worker that dies ends
    it at once; a silent one is reported after 10 seconds."""
    drop_probability: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Probability that a worker is left out of a round and keeps its own parameters, to study lossy
    links."""
    outer_state: Literal["auto", "cpu", "device"] = "auto"
    """Memory for the shared parameters and the outer momentum. `cpu`: host memory, pinned if there
    is a GPU, which still does the encoding. `device`: GPU memory; only encoded bytes pass through
    the host. `auto`: `device` if this takes at most a fifth of the GPU's memory."""

    def streams_of_rank(self, ranks: int) -> int:
        """Return the TCP streams of each of the ranks that share them, of which it has at least
        one."""
        return math.ceil(self.streams / ranks)


@dataclass(frozen=True)
class DiLoCoConfig(Section):
    """Synchronization between workers."""

    method: Literal["streaming", "none"] = "streaming"
    """`streaming`: workers train independently and exchange fragments (Streaming DiLoCo; DiLoCo
    and Local SGD are special cases). `none`: data parallelism, which averages gradients over all
    workers in every step (HSDP)."""
    workers: Workers = 1
    """Number of workers. A worker is a group of devices with fast links between them."""
    sync_every: Positive = 100
    """Inner steps between two exchanges of the same fragment (H)."""
    measure_every: NotNegative = 10
    """Outer rounds of a fragment between two measurements of norms, cosines and drift. 0: never."""
    delta_norm_limit: Annotated[float, Meta(ge=0)] = 20.0
    """Largest norm of a worker's delta of a fragment, as a multiple of the median of its latest 32.
    A worker that exceeds it is left out of the round and takes the shared parameters, unless all
    workers exceed it. 0: no limit."""
    fragments: Fragments = field(default_factory=Fragments)
    outer_optimizer: OuterOptimizer = field(default_factory=OuterOptimizer)
    overlap: Overlap = field(default_factory=Overlap)
    beginning: Beginning = field(default_factory=Beginning)
    quantization: Quantization = field(default_factory=Quantization)
    link: Link = field(default_factory=Link)

    def in_steps(self, total_steps: int, step_at: Callable[[float], int] = int) -> "DiLoCoConfig":
        """Return the same settings with all lengths in steps, for a run of `total_steps` steps.

        `step_at`: returns the step with a place in these steps, if those of the run have other
        sizes. It is used for a beginning that is a share of the run.
        """
        beginning = self.beginning.in_steps(total_steps)
        if 0 < self.beginning.length < 1:
            beginning = replace(beginning, length=step_at(beginning.length))
        return replace(
            self,
            beginning=beginning,
            outer_optimizer=self.outer_optimizer.in_steps(total_steps),
        )


MAY_DIFFER = {"diloco.link.interface"}
"""Settings that may differ between the workers of one job."""
BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Allowed block sizes: divisors of `codecs.UNIT`."""
MOST_TOP_VALUES = 256
NOT_WITH_ISLANDS: dict[str, Callable[[DiLoCoConfig], bool]] = {
    "diloco.method": lambda diloco: diloco.method == "none",
    "diloco.beginning.length": lambda diloco: diloco.beginning.length > 0,
    "diloco.link.drop_probability": lambda diloco: diloco.link.drop_probability > 0,
}
"""Settings that islands do not have, and whether they are set."""
FEW_ROUNDS = 100
"""With fewer outer rounds, the loss stays behind that of data parallelism."""


def diloco_mistakes(diloco: DiLoCoConfig, *, islands: bool = False) -> Mistakes:
    """Check settings that depend on each other. `islands`: whether workers are islands."""
    every = diloco.sync_every
    first = diloco.beginning
    if diloco.overlap.delay >= every:
        reason = f"must be smaller than diloco.sync_every = {every}; 0 waits for each exchange"
        yield "diloco.overlap.delay", reason
    if first.length and first.sync_every > every:
        reason = f"must not be larger than diloco.sync_every = {every}, which comes after it"
        yield "diloco.beginning.sync_every", reason
    if not first.length and first.sync_every != Beginning.sync_every:
        reason = "is only used with diloco.beginning.length: set that too"
        yield "diloco.beginning.sync_every", reason
    if 0 < diloco.delta_norm_limit <= 1:
        yield "diloco.delta_norm_limit", "must be above 1, or 0 for no limit"
    yield from _quantization_mistakes(diloco.quantization)
    is_sparse = diloco.quantization.format.is_sparse
    if islands and diloco.quantization.codec not in island_formats():
        why = "it is sparse" if is_sparse else f"its name has more than {NAME_BYTES} bytes"
        yield "diloco.quantization.codec", f"does not work with islands, as {why}: use fp4_e3m0"
    elif is_sparse:
        yield from _sparse_mistakes(diloco)
    for key, is_set in NOT_WITH_ISLANDS.items():
        if islands and is_set(diloco):
            yield key, "does not work with islands: remove it"


def _sparse_mistakes(diloco: DiLoCoConfig) -> Mistakes:
    outer = diloco.outer_optimizer
    chosen = f'codec = "{diloco.quantization.codec}"'
    if outer.name != "sgd":
        reason = f'must be "sgd", with lr = 1, for {chosen}: momentum would move values that '
        yield "diloco.outer_optimizer.name", reason + "no worker has sent"
    elif outer.lr != 1:
        reason = f"must be 1 for {chosen}: the mean replaces what a worker has sent, so with "
        yield "diloco.outer_optimizer.lr", reason + "another rate a part of it would be lost"
    elif outer.warmup:
        reason = f"must be 0 for {chosen}: with a smaller learning rate, a part of what a worker "
        yield "diloco.outer_optimizer.warmup", reason + "has sent would be lost; remove it"
    for name in ("mixing", "mixing_end"):
        if getattr(diloco.overlap, name) == 1:
            reason = f"must be below 1 for {chosen}, which ignores smaller values: at 1, workers "
            yield f"diloco.overlap.{name}", reason + "never apply what others have sent; remove it"


def _quantization_mistakes(chosen: Quantization) -> Mistakes:
    unused = [
        name
        for name in ("block_size", "top_values")
        if getattr(chosen, name) != getattr(Quantization, name) and name not in chosen.format.reads
    ]
    for name in unused:
        readers = [codec for codec, form in FORMATS.items() if name in form.reads]
        reason = f"is only used with codec = {' or '.join(readers)}: remove it"
        yield f"diloco.quantization.{name}", reason
    size = chosen.block_size
    if size not in BLOCK_SIZES and "block_size" not in unused:
        nearest = min(BLOCK_SIZES, key=lambda allowed: abs(allowed - size))
        reason = f"must be one of {', '.join(map(str, BLOCK_SIZES))}: use {nearest}"
        yield "diloco.quantization.block_size", reason
    top = chosen.top_values
    if (top % 2 or top > MOST_TOP_VALUES) and "top_values" not in unused:
        reason = f"must be even and at most {MOST_TOP_VALUES}"
        yield "diloco.quantization.top_values", reason


def advice(config: DiLoCoConfig, total_steps: int) -> list[str]:
    """Return warnings about valid settings that train badly (benchmarks/records/loss.md)."""
    if config.method == "none":
        return []
    warnings = list[str]()
    outer = config.outer_optimizer
    every = config.sync_every
    rounds = total_steps // every
    beginning = steps_of(config.beginning.length, total_steps)
    several = config.workers > 1
    if 0 < total_steps <= beginning:
        warnings.append(
            f"diloco.beginning has {beginning} steps, at least as many as the run "
            f"with {total_steps}, so the outer optimizer and the overlap are never "
            "used: shorten it"
        )
    elif several and rounds == 0 and not beginning:
        warnings.append(
            f"diloco.sync_every = {every} is longer than the run of {total_steps} "
            "steps, so the workers never exchange anything: lower it"
        )
    elif several and rounds < FEW_ROUNDS:
        warnings.append(
            f"the run has {rounds} outer rounds ({total_steps} steps / "
            f"diloco.sync_every = {every}); with fewer than about {FEW_ROUNDS}, "
            "the loss stays behind data parallelism: lower diloco.sync_every, or "
            "train longer"
        )
    warmup = steps_of(outer.warmup, total_steps)
    if warmup > total_steps - beginning > 0:
        warnings.append(
            f"diloco.outer_optimizer.warmup has {warmup} steps, more than the "
            f"{total_steps - beginning} of the run after its beginning, so the outer learning rate "
            "is never reached: shorten it"
        )
    step_size = outer.lr
    if outer.rule.accumulates:
        step_size = outer.lr / (1 - outer.momentum)
    if every <= 10 and config.overlap.mixing < 0.25 and step_size > 5:
        warnings.append(
            f"diloco.outer_optimizer.lr = {outer.lr:g} with momentum {outer.momentum:g}, "
            f"diloco.sync_every = {every} and diloco.overlap.mixing = {config.overlap.mixing:g} "
            "is known to be unstable: set mixing to 0.5, or lower the outer lr"
        )
    return warnings
