"""Checks across settings: values that contradict each other, and values that have no effect."""

from collections.abc import Iterator

from torchtitan_diloco.config.schema import Config, flat_settings, format_value
from torchtitan_diloco.diloco.config import advice, diloco_mistakes, quantization_mistakes
from torchtitan_diloco.islands.config import Islands, islands_mistakes

RUN_LENGTH = ("training.steps", "training.tokens", "training.tokens_per_parameter")
"""Alternatives: exactly one of these settings is not 0."""


PARTS = ("strided", "sequential", "balanced")
MOMENTUM = ("nesterov", "momentum", "adam")
READ_WITH = {
    "optimizer.matrix_lr": ("optimizer.name", ("muon",)),
    "optimizer.momentum": ("optimizer.name", ("muon",)),
    "lr_schedule.decay_fraction": ("lr_schedule.decay", ("wsd",)),
    "lr_schedule.floor": ("lr_schedule.decay", ("cosine", "linear", "wsd")),
    "model.norm": ("model.name", ("chinchilla",)),
    "model.qk_norm": ("model.name", ("chinchilla",)),
    "model.positions": ("model.name", ("chinchilla",)),
    "model.activation": ("model.name", ("chinchilla",)),
    "model.rotary_base": ("model.positions", ("rotary",)),
    "model.kv_heads": ("model.name", ("llama",)),
    "model.rotary_scaling": ("model.name", ("llama",)),
    "model.tied_head": ("model.name", ("llama",)),
    "activation_checkpoint.every": ("activation_checkpoint.mode", ("every_nth",)),
    "diloco.fragments.layers_per_fragment": ("diloco.fragments.pattern", PARTS),
    "diloco.fragments.blocks": ("diloco.fragments.pattern", PARTS),
    "diloco.outer_optimizer.momentum": ("diloco.outer_optimizer.name", MOMENTUM),
    "diloco.outer_optimizer.beta2": ("diloco.outer_optimizer.name", ("adam",)),
    "diloco.outer_optimizer.epsilon": ("diloco.outer_optimizer.name", ("adam",)),
    "diloco.outer_optimizer.decay_rounds": ("diloco.outer_optimizer.decay", ("cosine", "linear")),
    "diloco.outer_optimizer.floor": ("diloco.outer_optimizer.decay", ("cosine", "linear")),
}
"""Setting -> the setting that decides whether it is read, and the values with which it is read."""


def config_mistakes(config: Config) -> Iterator[tuple[str, str]]:
    """Check settings against each other. Yield (key, reason and remedy) pairs."""
    yield from _training_mistakes(config)
    if config.diloco.method != "none":
        yield from diloco_mistakes(config.diloco)
        yield from quantization_mistakes(config.diloco.quantization, config.diloco.workers)
    if config.islands.join or config.islands.local:
        yield from _islands_mistakes(config)
    else:
        for key, value in flat_settings(config.islands, "islands.").items():
            if value != flat_settings(Islands(), "islands.")[key]:
                yield key, "is only read with islands.join (or islands.local): give it, or neither"
    if "/" in config.run.name or "\\" in config.run.name:
        yield "run.name", "must not contain slashes: set run.folder to choose another folder"
    if config.data.shard_by != "none" and (config.workers == 1 or config.diloco.method == "none"):
        yield (
            "data.shard_by",
            "needs several workers that train independently "
            '(diloco.workers > 1, diloco.method = "streaming"): leave it out',
        )
    if config.optimizer.beta1 >= config.optimizer.beta2:
        yield "optimizer.beta1", f"must be less than optimizer.beta2 = {config.optimizer.beta2:g}"
    if config.run.device == "cpu" and config.parallel.compute_dtype == "bfloat16":
        yield (
            "parallel.compute_dtype",
            'needs run.device = "cuda": use "auto" or "float32" on the CPU',
        )
    if config.profiling.every and config.profiling.every <= config.profiling.steps:
        yield (
            "profiling.every",
            f"must be greater than profiling.steps = {config.profiling.steps}, because one warm-up "
            "step precedes each trace; or 0 for one trace",
        )


def _islands_mistakes(config: Config) -> Iterator[tuple[str, str]]:
    islands = config.islands
    if config.diloco.method == "none":
        yield "diloco.method", '"none" does not work with islands: leave it out'
    if islands.join and islands.local:
        yield "islands.local", "starts a server of its own: leave islands.join out, or this"
    if islands.join and not islands.name:
        yield "islands.name", "names this island in the run: give a name, such as that of its site"
    yield from islands_mistakes(islands, config.diloco, config.workers)


def _training_mistakes(config: Config) -> Iterator[tuple[str, str]]:
    training = config.training
    lengths = [key for key in RUN_LENGTH if getattr(training, key.removeprefix("training."))]
    if not lengths:
        yield RUN_LENGTH[0], f"the run has no length: set one of {', '.join(RUN_LENGTH)}"
    elif len(lengths) > 1:
        yield lengths[1], f"{lengths[0]} already sets the length of the run: set one of them to 0"
    workers, ranks = config.workers, max(1, config.parallel.fsdp)
    smallest = workers * ranks * training.batch_size
    if training.global_batch_size is not None and training.global_batch_size % smallest:
        yield (
            "training.global_batch_size",
            "must be a multiple of workers x ranks x training.batch_size = "
            f"{workers} x {ranks} x {training.batch_size} = {smallest}",
        )


def unused_settings(config: Config) -> Iterator[str]:
    """Yield one line for each changed setting that has no effect beside the others."""
    defaults, chosen = flat_settings(Config()), flat_settings(config)
    for key, (decider, values) in READ_WITH.items():
        if key.startswith("diloco.") and config.diloco.method == "none":
            continue
        if chosen[key] != defaults[key] and chosen[decider] not in values:
            yield (
                f"{key} = {format_value(chosen[key])} has no effect with "
                f"{decider} = {format_value(chosen[decider])}: it is for "
                + " and ".join(map(format_value, values))
            )


def run_warnings(config: Config, total_steps: int) -> list[str]:
    """Return warnings for a run of so many steps: valid settings that do little good."""
    found = [*advice(config.diloco, total_steps), *unused_settings(config)]
    warmup_steps, stop_after = config.lr_schedule.warmup_steps, config.training.stop_after
    if warmup_steps > total_steps:
        found.append(
            f"lr_schedule.warmup_steps = {warmup_steps} is longer than the run of {total_steps} "
            "steps, so the peak learning rate is never reached: shorten it"
        )
    if stop_after >= total_steps:
        found.append(
            f"training.stop_after = {stop_after} has no effect: the run ends after step "
            f"{total_steps}"
        )
    return found
