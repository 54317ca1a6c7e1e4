"""Checks across settings: values that contradict each other, and values that have no effect."""

from collections.abc import Iterator

from torchtitan_diloco.config.schema import Config, flat_settings, format_value
from torchtitan_diloco.diloco.config import Mistakes, advice, diloco_mistakes
from torchtitan_diloco.islands.config import Islands, islands_mistakes

RUN_LENGTH = ("training.steps", "training.tokens", "training.tokens_per_parameter")
"""Exactly one of these settings is not 0."""
WARMUP = ("lr_schedule.warmup_steps", "lr_schedule.warmup_fraction")
BEGINNING = ("diloco.beginning.steps", "diloco.beginning.fraction")
"""At most one of these settings is not 0, as of WARMUP."""

READ_WITH: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {
    ("optimizer.name", ("muon",)): ("matrix_lr", "momentum"),
    ("lr_schedule.decay", ("wsd",)): ("decay_fraction",),
    ("lr_schedule.decay", ("cosine", "linear", "wsd")): ("floor",),
    ("activation_checkpoint.mode", ("every_nth",)): ("every",),
    ("diloco.fragments.pattern", ("strided", "sequential")): ("layers_per_fragment", "blocks"),
    ("diloco.outer_optimizer.name", ("nesterov", "momentum", "adam")): ("momentum",),
    ("diloco.outer_optimizer.name", ("adam",)): ("beta2", "epsilon"),
}
"""A setting and some of its values, and the settings of the section that only these values use."""


def config_mistakes(config: Config) -> Mistakes:
    """Yield a (key, reason and remedy) pair for each contradiction between settings."""
    training = config.training
    lengths = [key for key in RUN_LENGTH if getattr(training, key.removeprefix("training."))]
    if not lengths:
        yield RUN_LENGTH[0], f"the run has no length: set one of {', '.join(RUN_LENGTH)}"
    elif len(lengths) > 1:
        yield lengths[1], f"{lengths[0]} already sets the length of the run: set one of them to 0"
    if config.lr_schedule.warmup_steps and config.lr_schedule.warmup_fraction:
        yield WARMUP[1], f"{WARMUP[0]} already sets the length of the warm-up: give one of them"
    islands = bool(config.islands.join or config.islands.local)
    if islands or config.diloco.method != "none":
        yield from diloco_mistakes(config.diloco, islands=islands)
    if islands:
        yield from islands_mistakes(config.islands, config.workers)
    else:
        for key, default in flat_settings(Islands()).items():
            if getattr(config.islands, key) != default:
                reason = "is only read with islands.join (or islands.local): give it, or neither"
                yield f"islands.{key}", reason
    if "/" in config.run.name or "\\" in config.run.name:
        yield "run.name", "must not contain slashes: set run.folder to choose another folder"
    if config.data.shard_by != "none" and (config.workers == 1 or config.diloco.method == "none"):
        yield (
            "data.shard_by",
            "needs several workers that train independently "
            '(diloco.workers > 1, diloco.method = "streaming"): leave it out',
        )


def unused_settings(config: Config) -> Iterator[str]:
    """Yield a line for each changed setting that has no effect."""
    defaults, chosen = flat_settings(Config()), flat_settings(config)
    for (decider, values), names in READ_WITH.items():
        section = decider.rpartition(".")[0]
        if section.startswith("diloco") and config.diloco.method == "none":
            continue
        for key in (f"{section}.{name}" for name in names):
            if chosen[key] != defaults[key] and chosen[decider] not in values:
                yield (
                    f"{key} = {format_value(chosen[key])} has no effect with "
                    f"{decider} = {format_value(chosen[decider])}: it is for "
                    + " and ".join(map(format_value, values))
                )


def run_warnings(config: Config, total_steps: int) -> list[str]:
    """Return warnings about valid settings that are unlikely to be intended."""
    found = [*advice(config.diloco, total_steps), *unused_settings(config)]
    warmup_steps = config.lr_schedule.warmup(total_steps)
    if warmup_steps > total_steps:
        found.append(
            f"lr_schedule.warmup_steps = {warmup_steps} is longer than the run of {total_steps} "
            "steps, so the peak learning rate is never reached: shorten it"
        )
    return found
