"""Garbage collection after the same steps on all ranks, so that they do not wait for each other."""

import gc
from typing import Self

EVERY_STEPS = 50


class GarbageCollection:
    """Switches automatic collections off while it is entered. Call `after_step` for every step."""

    def __enter__(self) -> Self:
        gc.disable()
        return self

    def after_step(self, step: int) -> None:
        if step % EVERY_STEPS == 0:
            gc.collect(1)

    def __exit__(self, *error: object) -> None:
        gc.enable()
