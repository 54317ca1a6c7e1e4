"""Records of metrics.jsonl: their fields, how they are written and read, and their timeline.

docs/report.md describes the fields. An unknown number is NaN in memory and null in the file.
Records of steps are dictionaries, because their keys depend on the run.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

import msgspec

from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.hardware import write_whole
from torchtitan_diloco.log import UserError, logger

if TYPE_CHECKING:
    from torchtitan_diloco.components.board import Board

NAN = math.nan
Record = dict[str, Any]
"""Record of a step: values by name and unit, or None if not known."""
Kind = TypeVar("Kind", bound=msgspec.Struct)


class WorkerRound(msgspec.Struct):
    """A worker's part of a round: times of its first rank, bytes and norms of all its ranks."""

    weight: float = NAN
    left_out: list[str] = []
    at_seconds: dict[str, float] = {}
    """Moments by name, on worker 0's clock: see PHASES."""
    encoding_seconds: float = NAN
    decoding_seconds: float = NAN
    sent_bytes: float = NAN
    received_bytes: float = NAN
    outer_gradient_norm: float = NAN
    cosine_to_mean: float = NAN
    drift_norm: float = NAN
    heard_after_seconds: list[float] = []
    """By sender, NaN for the worker itself."""
    received_bits_per_second_from: list[float] = []
    """Also by sender."""

    def seconds(self, start: str, end: str) -> float:
        """Return the time between two moments, 0 if they are in the other order."""
        found = self.at_seconds.get(end, NAN) - self.at_seconds.get(start, NAN)
        return max(found, 0.0)  # NaN stays NaN

    @property
    def transfer_seconds(self) -> float:
        return self.seconds("heard", "received")

    @property
    def waited_seconds(self) -> float:
        return self.seconds("asked", "arrived")


class RoundRecord(msgspec.Struct, tag_field="kind", tag="round"):
    """One exchange of one fragment."""

    step: int
    fragment: int
    fragment_name: str
    outer_round: int
    sent_step: int
    parameters: int
    participants: int = 0
    update_norm: float = NAN
    last_worker: int | None = None
    late_by_seconds: float = NAN
    workers: list[WorkerRound] = []


@dataclass(frozen=True)
class Conditions:
    """Link and speeds of a run: what its settings do not determine."""

    bits_per_second: float
    """Slowest rate at which a worker sends to, or receives from, all others together. Links are
    full duplex. All workers send the same amount, so the slowest rate counts for all."""
    step_seconds: tuple[float, ...]
    """Compute of one inner step of each worker, without any exchange."""
    latency_seconds: float = 0.0
    """One-way latency between any two workers: half of what ping shows."""
    jitter: float = 0.0
    """Standard deviation of a step's time as a share of its mean."""
    coding_bytes_per_second: float = math.inf
    """fp32 bytes that all ranks of a worker together encode or decode in a second."""
    outer_bytes_per_second: float = math.inf
    """fp32 bytes of a fragment that the outer step of a worker processes in a second."""
    codec: str = ""
    """Codec of the measured coding speed; empty if none was measured."""

    def __post_init__(self) -> None:
        steps = all(0 < seconds < math.inf for seconds in self.step_seconds)
        latency = 0 <= self.latency_seconds < math.inf
        if not (self.bits_per_second > 0 and steps and latency and 0 <= self.jitter <= 1):
            raise UserError(
                f"{self}: give a bandwidth above 0, step times above 0, a latency of 0 or more, "
                "and a jitter from 0 to 1"
            )

    @property
    def workers(self) -> int:
        return len(self.step_seconds)


class Summary(msgspec.Struct, tag_field="kind", tag="summary"):
    """End of a run. Bytes, seconds and shares are of the steps after `counted_after_step`."""

    step: int
    counted_after_step: int = 0
    validation_step: int | None = msgspec.field(name="validation/step", default=None)
    validation_loss: float = msgspec.field(
        name="validation/loss_nats_per_token_global", default=NAN
    )
    sent_bytes_mean_over_workers: float = NAN
    data_parallel_bytes_per_worker: float = NAN
    exchange_seconds_mean_over_ranks: float = NAN
    exposed_waiting_seconds_mean_over_ranks: float = NAN
    hidden_percent: float = NAN
    measured_utilisation_percent: float = NAN
    predicted_utilisation_percent: float = NAN
    longest_phase: str = ""
    observed: Conditions | None = None


def to_line(record: msgspec.Struct | Mapping[str, Any]) -> str:
    """Return a record as a line of JSON, which has no NaN and infinity: in a step they are text."""
    if not isinstance(record, msgspec.Struct):
        record = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
    return msgspec.json.encode(record).decode() + "\n"


def from_record(kind: type[Kind], record: Mapping[str, Any]) -> Kind:
    """Return the record of a line. Raise msgspec.ValidationError if it is damaged."""
    return msgspec.convert(_null_to_nan(record), kind, strict=False)


def _null_to_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _null_to_nan(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [NAN if item is None else _null_to_nan(item) for item in value]
    return value


class RecordFiles:
    """Writes records to the folder of a run, if there is one. A full disk only loses records.

    Records of steps after `step` are dropped, because a resumed run repeats these steps.
    """

    def __init__(
        self, config: Metrics, folder: Path | None, step: int, settings: Mapping[str, Any]
    ) -> None:
        self._folder, self._failed = folder, False
        self._lines: TextIO | None = None
        self._boards: list[Board] = []
        if folder is None:
            return
        drop_records_after(folder / "metrics.jsonl", step)
        self._lines = (folder / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")
        if config.tensorboard or config.wandb:
            from torchtitan_diloco.components import board  # slow to import

            if config.tensorboard:
                self._boards.append(board.TensorBoard(folder, step, settings))
            if config.wandb:
                self._boards.append(board.WeightsAndBiases(config.wandb, folder, step, settings))

    def write(self, record: msgspec.Struct | Record) -> None:
        """Write a line of JSON. Show the records of steps on the boards."""
        with self._tolerating_a_full_disk():
            if self._lines is not None:
                self._lines.write(to_line(record))
            if isinstance(record, dict):
                for board in self._boards:
                    board.add(record)

    def write_trace(self, rounds: Sequence[RoundRecord]) -> None:
        if self._folder is not None and rounds:
            with self._tolerating_a_full_disk():
                write_trace(self._folder / "traces" / "fragments.json", rounds)

    def close(self) -> None:
        for opened in (self._lines, *self._boards):
            with suppress(OSError):
                if opened is not None:
                    opened.close()

    @contextmanager
    def _tolerating_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                reason = f"cannot write records to {self._folder} ({error.strerror})"
                logger.error(f"{reason}; they are lost until there is room again")
            self._failed = True


def drop_records_after(path: Path, step: int) -> None:
    """Drop the records of later steps. With `step` 0, rename the file and keep them all."""
    if not path.exists():
        return
    if step == 0:
        names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        path.rename(aside)
        logger.warning(
            f"{path.parent} has records of a run, but no checkpoint: they are kept in {aside.name}"
        )
        return
    records, unreadable = read_json_lines(path)
    known = [record for record in records if isinstance(record.get("step"), int)]
    unreadable += len(records) - len(known)
    if unreadable:
        logger.warning(f"{unreadable} lines of {path} cannot be read and are left out")
    kept = [to_line(record) for record in known if record["step"] <= step]
    write_whole(path, "".join(kept).encode())


# --- timeline and trace file ----------------------------------------------------------------------

LANES = ("training", "exchange")
"""The training thread, and the thread that exchanges in the background."""
PHASES = {
    "taking": ("training", "due", "taken", "series-5"),
    "waiting": ("training", "asked", "arrived", "series-2"),
    "merging": ("training", "arrived", "applied", "series-4"),
    "encoding": ("exchange", "begun", "encoded", "series-1"),
    "waiting for others": ("exchange", "encoded", "heard", "series-8"),
    "transfer": ("exchange", "heard", "received", "series-3"),
    "outer step": ("exchange", "received", "ready", "series-6"),
}
"""Lane, start and end among `WorkerRound.at_seconds`, and colour."""
PHASE_COLOURS = {"computing": "band"} | {name: phase[-1] for name, phase in PHASES.items()}


class Phase(NamedTuple):
    worker: int
    lane: str
    start_seconds: float
    end_seconds: float
    name: str
    """A key of PHASES."""
    round: RoundRecord

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def phases(rounds: Sequence[RoundRecord]) -> list[Phase]:
    """Return the phases of both threads of all workers, sorted by worker, lane and time.

    Moments are on worker 0's clock, up to the latency of a header. Where two phases of a thread
    would overlap, the later one starts where the earlier one ends.
    """
    found = [phase for record in rounds for phase in _phases_of_round(record)]
    found.sort(key=lambda p: (p.worker, LANES.index(p.lane), p.start_seconds, p.end_seconds))
    ordered = []
    for _, lane in itertools.groupby(found, key=lambda phase: (phase.worker, phase.lane)):
        latest = -math.inf
        for phase in lane:
            start = max(phase.start_seconds, latest)
            latest = max(phase.end_seconds, start)
            ordered.append(phase._replace(start_seconds=start, end_seconds=latest))
    return ordered


def _phases_of_round(record: RoundRecord) -> Iterator[Phase]:
    for worker, table in enumerate(record.workers):
        for name, (lane, *moments, _) in PHASES.items():
            start, end = (table.at_seconds.get(moment, NAN) for moment in moments)
            if -math.inf < start <= end < math.inf:
                yield Phase(worker, lane, start, end, name, record)


def write_trace(path: Path, rounds: Sequence[RoundRecord]) -> None:
    """Write a trace file for https://ui.perfetto.dev and chrome://tracing.

    A worker is a process in it, and a lane is a thread.
    """
    found, events = phases(rounds), list[dict[str, Any]]()
    for worker in sorted({phase.worker for phase in found}):
        process = {"ph": "M", "pid": worker}
        events.append({**process, "name": "process_name", "args": {"name": f"worker {worker}"}})
        events.append({**process, "name": "process_sort_index", "args": {"sort_index": worker}})
        for tid, thread in enumerate(("training thread", "exchange in the background")):
            events.append({**process, "name": "thread_name", "tid": tid, "args": {"name": thread}})
    for phase in found:
        record, sent = phase.round, phase.round.workers[phase.worker].sent_bytes
        about = {key: getattr(record, key) for key in ("fragment", "fragment_name", "outer_round")}
        event = {
            "ph": "X",
            "name": f"{phase.name}, fragment {record.fragment}",
            "cat": phase.lane,
            "pid": phase.worker,
            "tid": LANES.index(phase.lane),
            "ts": phase.start_seconds * 1e6,  # microseconds
            "dur": phase.seconds * 1e6,
            "args": about | ({"sent_bytes": sent} if math.isfinite(sent) else {}),
        }
        events.append(event)
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    write_whole(path, json.dumps(trace).encode())


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a JSON Lines file, and the number of unreadable lines.

    A last line that is still being written is skipped.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.split("\n") if line.strip()]
    found, unreadable = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            unreadable += number < len(lines) or text.endswith("\n")
    return found, unreadable


def number(value: object) -> float:
    """Convert a value of a JSON record to a float, NaN if it is not a number."""
    if isinstance(value, str) and value in ("inf", "-inf"):  # JSON has no such numbers
        return float(value)
    return float(value) if isinstance(value, int | float) else math.nan
