"""What has happened in a run: when islands were there, news, and losses.

It follows from the bins of the history. Times are in seconds since 1970, on the syncer's clock.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchtitan_diloco.islands.rules import presence
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.history import Bin, Event, EventKind, Sums
from torchtitan_diloco.islands.stays import Stay, append_thinned

MOST_NEWS = 50
"""Number of news to keep."""
ENDS = {EventKind.LEFT: "left", EventKind.LOST: "gone", EventKind.EVICTED: "evicted"}
TEXTS = {
    EventKind.LED: "a syncer decides, in session {text}",
    EventKind.BEGUN: "the run begins",
    EventKind.ENDED: "the run has ended",
    EventKind.JOINED: "{who} joins",
    EventKind.RETURNED: "{who} is back",
    EventKind.LEFT: "{who} leaves",
    EventKind.LOST: "{who} is gone: its slot was given to another island",
    EventKind.EVICTED: "{who} is evicted",
    EventKind.AWAY: "{who} is silent",
    EventKind.BACK: "{who} is heard again",
    EventKind.CHANGED: "change: {text}",
    EventKind.WRONG: "{who} has repeatedly sent wrong numbers: {text}",
}


@dataclass(frozen=True)
class Interval:
    """Sums of an island over some minutes."""

    begin: float
    end: float
    sums: Sums

    @property
    def tokens_per_second(self) -> float:
        """Merged tokens per second."""
        return self.sums.tokens / max(1.0, self.end - self.begin)

    @property
    def loss(self) -> float | None:
        """Mean training loss."""
        return self.sums.loss / self.sums.with_loss if self.sums.with_loss else None


@dataclass
class Past:
    began: float = 0.0
    """When the run was founded."""
    ended: float | None = None
    """When the run has ended."""
    led: float = 0.0
    """When the run began to train, or a later syncer took over."""
    stays: list[Stay] = field(default_factory=list)
    """In the order in which islands joined."""
    news: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MOST_NEWS))
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Tokens merged, and the loss of the shared model."""
    intervals: dict[str, list[Interval]] = field(default_factory=dict)
    """Sums of each island, in the order of time."""
    last: Mapping[str, Sums] = field(default_factory=dict)
    """Sums of each island over the last bins, which are at least ten minutes once there are so
    many."""

    @property
    def late_parts(self) -> Counter[str]:
        """Number of parts of each island that were merged late."""
        late = Counter[str]()
        for stay in self.stays:
            late[stay.name] += stay.late_parts
        return late


def past_of(decision: Decision, stored: Iterable[Bin] = ()) -> Past:
    """Return the past of a run. `stored`: the objects of its history, in order, or the newest of
    them."""
    history = decision.history
    bins = [*stored, *([] if history.closed is None else [history.closed]), history.open]
    past = Past(began=decision.written - decision.age)
    now = decision.written
    reader = _Reader(past)
    for bin_ in bins:
        reader.read(bin_, now)
    reader.finish(decision)
    past.last = _summed(bins[-2:])
    return past


class _Reader:
    """Reads bins in the order of time."""

    def __init__(self, past: Past) -> None:
        self._past = past
        self._current = dict[str, Stay]()
        """Stays that have not ended, by name."""
        self._away = set[str]()

    def read(self, bin_: Bin, now: float) -> None:
        past = self._past
        begin = past.began + bin_.since
        end = past.began + bin_.until if bin_.until else now
        for name in bin_.islands:  # whose first bins are not read
            is_known = any(stay.name == name for stay in past.stays)
            if not is_known and not any(_comes(event, name) for event in bin_.events):
                self._begin(name, begin)
        for event in bin_.events:
            self._read_event(event)
        if bin_.left_out:
            past.news.append((end, f"{bin_.left_out} more events are not listed"))
        for name in {**past.intervals, **bin_.islands}:
            self._add(name, begin, end, bin_.islands.get(name, Sums()))
        for tokens, loss in bin_.validated:
            if not past.losses or tokens > past.losses[-1][0]:
                append_thinned(past.losses, (tokens, loss))

    def finish(self, decision: Decision) -> None:
        """End the lanes of the islands that are there now."""
        past = self._past
        if not decision.ended:  # or no longer, after a change of its length
            past.ended = None
        end = decision.written if past.ended is None else past.ended
        for name, stay in self._current.items():
            if name not in self._away:
                stay.spans[-1][1] = max(stay.spans[-1][1], end)

    def _read_event(self, event: Event) -> None:
        past = self._past
        at = past.began + event.age
        past.news.append((at, TEXTS[event.kind].format(who=event.who, text=event.text)))
        stay = self._current.get(event.who)
        match event.kind:
            case EventKind.JOINED | EventKind.RETURNED:
                self._end(event.who, at, "gone")
                self._begin(event.who, at)
            case EventKind.LEFT | EventKind.LOST | EventKind.EVICTED:
                self._end(event.who, at, ENDS[event.kind])
            case EventKind.AWAY if stay is not None:
                stay.spans[-1][1] = max(stay.spans[-1][0], at - presence.SILENT)
                self._away.add(event.who)
            case EventKind.BACK if stay is not None:
                stay.spans.append([at, at])
                self._away.discard(event.who)
            case EventKind.LED | EventKind.BEGUN:
                past.led = at
            case EventKind.ENDED:
                past.ended = at

    def _begin(self, name: str, at: float) -> None:
        self._current[name] = Stay(name, [[at, at]])
        self._past.stays.append(self._current[name])

    def _end(self, name: str, at: float, how: str) -> None:
        stay = self._current.pop(name, None)
        if stay is None:
            return
        stay.ended = how
        if name not in self._away:
            stay.spans[-1][1] = max(stay.spans[-1][1], at)
        self._away.discard(name)

    def _add(self, name: str, begin: float, end: float, sums: Sums) -> None:
        """Count the parts of an island in a bin, whose times are only known to lie in it."""
        past = self._past
        past.intervals.setdefault(name, []).append(Interval(begin, end, sums))
        stay = next((stay for stay in reversed(past.stays) if stay.name == name), None)
        if stay is not None:
            stay.parts += sums.parts
            if sums.late:
                stay.add_late((begin + end) / 2, sums.late)
        left_out = {"refused": sums.refused, "lost, as their numbers were wrong": sums.lost}
        texts = [f"{count} {what}" for what, count in left_out.items() if count]
        if texts:
            past.news.append((end, f"parts of {name}: {', '.join(texts)}"))


def _comes(event: Event, name: str) -> bool:
    return event.who == name and event.kind in (EventKind.JOINED, EventKind.RETURNED)


def _summed(bins: Sequence[Bin]) -> dict[str, Sums]:
    total = dict[str, Sums]()
    for bin_ in bins:
        for name, sums in bin_.islands.items():
            sums_so_far = total.setdefault(name, Sums())
            sums_so_far.parts += sums.parts
            sums_so_far.refused += sums.refused
            sums_so_far.lost += sums.lost
            sums_so_far.loss += sums.loss
            sums_so_far.with_loss += sums.with_loss
    return total
