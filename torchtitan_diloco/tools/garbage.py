"""Python's garbage collector at steps we choose: it would stop one rank at a time, and each stop is everybody's."""

import gc


class GarbageControl:
    def __init__(self, every: int) -> None:
        self._every = every
        if every:
            gc.disable()
            gc.collect()

    def after_step(self, step: int) -> None:
        if self._every and step % self._every == 0:
            gc.collect(1)

    def close(self) -> None:
        if self._every:
            gc.enable()
