"""The learning rate of a step. It is without state, so a resumed run has nothing to restore."""

import math

from torchtitan_diloco.base.settings import steps_of
from torchtitan_diloco.config.parts import SCHEDULES
from torchtitan_diloco.config.schema import LrSchedule


def lr_factor(step: float, total_steps: int, config: LrSchedule) -> float:
    """Return the share of the peak learning rate in `step`, which is 1 to `total_steps`."""
    start = steps_of(config.warmup, total_steps)
    if step < start:
        return step / start
    factor: float = SCHEDULES[config.decay].load()(step, start, total_steps, config)
    return factor


def cosine(step: float, start: int, total_steps: int, config: LrSchedule) -> float:
    progress = _progress(step, start, total_steps)
    return _above_floor(0.5 * (1 + math.cos(math.pi * progress)), config)


def linear(step: float, start: int, total_steps: int, config: LrSchedule) -> float:
    return _above_floor(1 - _progress(step, start, total_steps), config)


def wsd(step: float, start: int, total_steps: int, config: LrSchedule) -> float:
    start = max(start, total_steps - round(config.decay_fraction * total_steps))
    return linear(step, start, total_steps, config)


def constant(*_: object) -> float:
    return 1.0


def _progress(step: float, start: int, total_steps: int) -> float:
    """Return the share of the decay from `start` to the last step that is over."""
    return min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))


def _above_floor(shape: float, config: LrSchedule) -> float:
    """Return the factor for a shape that falls from 1 to 0."""
    return config.floor + (1 - config.floor) * shape
