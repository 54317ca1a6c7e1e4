"""Settings that do nothing beside another one's value: a user who gives one believes that it does something."""

from collections.abc import Iterator

from torchtitan_diloco.config.fields import field_specs, flat_settings
from torchtitan_diloco.config.schema import Config

ADAM_ONLY = ("adam",)
WITH_DECAY = ("cosine", "linear")
READ_BY = {
    "lr_schedule.decay_fraction": ("lr_schedule.decay", ("wsd",)),
    "lr_schedule.floor": ("lr_schedule.decay", ("cosine", "linear", "wsd")),
    "model.rotary_base": ("model.positions", ("rotary",)),
    "activation_checkpoint.every": ("activation_checkpoint.mode", ("every_nth",)),
    "diloco.fragments.layers_per_fragment": (
        "diloco.fragments.pattern",
        ("strided", "sequential", "balanced"),
    ),
    "diloco.fragments.blocks": ("diloco.fragments.pattern", ("strided", "sequential", "balanced")),
    "diloco.outer_optimizer.momentum": (
        "diloco.outer_optimizer.name",
        ("nesterov", "momentum", "adam", "sign_momentum"),
    ),
    "diloco.outer_optimizer.beta2": ("diloco.outer_optimizer.name", ADAM_ONLY),
    "diloco.outer_optimizer.epsilon": ("diloco.outer_optimizer.name", ADAM_ONLY),
    "diloco.outer_optimizer.decay_rounds": ("diloco.outer_optimizer.decay", WITH_DECAY),
    "diloco.outer_optimizer.floor": ("diloco.outer_optimizer.decay", WITH_DECAY),
}
"""Setting -> the one that decides whether it is read, and the values with which it is."""


def unused_settings(config: Config) -> Iterator[str]:
    """One line for each setting that was changed and is not read. Without an outer loop, none of its settings is looked at."""
    defaults = {spec.key: spec.default for spec in field_specs(Config)}
    chosen = flat_settings(config)
    for key, (decider, values) in READ_BY.items():
        if key.startswith("diloco.") and config.diloco.method == "none":
            continue
        if chosen[key] != defaults[key] and chosen[decider] not in values:
            yield (
                f'{key} = {chosen[key]} does nothing with {decider} = "{chosen[decider]}": it is for '
                + " and ".join(f'"{value}"' for value in values)
            )
    fragments = config.diloco.fragments
    whole = config.diloco.method != "none" and fragments.layers_per_fragment == 0
    if whole and fragments.pattern in ("sequential", "balanced"):
        yield (
            f'diloco.fragments.pattern = "{fragments.pattern}" does nothing with diloco.fragments.layers_per_fragment = 0: '
            "the whole model is one fragment then"
        )
