"""Settings that are fine alone and wrong together. Each check yields (key, what is wrong and the remedy)."""

from collections.abc import Iterator

from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.diloco.config import diloco_mistakes, quantization_mistakes

HORIZON = ("training.steps", "training.tokens", "training.tokens_per_parameter")
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
