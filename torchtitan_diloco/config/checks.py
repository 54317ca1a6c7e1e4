"""Settings that are fine alone and wrong together. Each check yields (key, what is wrong and the remedy)."""

from collections.abc import Iterator

from torchtitan_diloco.config.diloco_schema import DiLoCo, Quantization
from torchtitan_diloco.config.schema import Config

HORIZON = ("training.steps", "training.tokens", "training.tokens_per_parameter")
BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Values that may share a scale: what divides the unit of the wire formats."""
ALTERNATIVES = (HORIZON,)
"""Groups of keys of which exactly one is set (not 0)."""


def cross_field_mistakes(config: Config) -> Iterator[tuple[str, str]]:
    yield from _run(config)
    yield from _horizon(config)
    yield from _batch(config)
    yield from _worker_shards(config)
    if config.diloco.method != "none":  # which reads none of this
        yield from diloco_mistakes(config.diloco)
        yield from quantization_mistakes(config.diloco.quantization, config.diloco.workers)
    if config.optimizer.beta1 >= config.optimizer.beta2:
        yield (
            "optimizer.beta1",
            f"must be below optimizer.beta2 = {config.optimizer.beta2:g}, as the first moment has the shorter memory",
        )
    if config.run.device == "cpu" and config.parallel.compute_dtype == "bfloat16":
        yield (
            "parallel.compute_dtype",
            'bfloat16 needs run.device = "cuda"; use "auto" or "float32" on the CPU',
        )
    if config.profiling.every and config.profiling.every <= config.profiling.steps:
        yield (
            "profiling.every",
            f"must be above profiling.steps = {config.profiling.steps}, as a step of warm-up comes before each trace, or 0 for "
            "one trace",
        )


def diloco_mistakes(diloco: DiLoCo) -> Iterator[tuple[str, str]]:
    explicit = diloco.fragments.pattern == "explicit"
    if explicit != bool(diloco.fragments.modules):
        yield (
            "diloco.fragments.modules",
            'lists the fragments of diloco.fragments.pattern = "explicit": set both, or neither',
        )
    if diloco.overlap.delay >= diloco.sync_every:
        yield (
            "diloco.overlap.delay",
            f"must be smaller than diloco.sync_every = {diloco.sync_every}: a fragment has to be back before it is sent again",
        )
    outer = diloco.outer_optimizer
    if outer.decay != "constant" and outer.decay_rounds <= outer.warmup_rounds:
        yield (
            "diloco.outer_optimizer.decay_rounds",
            f'must be larger than diloco.outer_optimizer.warmup_rounds = {outer.warmup_rounds} with decay = "{outer.decay}"',
        )


def quantization_mistakes(chosen: Quantization, workers: int) -> Iterator[tuple[str, str]]:
    """Formats that do nothing, or nothing that was asked for. `workers` is how many there really are."""
    if chosen.block_size not in BLOCK_SIZES:
        nearest = min(BLOCK_SIZES, key=lambda size: abs(size - chosen.block_size))
        yield (
            "diloco.quantization.block_size",
            f"is {chosen.block_size}, and the formats have blocks of {', '.join(map(str, BLOCK_SIZES))}: take {nearest}",
        )
    elif chosen.block_size != Quantization.block_size and {chosen.codec, chosen.gather_codec} <= {
        "fp32",
        "bf16",
        "same",
    }:
        yield (
            "diloco.quantization.block_size",
            f"is {chosen.block_size}, and {chosen.codec} has no blocks: leave it out, or choose a format of 8 bits or fewer",
        )
    if chosen.gather_codec != "same" and workers <= 2:
        yield (
            "diloco.quantization.gather_codec",
            f"is the format of the means that go back when there are more than two workers, and there are {workers}: leave it "
            "out",
        )
    rounded = [name for name in (chosen.codec, chosen.gather_codec) if name not in ("fp32", "same")]
    if chosen.rounding == "stochastic" and not rounded:
        yield (
            "diloco.quantization.rounding",
            'is "stochastic", and fp32 is not rounded: leave it out, or choose another diloco.quantization.codec',
        )
    if chosen.error_feedback and chosen.codec == "fp32":
        yield (
            "diloco.quantization.error_feedback",
            "has nothing to feed back, as fp32 loses nothing: leave it out, or choose another diloco.quantization.codec",
        )


def _run(config: Config) -> Iterator[tuple[str, str]]:
    if "/" in config.run.name or "\\" in config.run.name:
        yield (
            "run.name",
            "names a folder below outputs/, so it has no slashes; set run.folder for another place",
        )


def _horizon(config: Config) -> Iterator[tuple[str, str]]:
    chosen = [key for key in HORIZON if getattr(config.training, key.removeprefix("training."))]
    if not chosen:
        yield HORIZON[0], "the run has no length; set one of " + ", ".join(HORIZON)
    elif len(chosen) > 1:
        yield (
            chosen[1],
            f"the length of the run is already given by {chosen[0]}; set one of them to 0",
        )


def _batch(config: Config) -> Iterator[tuple[str, str]]:
    total = config.training.global_batch_size
    if total is None:
        return
    ranks = config.diloco.workers * max(1, config.parallel.fsdp)
    share = ranks * config.training.batch_size
    if total % share:
        yield (
            "training.global_batch_size",
            f"must be a multiple of workers x ranks x training.batch_size = {config.diloco.workers} x "
            f"{max(1, config.parallel.fsdp)} x {config.training.batch_size} = {share}",
        )


def _worker_shards(config: Config) -> Iterator[tuple[str, str]]:
    if config.data.shard_by != "none" and (
        config.diloco.method == "none" or config.diloco.workers == 1
    ):
        reason = (
            'diloco.method = "none" averages gradients'
            if config.diloco.workers > 1
            else "there is one worker"
        )
        yield (
            "data.shard_by",
            f"gives workers that train apart documents of their own, and {reason}: leave it out",
        )
