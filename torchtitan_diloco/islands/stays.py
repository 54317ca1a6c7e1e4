"""When islands were there, as lanes of a page. Times are in seconds since 1970."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

MOST_POINTS = 1000
"""Maximum number of points of a curve."""
LEAST_GAP = 5.0
"""Minimum seconds for which an island that was away sent nothing."""
GAP_FACTOR = 5.0
"""It also sent nothing for this multiple of the usual time."""


@dataclass
class Stay:
    """One incarnation of an island."""

    name: str
    spans: list[list[float]]  # beginnings and ends of the times in which it gave signs of life
    ended: str = ""  # how, empty while it takes part
    parts: int = 0
    """Number of its parts that were merged."""
    late_parts: int = 0
    """Number of those that were merged one or more versions late."""
    late: list[float] = field(default_factory=list)
    """Times at which they were merged, or some of them."""
    _usual: float = math.inf

    def see(self, at: float) -> None:
        """Record a sign of life. Call this in the order of time."""
        gap = at - self.spans[-1][1]
        last = self.spans[-1]
        if gap > max(LEAST_GAP, GAP_FACTOR * self._usual):
            self.spans.append([at, at])
            return
        last[1] = max(last[1], at)
        self._usual = gap if math.isinf(self._usual) else 0.9 * self._usual + 0.1 * gap

    def add_late(self, at: float, parts: int = 1) -> None:
        """Count parts that were merged late."""
        self.late_parts += parts
        append_thinned(self.late, at)


def append_thinned(points: list[Any], point: Any) -> None:
    """Append a point. If there are too many, drop every other one."""
    points.append(point)
    if len(points) > MOST_POINTS:
        del points[1::2]


class Lanes(NamedTuple):
    """A lane for each island: its name, signs of life and late parts, in percent of the width and
    as text."""

    rows: list[tuple[str, list[tuple[float, float, str]], list[tuple[float, str]]]]
    begin: str
    end: str


def lanes_of(stays: Iterable[Stay], end: float = 0.0) -> Lanes:
    """Return the lanes of islands. `end`: end of the lanes, at least that of the last stay, in
    seconds since 1970."""
    by_name = dict[str, list[Stay]]()
    for stay in stays:
        by_name.setdefault(stay.name, []).append(stay)
    spans = [
        span
        for stays_of_island in by_name.values()
        for stay in stays_of_island
        for span in stay.spans
    ]
    begin = min((start for start, _ in spans), default=end)
    end = max([end, *(last for _, last in spans)])  # clocks of machines differ
    share = 100 / ((end - begin) or 1.0)
    rows = []
    for name, stays_of_island in by_name.items():
        bars = [
            (share * (a - begin), share * (b - a), f"{time_text(a)} to {time_text(b)} {stay.ended}")
            for stay in stays_of_island
            for a, b in stay.spans
        ]
        late = [
            (share * (at - begin), time_text(at)) for stay in stays_of_island for at in stay.late
        ]
        rows.append((name, bars, late))
    return Lanes(rows, time_text(begin), time_text(end))


def time_text(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%m-%d %H:%M:%S}"
