"""Settings that are fine alone and wrong together. Each check yields (key, what is wrong and the remedy)."""

from collections.abc import Iterator

from torchtitan_diloco.config.schema import Config, DiLoCo

HORIZON = ("training.steps", "training.tokens", "training.tokens_per_parameter")
ALTERNATIVES = (HORIZON,)
"""Groups of keys of which exactly one is set (not 0)."""


def cross_field_mistakes(config: Config) -> Iterator[tuple[str, str]]:
    yield from _run(config)
    yield from _horizon(config)
    yield from _batch(config)
    yield from diloco_mistakes(config.diloco)
    if config.optimizer.beta1 >= config.optimizer.beta2:
        yield (
            "optimizer.beta1",
            f"must be below optimizer.beta2 = {config.optimizer.beta2:g}, as the first moment has the shorter memory",
        )
    if config.run.device == "cpu" and config.parallel.compute_dtype == "bfloat16":
        yield "parallel.compute_dtype", 'bfloat16 needs run.device = "cuda"; use "auto" or "float32" on the CPU'
    if config.profiling.every and config.profiling.every < config.profiling.steps:
        yield "profiling.every", f"must be at least profiling.steps = {config.profiling.steps}, or 0 for one trace"


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


def _run(config: Config) -> Iterator[tuple[str, str]]:
    if "/" in config.run.name or "\\" in config.run.name:
        yield "run.name", "names a folder below outputs/, so it has no slashes; set run.folder for another place"


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
