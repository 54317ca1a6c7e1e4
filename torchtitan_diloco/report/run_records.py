"""Read runs: records (docs/report-and-plan.md) and settings of their folders, and histories."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tomli
from numpy.typing import NDArray

from torchtitan_diloco.base.user import UserError, no_run
from torchtitan_diloco.components.metrics import (
    GRADIENTS,
    SENT,
    Gradients,
    Record,
    Totals,
    all_reduce_bytes,
    baseline_bytes,
    kept_time,
    merge_totals,
    totals_of,
)
from torchtitan_diloco.components.records import (
    METRICS_FILE,
    PhaseRecord,
    RoundRecord,
    StartRecord,
    VerdictRecord,
    from_record,
    number,
    read_records,
)
from torchtitan_diloco.config.schema import Parallel, flatten
from torchtitan_diloco.islands.runs import is_run_in_folder
from torchtitan_diloco.islands.stays import Stay
from torchtitan_diloco.report.run_history import RunHistory, read_history

Array = NDArray[np.float64]
ELAPSED_SECONDS = "worker/elapsed_seconds"
MOST_NAMED = 5
"""Most runs that an error names."""


@dataclass(frozen=True)
class Worker:
    """Records of a worker. Numbers that are not known are NaN."""

    name: str
    """`worker 0`, or the name of the island."""
    starts: Sequence[StartRecord] = ()
    steps: Sequence[Record] = ()
    """One record for each step, in order, with the validation after the step."""
    rounds: Sequence[RoundRecord] = ()
    unreadable: int = 0
    """Number of lines that are not a record, without an incomplete last line."""
    verdicts: Sequence[VerdictRecord] = ()
    """Begins and ends of verdicts, in order."""
    phases: Sequence[PhaseRecord] = ()
    """Mixtures of corpora, in order."""

    @property
    def run_id(self) -> str:
        return self.starts[-1].run if self.starts else ""

    @property
    def stay(self) -> Stay:
        """Its signs of life and late parts, as an island that has begun."""
        signs = [start.time for start in self.starts]
        signs += [number(record.get("time")) for record in self.steps]
        signs += [record.at_seconds.get("applied", np.nan) for record in self.rounds]
        times = sorted(filter(math.isfinite, signs)) or [0.0]
        stay = Stay(self.name, [[times[0], times[0]]])
        for at in times:
            stay.see(at)
        # A part was late if an entry of its fragment was applied without it after it was sent. An
        # entry without a part of this island has nothing that was encoded.
        missed = defaultdict[int, int](int)
        for record in self.rounds:
            if "encoded" not in record.at_seconds:
                missed[record.fragment] = record.step
                continue
            stay.parts += 1
            at = record.at_seconds.get("applied", np.nan)
            if missed[record.fragment] > record.sent_step and math.isfinite(at):
                stay.add_late(at)
        return stay

    @property
    def begun_verdicts(self) -> Iterator[VerdictRecord]:
        return (verdict for verdict in self.verdicts if not verdict.over)

    def end_of(self, verdict: VerdictRecord) -> float:
        """Return when a verdict was over, or the last sign of life of the process that made it: the
        next one begins without verdicts."""
        restarts = (start.time for start in self.starts if start.time > verdict.time)
        end = min(restarts, default=math.inf)
        for later in self.verdicts:
            is_same = (later.what, later.culprit) == (verdict.what, verdict.culprit)
            if later.over and is_same and verdict.time <= later.time < end:
                return later.time
        signs = (number(record.get("time")) for record in self.steps)
        return max((at for at in signs if verdict.time <= at < end), default=verdict.time)

    @cached_property
    def totals(self) -> Totals:
        """Numbers of all steps with the last method of the run."""
        logged = [record for record in self.steps if "worker/steps" in record]
        return totals_of(logged, streaming="worker/exposed_seconds" in (logged or [{}])[-1])

    @property
    def compute_spread(self) -> float:
        """Standard deviation of the compute of a step within the intervals, 0 if it is not
        known."""
        rows = [
            (number(record.get("worker/steps")), number(record.get("worker/compute_spread")))
            for record in self.steps
        ]
        known = [row for row in rows if np.isfinite(row).all()]
        if not known:
            return 0.0
        counts, spreads = np.array(known).T
        return float(np.sqrt(np.average(spreads**2, weights=counts)))


@dataclass(frozen=True)
class Run:
    """Records of the workers of a run."""

    name: str
    """Unique among the runs of a report."""
    folder: Path
    workers: Sequence[Worker]
    settings: Mapping[str, Any]
    """Dotted key -> value. Empty without a config.toml."""
    history: RunHistory | None = None

    @property
    def source(self) -> Worker:
        """The worker that has the curves of the run: the first, or another one whose records begin
        earlier. Of islands, the first one that has steps."""
        if self.is_of_islands:
            return next((worker for worker in self.workers if worker.steps), self.workers[0])
        return max(self.workers, key=lambda worker: len(worker.steps))

    def curve(self, key: str, source: Worker | None = None) -> tuple[Array, Array]:
        """Return the steps that have a value of this key, and the values. Default: of the run."""
        records = (source or self.source).steps
        known = [record for record in records if record.get(key) is not None]
        steps = [number(record["step"]) for record in known]
        values = [number(record[key]) for record in known]
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def came_after(self, worker: Worker) -> float:
        """Return the seconds from the start of the run to that of a worker's kept records."""
        begins = (
            number(record.get("time")) - number(record.get(ELAPSED_SECONDS))
            for record in worker.steps
        )
        begin = next(filter(math.isfinite, begins), 0.0)
        starts = [start.time for member in self.workers for start in member.starts]
        return max(0.0, begin - min(starts, default=np.inf))

    def last(self, key: str) -> tuple[int, float]:
        """Return the last step that has a value of this key, and the value: else 0 and NaN."""
        steps, values = self.curve(key)
        return (int(steps[-1]), float(values[-1])) if steps.size else (0, np.nan)

    @cached_property
    def totals(self) -> Totals:
        """Totals of the curves' worker, where world/ is of all ranks, or those of all islands."""
        if not self.is_of_islands:
            return self.source.totals
        return merge_totals([worker.totals for worker in self.workers])

    @cached_property
    def exchanges(self) -> list[list[RoundRecord | None]]:
        """The rounds of all workers, in the order of time. Those whose time is not known come
        first."""
        exchanges = defaultdict[tuple[int, int], list[RoundRecord | None]](
            lambda: [None] * len(self.workers)
        )
        for place, worker in enumerate(self.workers):
            for record in worker.rounds:
                turn = record.outer_round if self.is_of_islands else record.sent_step
                exchanges[turn, record.fragment][place] = record
        return sorted(exchanges.values(), key=ended_at)

    @property
    def worker_names(self) -> list[str]:
        return [worker.name for worker in self.workers]

    @property
    def last_step(self) -> int:
        steps = self.source.steps
        return int(steps[-1]["step"]) if steps else 0

    @property
    def is_of_islands(self) -> bool:
        return self.history is not None or bool(self.settings.get("islands.name"))

    @cached_property
    def stays(self) -> Sequence[Stay]:
        """When each island was there, by the history of the run, or by its records."""
        if not self.is_of_islands:
            return []
        if self.history is not None:
            return self.history.stays
        return [worker.stay for worker in self.workers if worker.starts]

    @cached_property
    def verdicts(self) -> list[tuple[VerdictRecord, float]]:
        """Verdicts about the workers, and when each was over, or the process that made it wrote its
        last record.

        The workers of one job say the same, islands each what they find.
        """
        judging = self.workers if self.is_of_islands else self.workers[:1]
        verdicts = [
            (verdict, worker.end_of(verdict))
            for worker in judging
            for verdict in worker.begun_verdicts
        ]
        return sorted(verdicts, key=lambda pair: pair[0].time)

    @cached_property
    def mixtures(self) -> list[tuple[str, PhaseRecord]]:
        """The mixtures of corpora that were read one after the other, and what began each."""
        mixtures = list[tuple[str, PhaseRecord]]()
        for record in self.source.phases:
            before = mixtures[-1][1] if mixtures else None
            if before is not None and before.mixture == record.mixture:
                continue  # an island began again
            name = f"phase {record.number}" if record.number else "data.mixture"
            if before is not None and before.number == record.number:
                name = "changed"
            mixtures.append((name, record))
        return mixtures

    @property
    def kept_time(self) -> dict[str, float]:
        """Percent of the wall time, by span, that went into steps that were kept, if it is known.
        Islands keep the work of others, which their records do not tell."""
        source = self.source
        starts = [start.time for start in source.starts]
        return {} if self.is_of_islands else kept_time(starts, source.steps)

    @property
    def tokens_per_second(self) -> float:
        """Median of all workers together, which each has in its records, or sum of islands."""
        medians = []
        for worker in self.workers if self.is_of_islands else [self.source]:
            rates = [number(record.get("speed/tokens_per_second")) for record in worker.steps]
            medians.append(of_known(np.median, np.array(rates)))
        return of_known(np.sum, np.array(medians))

    @property
    def _start(self) -> StartRecord | None:
        """The last start of the first worker that has one."""
        return next((worker.starts[-1] for worker in self.workers if worker.starts), None)

    @property
    def size(self) -> int:
        """Number of workers of the run, 0 if not known. Of islands, the most that shared a round,
        or so many as begin together."""
        sizes = [] if self._start is None else [self._start.workers]
        if self.is_of_islands:
            sizes += [record.participants for worker in self.workers for record in worker.rounds]
        return max(sizes, default=0)

    @property
    def parameters(self) -> int | None:
        return None if self._start is None else self._start.parameters

    @property
    def averaged_gradients(self) -> Gradients | None:
        """What a run with data parallelism has averaged over its workers, None in other runs."""
        if self.settings.get("diloco.method") != "none":
            return None
        return GRADIENTS.get(self.settings.get("parallel.reduce_dtype", Parallel.reduce_dtype))

    def baseline_bytes(self, steps: float | Array) -> Any:
        """Return the bytes that a worker would have sent in so many steps of the baseline."""
        if self.parameters is None or self.size <= 1:
            return steps * np.nan
        return steps * baseline_bytes(self.parameters, self.size)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each worker has sent: counted, or computed for data parallelism. NaN if not
        known."""
        gradients = self.averaged_gradients
        if gradients is None:
            return self.totals.get(SENT, np.nan)
        if self.parameters is None or self.size <= 1:
            return np.nan
        each_step = all_reduce_bytes(self.parameters, self.size, each=gradients.bytes_each)
        return self.totals.get("worker/steps", np.nan) * each_step


def ended_at(exchange: Iterable[RoundRecord | None]) -> float:
    """Return the latest moment of an exchange, on the clock of its worker, else -inf."""
    ends = (record.ended for record in exchange if record is not None)
    return max(filter(math.isfinite, ends), default=-math.inf)


def of_known(function: Callable[[Array], Any], values: Array) -> float:
    """Return a mean, median or sum of the finite values, or NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(function(known)) if known.size else np.nan


def open_runs(places: Sequence[str | Path]) -> list[Run]:
    """Read the runs in these folders, and the histories of islands at these locations.

    Folders of islands of the same run are one run.
    """
    folders = list[Path]()
    locations = list[str]()
    for place in dict.fromkeys(map(_resolved, places)):
        if isinstance(place, str):
            locations.append(place)
        else:
            folders.append(place)
    runs = _join_islands(list(map(_read_run, folders)))
    for location in locations:
        history = read_history(location)
        recorded = [run for run in runs if run.workers[0].run_id in history.ids]
        without_records = Run(history.run, Path.cwd(), workers=[Worker(history.run)], settings={})
        for run in recorded or [without_records]:
            others = [other for other in runs if other is not run]
            runs = [*others, replace(run, history=history)]
    names = [run.name for run in runs]
    return [  # with the path as the name, if several folders have the same name
        run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs
    ]


def _resolved(place: str | Path) -> str | Path:
    """Return the path of a folder with records, or the location of a run of islands."""
    if isinstance(place, str) and "://" in place:
        return place
    path = Path(place).expanduser().resolve()
    return str(path) if path.is_file() or is_run_in_folder(path) else path


def _join_islands(runs: Sequence[Run]) -> list[Run]:
    """Make one run of the islands that were in the same one."""
    joined = dict[str, Run]()
    for run in runs:
        key = (run.is_of_islands and run.workers[0].run_id) or str(run.folder)
        if before := joined.get(key):
            run = replace(before, name=key, workers=[*before.workers, *run.workers])
        joined[key] = run
    return list(joined.values())


def _read_run(folder: Path) -> Run:
    """Read a folder of workers, or of islands, each of which is a worker of its own."""
    files = list(folder.glob(f"worker-*/{METRICS_FILE}"))
    files.sort(key=lambda file: (len(str(file)), file))  # worker-10 comes after worker-9
    below = [] if files else sorted(folder.glob(f"*/worker-0/{METRICS_FILE}"))
    if not (files or below):
        raise no_run(folder, f"worker-0/{METRICS_FILE}")
    settings = [_read_settings(file.parents[1]) for file in files or below]
    names = [chosen.get("islands.name") for chosen in settings]
    islands = [name for name in names if name]  # the config of an island may be lost
    if below and (not islands or len({*islands}) < len(islands)):
        raise _several_runs(folder, [file.parents[1] for file in below])
    workers = [
        _read_worker(file, name or file.parent.name.replace("-", " "))
        for file, name in zip(files or below, names, strict=True)
    ]
    return Run(folder.name, folder, workers=workers, settings=settings[0])


def _several_runs(folder: Path, runs: Sequence[Path]) -> UserError:
    """Return the error of a folder that is no run, and has these runs in it."""
    named = ", ".join(map(str, runs[:MOST_NAMED]))
    more = f" and {len(runs) - MOST_NAMED} more" if len(runs) > MOST_NAMED else ""
    return UserError(
        f"{folder} is not the folder of a run, and not of the islands of one: give one of its "
        f"runs, or several: {named}{more}"
    )


def _read_worker(file: Path, name: str) -> Worker:
    """Read the records of a worker. Those of a step and of its validation become one."""
    steps: dict[int, dict[str, Any]] = {}
    starts = list[StartRecord]()
    rounds = list[RoundRecord]()
    verdicts = list[VerdictRecord]()
    phases = list[PhaseRecord]()
    records, unreadable = read_records(file)
    for record in records:
        try:
            match record:
                case {"kind": "start"}:
                    starts.append(from_record(StartRecord, record))
                case {"kind": "round"}:
                    rounds.append(from_record(RoundRecord, record))
                case {"kind": "phase"}:
                    phases.append(from_record(PhaseRecord, record))
                case {"kind": "verdict"}:
                    verdicts.append(from_record(VerdictRecord, record))
                case {"kind": _}:
                    pass  # of another version
                case {"step": int(step)}:  # the time of a step is not that of its validation
                    steps[step] = record | steps.get(step, {})
                case _:
                    unreadable += 1
        except msgspec.ValidationError:
            unreadable += 1
    if unreadable and not (steps or rounds or starts):
        raise UserError(f"RUN = {file} has no line that is a record of a run: give a run's folder")
    return Worker(
        name=name,
        starts=starts,
        steps=[steps[step] for step in sorted(steps)],
        rounds=rounds,
        unreadable=unreadable,
        verdicts=verdicts,
        phases=phases,
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run, without checks, or nothing if they cannot be read."""
    try:
        return flatten(tomli.loads((folder / "config.toml").read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError):
        return {}
