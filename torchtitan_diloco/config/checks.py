"""Settings that are fine alone and wrong together. Each check yields (key, what is wrong and the remedy)."""

from collections.abc import Iterator

from torchtitan_diloco.config.schema import Config

HORIZON = ("training.steps", "training.tokens", "training.tokens_per_parameter")
ALTERNATIVES = (HORIZON,)
"""Groups of keys of which exactly one is set (not 0)."""


def cross_field_mistakes(config: Config) -> Iterator[tuple[str, str]]:
    yield from _horizon(config)
    yield from _batch(config)
    if config.optimizer.beta1 >= config.optimizer.beta2:
        yield (
            "optimizer.beta1",
            f"must be below optimizer.beta2 = {config.optimizer.beta2:g}, as the first moment has the shorter memory",
        )
    if config.run.device == "cpu" and config.parallel.compute_dtype == "bfloat16":
        yield "parallel.compute_dtype", 'bfloat16 needs run.device = "cuda"; use "auto" or "float32" on the CPU'
    if config.profiling.every and config.profiling.every < config.profiling.steps:
        yield "profiling.every", f"must be at least profiling.steps = {config.profiling.steps}, or 0 for one trace"


def _horizon(config: Config) -> Iterator[tuple[str, str]]:
    chosen = [key for key in HORIZON if getattr(config.training, key.removeprefix("training."))]
    if not chosen:
        yield HORIZON[0], "the run has no length; set one of " + ", ".join(HORIZON)
    elif len(chosen) > 1:
        yield chosen[1], f"the length of the run is already given by {chosen[0]}; set one of them to 0"


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
