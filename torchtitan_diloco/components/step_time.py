"""Where the time of the training steps goes: compute, data, exposed communication, other."""

import time
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TimedIterator(Generic[Item]):
    """Knows how long its user has waited for items."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._seconds = 0.0

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        started = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self._seconds += time.perf_counter() - started

    def take_seconds(self) -> float:
        """Since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken


SHARES = ("compute", "data", "exposed_communication", "other")


def time_shares(
    *, wall: float, steps: float, data: float, exposed: float | None, agreement: float = 0.0
) -> dict[str, float | None]:
    """Of the seconds `wall`, in percent: `steps` were spent in training steps, of them `data` on waiting for data and `exposed`
    on the outer loop. With data parallelism communication is a part of the backward pass, not known by itself (None): it counts
    as compute. `agreement`: waited between the steps for what ranks tell each other, which is exposed communication as well."""
    compute = steps - data - (exposed or 0.0)
    communication = None if exposed is None else exposed + agreement
    seconds = (
        compute,
        data,
        communication,
        wall - steps - (agreement if exposed is not None else 0.0),
    )
    return {
        name: None if value is None or wall <= 0 else 100 * min(1.0, max(0.0, value / wall))
        for name, value in zip(SHARES, seconds, strict=True)
    }
