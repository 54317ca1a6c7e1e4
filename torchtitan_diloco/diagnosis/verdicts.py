"""Who slows the others down, or has failed: verdicts from what workers say of themselves.

Verdicts depend only on what one worker has observed of all, in order, on its own clock: there is no
I/O and no clock in this module. What workers say are durations, so their clocks may differ. A
worker is judged by the median of the others. A verdict needs two rounds and some seconds, and ends
after as many without its cause. That a worker is absent, while training waits for it, is a verdict
at once.

A worker is short of cores if its training thread was ready to run and had none for 30 % of a step.
Everything on its machine is then slow, its transfers as well: these cores are the only verdict
about it, and its steps and the transfers from and to it are neither judged nor remembered. The
kernel counts this time for each thread, so workers that use all cores of a machine themselves are
not short of them (two that train on two cores, ahead of all other programs, wait for 15 to 20 %),
and neither is a process that is asleep on a busy machine.
"""

import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchtitan_diloco.base.hardware import SHORT_OF_CORES
from torchtitan_diloco.diagnosis.kinds import Cause, Verdict
from torchtitan_diloco.diloco.flags import NOT_FINITE, OUTLIER
from torchtitan_diloco.diloco.vitals import ALL_WORKERS, Report, VerdictKind, Vitals

FLOOR = 0.1
"""A share of the time of a step, or of a cycle, that is worth a verdict."""
NOISE = 4.0
"""It also exceeds the usual deviation from the others by this factor."""
LASTING = 16
"""Rounds for whose median half of that is enough, as noise hides what is a little slow."""
LINK_RATIO = 1.5
"""A slow transfer takes this multiple of the usual time."""
EVERYBODY_RATIO = 1.3
"""All steps are slow if they take this multiple of the time before."""
PATH_RATIO = 2.0
"""As `LINK_RATIO`, for one path of three workers or more, whose links are never shared evenly."""
MOST_RATIO = 1.25
"""As `LINK_RATIO`, for most of the paths from or to a worker whose mean is slow."""
IN_A_ROW = 2
"""Rounds with a cause until a verdict begins, and rounds in a row without it until it ends."""
MOST_DOUBLED = 6
MEASURED = 4
"""Latest transfers of a worker. Their medians count, of islands the fastest: they share the link
of the store, and which of two shares a link first is chance."""
REMEMBERED_ROUNDS = 32
"""Rounds that are remembered."""
FEWEST = 8
"""Rounds after which it is known what is usual."""


STEPS = {VerdictKind.COMPUTE: "compute", VerdictKind.DATA: "data", VerdictKind.SAVE: "save"}
"""Slowness in a part of a step, with its field in the vitals."""
SETTLED = dict.fromkeys(
    (*STEPS, VerdictKind.LOAD, VerdictKind.LINK, VerdictKind.SENDING, VerdictKind.RECEIVING), 5.0
)
SETTLED[VerdictKind.EVERYBODY] = 10.0
"""Seconds for which it also has to last, as two rounds of a small model are soon over."""
LINK_ENDS = re.compile(" -> | - ")
Path = tuple[str, str]
"""Sender and receiver."""


@dataclass
class Suspicion:
    verdict: Verdict
    first: float
    last: float
    rounds: int = 0
    missed: int = 0
    """Rounds since the last one with the cause."""
    stands: bool = False
    """Whether it is a verdict."""


class Observation(NamedTuple):
    """What is known of all workers after a round, or while training waits for one."""

    reports: Mapping[str, Report]
    step: int
    now: float
    """Seconds, on the clock of who judges."""
    cycle: float | None = None
    """Seconds of a cycle, in which each fragment has a round. None: training waits for a round, and
    only who is absent counts."""


class Judge:
    """Call `hear` with one observation after the other.

    `has_links`: workers exchange over links, not the loopback.
    """

    def __init__(self, *, has_links: bool = True) -> None:
        self._has_links = has_links
        self._usual = Usual()
        self._suspicions: dict[Cause, Suspicion] = {}
        self._ended = Counter[Cause]()
        self._short = set[str]()
        """Workers that are short of cores now."""

    @property
    def verdicts(self) -> dict[Cause, Verdict]:
        return {
            cause: suspicion.verdict
            for cause, suspicion in self._suspicions.items()
            if suspicion.stands
        }

    def hear(self, observed: Observation) -> list[Verdict]:
        """Return verdicts that begin or end."""
        is_round = observed.cycle is not None
        now = observed.now
        causes = dict(absences(observed.reports))
        if observed.cycle is not None:
            causes |= self._suspects(observed.reports, observed.cycle)
        changed = list[Verdict]()
        for cause, evidence in causes.items():
            suspicion = self._suspect(Verdict(cause, evidence, observed.step), now)
            if is_round:
                suspicion.rounds += 1
            if not suspicion.stands and (not is_round or self._has_settled(suspicion, now)):
                suspicion.stands = True
                changed.append(suspicion.verdict)
        if is_round:  # otherwise, nothing is known of those that are there
            changed += self._end(self._suspicions.keys() - causes.keys(), now)
        return changed

    def _suspect(self, verdict: Verdict, now: float) -> Suspicion:
        new = Suspicion(verdict, first=now, last=now)
        suspicion = self._suspicions.setdefault(verdict.cause, new)
        suspicion.verdict = replace(suspicion.verdict, evidence=verdict.evidence)
        suspicion.last = now
        suspicion.missed = 0
        return suspicion

    def _has_settled(self, suspicion: Suspicion, now: float) -> bool:
        """Return whether a cause has lasted. What comes and goes has to last longer each time."""
        cause = suspicion.verdict.cause
        seconds = SETTLED.get(cause.kind, 0.0) * 2 ** min(self._ended[cause], MOST_DOUBLED)
        return now - suspicion.first >= seconds and suspicion.rounds >= IN_A_ROW

    def _end(self, causes: Collection[Cause], now: float) -> Iterator[Verdict]:
        """Yield the verdicts whose causes have been gone for long enough."""
        for cause in causes:
            suspicion = self._suspicions[cause]
            if suspicion.stands and self._is_not_judged(cause):
                continue
            suspicion.missed += 1
            settled = now - suspicion.last >= SETTLED.get(cause.kind, 0.0)
            if (settled or not suspicion.stands) and suspicion.missed >= IN_A_ROW:
                del self._suspicions[cause]
                if suspicion.stands:
                    self._ended[cause] += 1
                    yield replace(suspicion.verdict, over=True)

    def _suspects(self, reports: Mapping[str, Report], cycle: float) -> Iterator[tuple[Cause, str]]:
        """Yield what is wrong with workers that take part in rounds."""
        usual = self._usual
        present = {name: report for name, report in reports.items() if not report.absent}
        yield from wrong_numbers(present)
        present_vitals = {name: report.vitals for name, report in present.items()}
        named = {culprit for kind, culprit in self.verdicts if kind is VerdictKind.LOAD}
        yield from short_of_cores(present_vitals, named)
        judged = without_short_of_cores(list(reports), present_vitals)
        self._short = present_vitals.keys() - judged.keys()
        for name in self._short:  # what it has measured lately is no measure of its links
            usual.transfers.pop(name, None)
        steps = list(slow_steps(judged, usual))
        yield from steps
        if not self._has_links:
            return
        # The others have exchanged before a late worker comes, so its transfers alone share links.
        late = {cause.culprit for cause in (*dict(steps), *self.verdicts) if cause.kind in STEPS}
        for cause, text in slow_links(list(reports), judged, cycle=cycle, usual=usual):
            if not late.intersection(LINK_ENDS.split(cause.culprit)):
                yield cause, text

    def _is_not_judged(self, cause: Cause) -> bool:
        """Return whether it cannot be told if a cause has ended, as workers are short of cores."""
        if cause.kind not in SETTLED or cause.kind is VerdictKind.LOAD:
            return False
        if cause.culprit == ALL_WORKERS:
            return bool(self._short)
        return not self._short.isdisjoint(LINK_ENDS.split(cause.culprit))


class Usual:
    """What has been usual so far."""

    def __init__(self) -> None:
        self._shares: dict[Cause, deque[float]] = {}
        """Latest deviations from the others, as shares of a step."""
        self._latest: dict[Cause, deque[float]] = {}
        """Deviations in the last rounds, whether they stand out or not."""
        self._medians: dict[str, deque[float]] = {}
        """Latest medians over workers of what all should notice."""
        self.transfers: dict[str, deque[tuple[float, ...]]] = {}
        """Latest ones of each worker."""

    def stands_out(self, cause: Cause, share: float) -> bool:
        """Return whether a deviation from the others stands out, and note it."""
        shares = self._shares.setdefault(cause, deque(maxlen=REMEMBERED_ROUNDS))
        latest = self._latest.setdefault(cause, deque(maxlen=LASTING))
        latest.append(share)
        limit = 0.0
        if len(shares) >= FEWEST:
            middle = statistics.median(shares)
            limit = NOISE * statistics.median(abs(usual - middle) for usual in shares)
        lasts = len(latest) == LASTING and statistics.median(latest) > max(FLOOR, limit / 2)
        is_unusual = share > (FLOOR if lasts else max(FLOOR, limit))
        if not is_unusual:  # what stands out is no measure of the usual
            shares.append(share)
        return is_unusual

    def before(self, name: str, value: float) -> float:
        """Return the usual value of earlier rounds, 0 if it is not known, and note this one."""
        values = self._medians.setdefault(name, deque(maxlen=REMEMBERED_ROUNDS))
        usual = statistics.median(values) if len(values) >= FEWEST else 0.0
        if not usual or value < EVERYBODY_RATIO * usual:
            values.append(value)
        return usual

    def of_transfers(self, name: str, now: Vitals) -> Vitals:
        """Return the vitals of a worker with what is usual of its latest transfers."""
        latest = self.transfers.setdefault(name, deque(maxlen=MEASURED))
        measured = now.upload, now.download, *now.transfers
        if any(measured) and (not latest or measured != latest[-1]):
            latest.append(measured)  # an island says the same until its next transfer
        if not latest:
            return now
        # A column has what was measured of one transfer in each of the latest rounds.
        columns = zip(*latest, strict=True)
        known = ([seconds for seconds in column if seconds > 0] or [0.0] for column in columns)
        uploads, downloads, *transfers = known
        return now._replace(
            # Of one that makes no steps, only what it says at present counts.
            upload=min(uploads) if now.step or now.upload else 0.0,
            download=min(downloads) if now.step or now.download else 0.0,
            transfers=tuple(map(statistics.median, transfers)) if now.step else now.transfers,
        )


# --- cores and steps ------------------------------------------------------------------------------


def absences(reports: Mapping[str, Report]) -> Iterator[tuple[Cause, str]]:
    for name, report in reports.items():
        if report.absent:
            yield Cause(VerdictKind(report.absent), name), report.evidence


def wrong_numbers(reports: Mapping[str, Report]) -> Iterator[tuple[Cause, str]]:
    """Yield the workers whose deltas are left out.

    `reports`: those of workers that take part. What others have sent last is over.
    """
    for name, report in reports.items():
        if report.flags & NOT_FINITE:
            yield Cause(VerdictKind.NUMBERS, name), "its delta is not finite"
        elif report.flags & OUTLIER:
            yield Cause(VerdictKind.NUMBERS, name), "its delta is far above its usual norm"


def short_of_cores(
    present_vitals: Mapping[str, Vitals], named: Collection[str]
) -> Iterator[tuple[Cause, str]]:
    """Yield the workers that are short of cores, together if all are and none was named."""
    short = {name: vitals for name, vitals in present_vitals.items() if is_short_of_cores(vitals)}
    if not short:
        return
    known = sum(vitals.step > 0 for vitals in present_vitals.values())
    if named == {ALL_WORKERS} or (not named and 1 < known == len(short)):
        short = {ALL_WORKERS: max(short.values(), key=lambda vitals: vitals.queued / vitals.step)}
    for name, vitals in short.items():
        text = f"{vitals.queued:.3g} of {vitals.step:.3g} s per step were spent waiting for one"
        yield Cause(VerdictKind.LOAD, name), text


def is_short_of_cores(vitals: Vitals) -> bool:
    return vitals.queued > SHORT_OF_CORES * vitals.step > 0


def without_short_of_cores(
    names: list[str], present_vitals: Mapping[str, Vitals]
) -> dict[str, Vitals]:
    """Return the vitals of the workers that have enough cores, without the times of transfers from
    the others.

    `names`: those of all workers, as transfers are in their order.
    """
    short = {name for name, vitals in present_vitals.items() if is_short_of_cores(vitals)}
    if not short:
        return dict(present_vitals)
    judged = dict[str, Vitals]()
    for receiver, vitals in present_vitals.items():
        if receiver not in short:
            transfers = [
                0.0 if sender in short else seconds
                for sender, seconds in zip(names, vitals.transfers, strict=False)
            ]
            judged[receiver] = vitals._replace(transfers=tuple(transfers))
    return judged


def slow_steps(present_vitals: Mapping[str, Vitals], usual: Usual) -> Iterator[tuple[Cause, str]]:
    known = {name: vitals for name, vitals in present_vitals.items() if vitals.step > 0}
    if len(known) < 2:
        return
    for name, vitals in known.items():
        others = [other for key, other in known.items() if key != name]
        step = statistics.median(other.step for other in others)
        for kind, field in STEPS.items():
            mine = getattr(vitals, field)
            others_take = statistics.median(getattr(other, field) for other in others)
            cause = Cause(kind, name)
            if usual.stands_out(cause, (mine - others_take) / step):
                compared = "the other workers" if len(others) > 1 else "the other worker"
                yield cause, f"{mine:.3g} s per step ({compared}: {others_take:.3g} s)"
    steps = [vitals.step for vitals in known.values()]
    step = statistics.median(steps)
    before = usual.before("step", step)
    if before and min(steps) > EVERYBODY_RATIO * before:
        text = f"{step:.3g} s per step (before: {before:.3g} s)"
        yield Cause(VerdictKind.EVERYBODY, ALL_WORKERS), text


# --- links ----------------------------------------------------------------------------------------


def slow_links(
    names: list[str], present_vitals: Mapping[str, Vitals], cycle: float, usual: Usual
) -> Iterator[tuple[Cause, str]]:
    """Yield the workers and the paths between them that are slow.

    `names`: those of all workers, also of absent ones.
    """
    present_vitals = {
        name: usual.of_transfers(name, vitals) for name, vitals in present_vitals.items()
    }
    slow = dict[Cause, str]()
    for kind, field in (VerdictKind.SENDING, "upload"), (VerdictKind.RECEIVING, "download"):
        seconds_of = {name: getattr(vitals, field) for name, vitals in present_vitals.items()}
        known = {name: seconds for name, seconds in seconds_of.items() if seconds}
        for name, seconds in known.items():
            others = [other for key, other in known.items() if key != name]
            others_take = statistics.median(others) if others else math.inf
            if _is_slow(seconds, others_take, cycle):
                text = f"{seconds:.3g} s for the {field}s of a cycle (others: {others_take:.3g} s)"
                slow[Cause(kind, name)] = text
    for cause, text in slow.items():
        # An upload waits for its answers, which come behind all that is downloaded.
        if (
            cause.kind is VerdictKind.RECEIVING
            or Cause(VerdictKind.RECEIVING, cause.culprit) not in slow
        ):
            yield cause, text
    yield from slow_transfers(names, present_vitals, cycle=cycle, usual=usual)


def slow_transfers(
    names: list[str], present_vitals: Mapping[str, Vitals], cycle: float, usual: Usual
) -> Iterator[tuple[Cause, str]]:
    """Look at transfers between workers of one job."""
    seconds_of = {
        (sender, receiver): seconds
        for receiver, vitals in present_vitals.items()
        for sender, seconds in zip(names, vitals.transfers, strict=False)
        if seconds > 0
    }
    if not seconds_of:
        return
    median = statistics.median_low(seconds_of.values())  # one of two directions may be slow
    before = usual.before("transfer", median)
    slow = list(_slow_paths(seconds_of, median, cycle))
    for path in slow:
        text = f"{seconds_of[path]:.3g} s for the transfers of a cycle (others: {median:.3g} s)"
        if len(present_vitals) == 2:
            text += "; of two workers, it cannot be told which side is slow"
        yield Cause(VerdictKind.LINK, " -> ".join(path)), text
    both_ways = {*slow, *(path[::-1] for path in slow)}
    other_paths = {path: seconds for path, seconds in seconds_of.items() if path not in both_ways}
    sides = list(_slow_sides(other_paths, cycle))
    yield from sides
    if before and _is_slow(median, before, cycle) and not (slow or sides):
        culprit = " - ".join(present_vitals) if len(present_vitals) == 2 else ALL_WORKERS
        text = f"{median:.3g} s for the transfers of a cycle (before: {before:.3g} s)"
        yield (
            Cause(VerdictKind.LINK if len(present_vitals) == 2 else VerdictKind.EVERYBODY, culprit),
            text,
        )


def _slow_paths(seconds_of: Mapping[Path, float], usual: float, cycle: float) -> Iterator[Path]:
    """Yield paths between two workers that are slow, while the others from and to them are not."""
    ratio = PATH_RATIO if len(seconds_of) > 2 else LINK_RATIO

    def is_of_a_side(path: Path, end: int) -> bool:
        others = [
            seconds for key, seconds in seconds_of.items() if key != path and key[end] == path[end]
        ]
        # Of three workers, most paths are slow if one of them is slow in both directions.
        elsewhere = [seconds for key, seconds in seconds_of.items() if path[end] not in key]
        if not others:
            return False
        return _is_slow(statistics.median(others), statistics.median(elsewhere or [usual]), cycle)

    for path, seconds in seconds_of.items():
        is_single = not (is_of_a_side(path, 0) or is_of_a_side(path, 1))
        waits = _waits_for(seconds_of.get(path[::-1], 0.0), seconds)
        if _is_slow(seconds, usual, cycle, ratio=ratio) and is_single and not waits:
            yield path


def _slow_sides(seconds_of: Mapping[Path, float], cycle: float) -> Iterator[tuple[Cause, str]]:
    """Yield workers most of whose transfers in one direction are slow against those of the others.

    The slowest comes first, and its transfers say nothing about the other ends.
    """
    remaining = dict(seconds_of)
    named = dict[str, float]()
    while remaining:
        least = 0.0
        ratio = LINK_RATIO
        if named:  # next to a slow side, the other links are not shared as they were
            least = statistics.median_low(remaining.values())
            ratio = PATH_RATIO
        slow = _compare_sides(remaining, cycle, least=least, ratio=ratio)
        if not slow:
            return
        worst = max(slow, key=slow.__getitem__)
        seconds, usual = slow[worst]
        end = 0 if worst.kind is VerdictKind.SENDING else 1
        remaining = {
            path: transfer for path, transfer in remaining.items() if path[end] != worst.culprit
        }
        if not _waits_for(named.setdefault(worst.culprit, seconds), seconds):
            yield worst, f"{seconds:.3g} s for its transfers of a cycle (others: {usual:.3g} s)"


def _compare_sides(
    seconds_of: Mapping[Path, float], cycle: float, *, least: float, ratio: float
) -> dict[Cause, tuple[float, float]]:
    """Return the sides that are slow against the paths of the others: the mean seconds of their
    transfers, and the usual ones, which are at least `least`."""
    slow = dict[Cause, tuple[float, float]]()
    for end, kind in enumerate((VerdictKind.SENDING, VerdictKind.RECEIVING)):
        for name in dict.fromkeys(path[end] for path in seconds_of):
            own_seconds = [seconds for path, seconds in seconds_of.items() if path[end] == name]
            others = [seconds for path, seconds in seconds_of.items() if name not in path]
            if len(own_seconds) < 2 or not others:
                continue
            mean = statistics.fmean(own_seconds)
            usual = max(least, statistics.median(others))
            is_most = statistics.median_low(own_seconds) > MOST_RATIO * usual
            if is_most and _is_slow(mean, usual, cycle, ratio=ratio):
                slow[Cause(kind, name)] = mean, usual
    return slow


def _waits_for(other_way: float, seconds: float) -> bool:
    """Return whether this direction may only be slow because its answers wait in the other one."""
    return other_way >= LINK_RATIO * seconds


def _is_slow(seconds: float, usual: float, cycle: float, *, ratio: float = LINK_RATIO) -> bool:
    """Return whether transfers take much longer than usual, as a multiple and as a share of the
    cycle."""
    return seconds > ratio * usual and seconds - usual > FLOOR * cycle
