"""Records of a worker: RUN/worker-K/metrics.jsonl, which its first rank writes, and its boards.

Each line is a JSON object: a `StartRecord`, a `RoundRecord`, a `VerdictRecord`, a `PhaseRecord`, a
`SampleRecord`, or the numbers of a step (metrics.py), which has no `kind`. docs/report-and-plan.md
describes them.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import msgspec

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.components.metrics import Record, metric_of
from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.diloco.flags import FLAG_NAMES
from torchtitan_diloco.diloco.metrics import Scope

if TYPE_CHECKING:
    from torchtitan_diloco.components.boards.base import GuardedBoard
    from torchtitan_diloco.diloco.fragments import Fragment
    from torchtitan_diloco.diloco.round import Round

METRICS_FILE = "metrics.jsonl"
Kind = TypeVar("Kind", bound=msgspec.Struct)
NAN = math.nan


class StartRecord(msgspec.Struct, tag_field="kind", tag="start"):
    """The run began, or was resumed, after this step."""

    step: int
    time: float
    workers: int
    """Number of workers of the whole run, or of islands that begin together."""
    parameters: int
    run: str = ""
    """Id of the run that an island is in, which all its islands share."""


class RoundRecord(msgspec.Struct, tag_field="kind", tag="round"):
    """A worker's part of one exchange of one fragment. Moments are those of its first rank."""

    step: int
    """Step after which the fragment was applied."""
    fragment: int
    fragment_name: str
    outer_round: int
    """Number of exchanges of this fragment so far."""
    sent_step: int
    parameters: int
    """Number of parameters in the fragment."""
    participants: int = 0
    """Workers whose delta is in the mean."""
    left_out: list[str] = []
    """Reasons why the delta of this worker is not in the mean."""
    at_seconds: dict[str, float] = {}
    """Moments of the exchange by name, in seconds since 1970. `round_record` lists them."""
    numbers: dict[str, float] = {}
    """Metrics of the round, merged over the ranks of the worker. Those that are not known, such as
    norms that were not measured in this round, are left out."""
    heard_after_seconds: dict[int, float] = {}
    """Time from sending the header of this worker to receiving that of another, by other worker."""
    received_bits_per_second_from: dict[int, float] = {}
    """Rate at which all ranks together received the payload of another worker, by other worker.
    Left out if it was too short on a rank to be measured."""

    def number(self, name: str) -> float:
        """Return a metric of the round, NaN if it is not known."""
        return self.numbers.get(name, NAN)

    def set_numbers(self, merged: Mapping[str, float]) -> None:
        """Take the numbers of the worker, and compute those that follow from them."""
        norms = merged["round/delta_norm"] * merged["round/mean_norm"]
        cosine = merged["round/dot_with_mean"] / norms if norms else NAN
        numbers = {**merged, "round/cosine_to_mean": cosine}
        self.numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}

    def set_rates(self, of_ranks: Sequence[Sequence[float]]) -> None:
        """Take the rates at which each rank of the worker received, by other worker: they share
        its link at the same time."""
        sums = map(math.fsum, zip(*of_ranks, strict=True))
        rates = {other: rate for other, rate in enumerate(sums) if math.isfinite(rate)}
        self.received_bits_per_second_from = rates

    def seconds(self, start: str, end: str) -> float:
        """Return the time between two moments, 0 if they are in the other order."""
        between = self.at_seconds.get(end, NAN) - self.at_seconds.get(start, NAN)
        return max(between, 0.0)  # NaN stays NaN

    @property
    def waited_seconds(self) -> float:
        """Seconds in which training waited for the result."""
        return self.seconds("asked", "arrived")

    @property
    def ended(self) -> float:
        """The latest of its moments that is known, or NaN."""
        return max(filter(math.isfinite, self.at_seconds.values()), default=NAN)

    @property
    def waited_for_headers(self) -> float:
        """Seconds from sending the own header to receiving that of the last other worker."""
        return max(self.heard_after_seconds.values(), default=NAN)


class VerdictRecord(msgspec.Struct, tag_field="kind", tag="verdict"):
    """A verdict about a worker begins, or is over."""

    step: int
    time: float
    what: str
    """Name of the problem, such as "slow compute"."""
    culprit: str
    since: int
    """Step after which the problem was first seen."""
    evidence: str
    over: bool


class PhaseRecord(msgspec.Struct, tag_field="kind", tag="phase"):
    """A mixture of several corpora is read from this step on: at the start, in a phase, or since
    the run was resumed with other weights."""

    step: int
    """Step after which the mixture begins."""
    time: float
    mixture: str
    number: int = 0
    """Number of the phase: 0 is `data.mixture`, 1 the first one of `data.phases`."""
    share: float = NAN
    """Share of the run that was trained before the mixture, from 0 to 1."""


class SampleRecord(msgspec.Struct, tag_field="kind", tag="sample"):
    """A text that the shared parameters wrote after this step."""

    step: int
    time: float
    text: str


def round_record(exchange: "Round", fragment: "Fragment", clock: float) -> RoundRecord:
    """Return the record of a round, without its numbers and rates, which other ranks have too.

    `clock`: the wall clock less time.perf_counter.
    """
    traffic = exchange.traffic
    moments = {
        "due": exchange.due,
        "taken": exchange.taken,
        "begun": exchange.begun,
        "encoded": traffic.encoded,
        "heard": max(traffic.heard.values(), default=NAN),
        "received": traffic.received,
        "ready": exchange.ready,
        "asked": exchange.asked,
        "arrived": exchange.fetched,
        "applied": exchange.applied,
    }
    return RoundRecord(
        step=exchange.applied_step,
        fragment=exchange.fragment,
        fragment_name=fragment.name,
        outer_round=exchange.outer_round,
        sent_step=exchange.sent_step,
        parameters=fragment.parameters,
        participants=exchange.participants,
        left_out=[name for flag, name in FLAG_NAMES.items() if exchange.flags & flag],
        at_seconds={name: clock + at for name, at in moments.items() if math.isfinite(at)},
        heard_after_seconds={other: traffic.heard_after(other) for other in traffic.heard},
    )


def to_line(record: msgspec.Struct | Record) -> str:
    """Return a record as a line of JSON, which has no NaN and infinity: in a step they are text,
    as they mean something there, and in other records they are left out."""
    if isinstance(record, msgspec.Struct):
        fields = msgspec.to_builtins(record, str_keys=True).items()
        known = {name: value for name, value in fields if value == value}  # NaN is not itself
        return json.dumps(known) + "\n"
    as_text = {
        name: str(value)
        for name, value in record.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    return json.dumps(record | as_text) + "\n"


def from_record(kind: type[Kind], record: Record) -> Kind:
    """Return the record of a line. Raise msgspec.ValidationError if it is damaged."""
    return msgspec.convert(record, kind, str_keys=True)


class RecordFiles:
    """Writes the records of a worker after those of earlier starts. A full disk loses only records,
    and a board that fails only its curves.

    `folder`: that of the worker, None to write nothing. `workers`: number in the job. `of_run`:
    whether this worker shows the numbers of the run on its boards.
    """

    def __init__(
        self,
        config: Metrics,
        folder: Path | None,
        start: StartRecord,
        settings: Mapping[str, Any],
        *,
        workers: int,
        of_run: bool,
    ) -> None:
        self._folder = folder
        self._start = start
        self._of_run = of_run
        self._first_step = start.step + 1
        self._failed = False
        self._lines: TextIO | None = None
        self._boards: list[GuardedBoard] = []
        if folder is None:
            return
        with self._tolerating_a_full_disk():
            self._lines = self._open(folder)
        if config.boards:
            from torchtitan_diloco.components.boards import Shown, open_boards

            shown = Shown(
                folder=folder,
                step=start.step,
                workers=workers,
                settings=settings,
                group=start.run,
            )
            self._boards = open_boards(config, shown, of_run=of_run)

    def _open(self, folder: Path) -> TextIO:
        """Open the file, and write the start, after which readers drop what it repeats."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        is_torn = path.exists() and not _ends_with_a_line(path)
        lines = path.open("a", buffering=1, encoding="utf-8")
        if is_torn:  # an earlier process was killed while it wrote
            lines.write("\n")
        lines.write(to_line(self._start))
        return lines

    def read(self) -> list[Record]:
        """Return all records, also of the run before a resume."""
        path = None if self._folder is None else self._folder / METRICS_FILE
        return read_records(path)[0] if path is not None and path.exists() else []

    def write(self, record: msgspec.Struct | Record) -> None:
        """Write a line of JSON. Show the records of steps on the boards."""
        with self._tolerating_a_full_disk():
            if self._folder is not None:
                self._lines = self._lines or self._open(self._folder)
                self._lines.write(to_line(record))
        if isinstance(record, dict):
            for board in self._boards:
                board.add(record["step"], dict(self._shown(record)))
        elif isinstance(record, PhaseRecord) and record.step >= self._first_step:
            for board in self._boards:  # what a run starts with is in its settings
                board.add_text(record.step, "phases", record.mixture)
        elif isinstance(record, SampleRecord):
            for board in self._boards:
                board.add_sample(record.step, record.text)
        elif isinstance(record, VerdictRecord):
            state = "over" if record.over else record.evidence
            text = f"{record.culprit}: {record.what}"
            if state:
                text += f": {state}"
            for board in self._boards:
                board.add_text(record.step, "verdicts", text)

    def _shown(self, record: Record) -> Iterator[tuple[str, float]]:
        """Yield the values for the boards, without outliers of the first step."""
        is_first = record["step"] == self._first_step
        for name, value in record.items():
            metric = metric_of(name)
            if metric is None or (is_first and metric.is_slow_at_first):
                continue
            if metric.scope is Scope.WORKER or self._of_run:
                yield name, value

    def close(self) -> None:
        with suppress(OSError):
            if self._lines is not None:
                self._lines.close()
        for board in self._boards:
            board.close()

    @contextmanager
    def _tolerating_a_full_disk(self) -> Iterator[None]:
        """Log the first error of the body that the disk causes, and continue after it."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                reason = f"cannot read or write records in {self._folder} ({error.strerror})"
                logger.error(f"{reason}; they are lost until there is room again")
            self._failed = True


def _ends_with_a_line(path: Path) -> bool:
    """Return whether the last line of a file is whole, as in an empty file."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def read_records(path: Path) -> tuple[list[Record], int]:
    """Return the records of a file, and the number of lines that cannot be read.

    A process that resumes a run repeats the steps after its start. What was recorded of them before
    is dropped.
    """
    lines, unreadable = read_json_lines(path)
    records = list[Record]()
    for record in lines:
        if not isinstance(record.get("step"), int):
            unreadable += 1
            continue
        if record.get("kind") == "start":
            records = [earlier for earlier in records if earlier["step"] <= record["step"]]
        records.append(record)
    return records, unreadable


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a JSON Lines file, and the number of unreadable lines.

    A last line that is still being written is skipped.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.split("\n") if line.strip()]
    records = []
    unreadable = 0
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif number < len(lines) or text.endswith("\n"):
            unreadable += 1
    return records, unreadable


def number(value: object) -> float:
    """Convert a value of a JSON record to a float, NaN if it is not a number."""
    if isinstance(value, str) and value in ("inf", "-inf"):  # JSON has no such numbers
        return float(value)
    return float(value) if isinstance(value, int | float) else math.nan
