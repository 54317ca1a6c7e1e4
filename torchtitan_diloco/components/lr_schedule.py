"""The learning rate of each step: a pure function, so there is nothing to save and nothing to restore."""

import math

from torchtitan_diloco.config.schema import LrSchedule


def lr_factor(step: int, total_steps: int, config: LrSchedule) -> float:
    """Share of the peak learning rate used by `step` (the first is 1, the last `total_steps`)."""
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    start = config.warmup_steps
    if config.decay == "wsd":
        start = max(start, total_steps - round(config.decay_fraction * total_steps))
    progress = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.decay == "cosine" else 1 - progress
    return config.floor + (1 - config.floor) * shape
