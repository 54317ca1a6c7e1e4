"""Settings of the outer loop: the `[diloco]` section, its checks, and advice."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, ValidationError, convert

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True)
class Fragments:
    """How the model is cut into fragments, which take turns."""

    pattern: Literal["strided", "sequential", "balanced", "explicit"] = "strided"
    """`strided`: fragment p holds blocks p, p + P, p + 2P ...; `sequential`: consecutive blocks;
    `balanced`: blocks and rows of large matrices packed so that all fragments have about the same
    bytes; `explicit`: see `modules`."""
    layers_per_fragment: NotNegative = 3
    """Blocks in one fragment; what is outside the blocks (embedding, head, final norm) is a
    fragment of its own. 0: the whole model is one fragment, which is DiLoCo without streaming."""
    blocks: str = ""
    """Name of the module that holds the blocks. Empty: the longest ModuleList."""
    modules: tuple[tuple[str, ...], ...] = ()
    """With `explicit`: for each fragment the names of its modules or parameters."""


@dataclass(frozen=True)
class OuterOptimizer:
    """Optimizer that turns the mean delta of the workers into the next shared parameters."""

    name: Literal["nesterov", "momentum", "sgd", "adam", "sign_momentum"] = "nesterov"
    """`sgd` with lr 1 is plain averaging (FedAvg, Local SGD); `sign_momentum` moves by the sign of
    the momentum."""
    lr: Annotated[float, Meta(gt=0)] = 0.4
    """Peak outer learning rate."""
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay of the momentum; of the first moment with `adam`."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    """Decay of the second moment with `adam`."""
    epsilon: Annotated[float, Meta(gt=0)] = 1e-8
    """Added to the root of the second moment with `adam`."""
    warmup_rounds: NotNegative = 0
    """Outer rounds of linear warm-up."""
    decay: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the outer learning rate after the warm-up."""
    decay_rounds: NotNegative = 0
    """Outer rounds after which `cosine` and `linear` have reached the floor, warm-up included."""
    floor: Fraction = 0.0
    """Outer learning rate at the end of the decay, as a share of the peak."""


@dataclass(frozen=True)
class Overlap:
    """How long training goes on while a fragment is in flight, and what happens when it is back."""

    delay: NotNegative = 1
    """Steps between sending a fragment and applying what came back (tau). 0 waits for it at
    once."""
    mixing: Fraction = 0.5
    """Share of the local parameters when a fragment is applied (alpha): 0 takes the shared ones, 1
    keeps the local."""


CodecName = Literal[
    "fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "fp4_e2m1", "fp4_e3m0", "ternary"
]


@dataclass(frozen=True)
class Quantization:
    """Format of a fragment on the wire. Sums are always fp32."""

    codec: CodecName = "fp32"
    """Format of what every worker sends of its own. `fp4_e3m0` is the paper's; docs/wire-formats.md
    defines all of them."""
    gather_codec: Literal["same", CodecName] = "same"
    """Format of the means that go back to all when there are more than two workers. `same`: that of
    `codec`."""
    block_size: Positive = 64
    """Values that share a scale, in the formats of 8 bits and fewer: 16, 32, 64, 128, 256, 512 or
    1024. A scale is 8 bits."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """`stochastic` rounds up or down by chance, so that the mean of many is right; runs with the
    same seed draw the same numbers."""
    error_feedback: bool = False
    """Each worker adds what was lost in encoding a fragment to what it sends next time. Costs 4
    bytes a parameter."""
    threads: Positive = 1
    """CPU threads that encode and decode. More of them take cores from training. Outer state on a
    GPU is encoded there."""


@dataclass(frozen=True)
class Link:
    """The links between workers."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Transport of the group between workers: `auto` is NCCL where every process has a GPU of its
    own, else gloo."""
    interface: str = ""
    """Network interface that gloo and NCCL use, such as `eth0`. Empty: what they find."""
    timeout_seconds: Positive = 600
    """A worker that is silent for longer ends the run on all workers."""
    drop_probability: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Chance that a worker is left out of the mean of a round, to study lossy links: it keeps its
    own parameters."""
    outer_state: Literal["auto", "cpu", "device"] = "auto"
    """Where shared parameters and outer momentum live: host memory (pinned under CUDA) or the
    accelerator's. `auto` is host memory with gloo, the accelerator's with NCCL."""


@dataclass(frozen=True)
class DiLoCoConfig:
    """How workers are kept together."""

    method: Literal["streaming", "none"] = "streaming"
    """`streaming`: workers train on their own and exchange fragments (Streaming DiLoCo; DiLoCo and
    Local SGD are settings of it). `none`: data parallelism, gradients are averaged over all workers
    at every step (HSDP)."""
    workers: Positive = 1
    """Number of workers (islands)."""
    sync_every: Positive = 100
    """Inner steps between two exchanges of the same fragment (H)."""
    measure_every: NotNegative = 10
    """Outer rounds of a fragment between two in which norms, cosines and drift are measured. 0:
    never."""
    fragments: Fragments = field(default_factory=Fragments)
    outer_optimizer: OuterOptimizer = field(default_factory=OuterOptimizer)
    overlap: Overlap = field(default_factory=Overlap)
    quantization: Quantization = field(default_factory=Quantization)
    link: Link = field(default_factory=Link)


BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Numbers of values that may share a scale: the divisors of the wire formats' unit."""
FEW_ROUNDS = 100
"""Runs with fewer outer rounds than this are known to stay behind data parallelism."""

Mistakes = Iterator[tuple[str, str]]
"""Dotted keys of settings, each with what is wrong about it."""


def flat_settings(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a section by dotted key, those of nested sections included."""
    found: dict[str, Any] = {}
    for item in fields(section):
        key, value = prefix + item.name, getattr(section, item.name)
        found |= flat_settings(value, f"{key}.") if is_dataclass(value) else {key: value}
    return found


def field_mistakes(section: Any, prefix: str) -> list[tuple[str, str]]:
    """Check type and range of every setting, for sections that were built in Python."""
    found, hints = [], get_type_hints(type(section), include_extras=True)
    for item in fields(section):
        key, value = f"{prefix}.{item.name}", getattr(section, item.name)
        if is_dataclass(value):
            found += field_mistakes(value, key)
            continue
        try:
            convert(value, hints[item.name])
        except ValidationError as error:
            choices = get_args(hints[item.name]) if get_origin(hints[item.name]) is Literal else ()
            reason = f"must be one of {', '.join(choices)}" if choices else str(error)
            found.append((key, f"is {value!r}: {reason}"))
    return found


def diloco_mistakes(diloco: DiLoCoConfig) -> Mistakes:
    """Check settings of the outer loop that depend on each other."""
    if (diloco.fragments.pattern == "explicit") != bool(diloco.fragments.modules):
        yield (
            "diloco.fragments.modules",
            'lists the fragments of diloco.fragments.pattern = "explicit": set both, or neither',
        )
    if diloco.overlap.delay >= diloco.sync_every:
        yield (
            "diloco.overlap.delay",
            f"must be smaller than diloco.sync_every = {diloco.sync_every}: a fragment has to be "
            "back before it is sent again",
        )
    outer = diloco.outer_optimizer
    if outer.decay != "constant" and outer.decay_rounds <= outer.warmup_rounds:
        yield (
            "diloco.outer_optimizer.decay_rounds",
            "must be larger than diloco.outer_optimizer.warmup_rounds = "
            f'{outer.warmup_rounds} with decay = "{outer.decay}"',
        )


def quantization_mistakes(chosen: Quantization, workers: int) -> Mistakes:
    """Check for formats that would have no effect. `workers`: how many there really are."""
    codecs = {chosen.codec, chosen.gather_codec} - {"same"}
    if chosen.block_size not in BLOCK_SIZES:
        nearest = min(BLOCK_SIZES, key=lambda size: abs(size - chosen.block_size))
        yield (
            "diloco.quantization.block_size",
            f"is {chosen.block_size}, and the formats have blocks of "
            f"{', '.join(map(str, BLOCK_SIZES))}: take {nearest}",
        )
    elif chosen.block_size != Quantization.block_size and codecs <= {"fp32", "bf16"}:
        yield (
            "diloco.quantization.block_size",
            f"is {chosen.block_size}, and {chosen.codec} has no blocks: leave it out, or choose a "
            "format of 8 bits or fewer",
        )
    if chosen.gather_codec != "same" and workers <= 2:
        yield (
            "diloco.quantization.gather_codec",
            "is the format of the means that go back when there are more than two workers, and "
            f"there are {workers}: leave it out",
        )
    if chosen.rounding == "stochastic" and codecs == {"fp32"}:
        yield (
            "diloco.quantization.rounding",
            'is "stochastic", and fp32 is not rounded: leave it out, or choose another '
            "diloco.quantization.codec",
        )
    if chosen.error_feedback and chosen.codec == "fp32":
        yield (
            "diloco.quantization.error_feedback",
            "has no effect, as fp32 loses nothing: leave it out, or choose another "
            "diloco.quantization.codec",
        )


def advice(config: DiLoCoConfig, total_steps: int) -> list[str]:
    """Return warnings about valid settings that are known to train badly (docs/algorithm.md)."""
    if config.method == "none":
        return []
    found = []
    outer, every, rounds = (
        config.outer_optimizer,
        config.sync_every,
        total_steps // config.sync_every,
    )
    if rounds == 0:
        found.append(
            f"diloco.sync_every = {every} is longer than the run of {total_steps} steps: nothing "
            "is ever exchanged and the workers end apart; lower it"
        )
    elif rounds < FEW_ROUNDS:
        found.append(
            f"the run has {rounds} outer rounds ({total_steps} steps / diloco.sync_every = {every})"
            f"; with fewer than about {FEW_ROUNDS} the loss stays behind data parallelism: lower "
            "diloco.sync_every or train longer"
        )
    step_size = outer.lr / (1 - outer.momentum * (outer.name in ("nesterov", "momentum")))
    if every <= 10 and config.overlap.mixing < 0.25 and step_size > 5:
        found.append(
            f"diloco.outer_optimizer.lr = {outer.lr:g} with momentum {outer.momentum:g}, "
            f"diloco.sync_every = {every} and diloco.overlap.mixing = {config.overlap.mixing:g} "
            "is known to be unstable: set mixing to 0.5, or lower the outer lr"
        )
    if config.quantization.error_feedback:
        found.append(
            "diloco.quantization.error_feedback cost more than it gave where it was measured "
            "(docs/algorithm.md): leave it off unless a run of your own shows a gain"
        )
    return found
