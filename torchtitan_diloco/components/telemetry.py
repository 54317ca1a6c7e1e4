"""Telemetry of a run: what a logged step records, how it is summed over ranks, where it is written.

Ranks do not wait for each other to log a step: the sums over ranks start at that step and are read
`lag` steps later. The first rank then writes them to metrics.jsonl, TensorBoard and the console.

TensorBoard tags are the keys of records: those of steps are made here, those of rounds in
round_records.py, those of validation in validation.py, and diloco/... in diloco/round.py.
"""

import itertools
import json
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TextIO, TypeVar

from torch.distributed import ReduceOp

from torchtitan_diloco.components.checkpoint_schema import RunState
from torchtitan_diloco.components.round_records import (
    OVERVIEW,
    PendingRounds,
    RoundRecord,
    peak_mbit_per_second,
    round_scalars,
)
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.timeline import timeline_figure, write_trace
from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.diloco.outer_loop import OuterLoop
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.distributed.collectives import PendingReduction
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.utils import (
    GIB,
    check_open_files,
    clock,
    logger,
    peak_flops,
    peak_memory_bytes,
    read_json_lines,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Item = TypeVar("Item")
Record = dict[str, float | None]
"""Values by name and unit. None is not known: null in metrics.jsonl, absent in TensorBoard."""

KEPT_ROUNDS = 1000
"""Latest round records, for the trace file and the planner. All of them are in metrics.jsonl."""


def worker_key(worker: int, name: str) -> str:
    """Return the key in `Telemetry.totals` of what the first rank of a worker measured: "steps",
    "seconds" of compute in these steps, and "squares", the sum of their squares."""
    return f"worker_{worker}/{name}"


class StepResult(NamedTuple):
    cross_entropy: float
    """Sum over this rank's tokens, in nats."""
    gradient_norm: float
    """Norm of this worker's gradient before clipping."""
    skipped: bool


class TimedIterator(Iterator[Item]):
    """Iterator that measures how long its user waits for items."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items, self._seconds = items, 0.0

    def __next__(self) -> Item:
        started = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self._seconds += time.perf_counter() - started

    def take_seconds(self) -> float:
        """Return the seconds waited since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken


class _LoggedStep(NamedTuple):
    """Logged step whose sums over ranks are in flight."""

    step: int
    record: Record
    names: tuple[str, ...]
    sums: PendingReduction
    maxima: PendingReduction
    """Peak memory, and the longest gap of each worker."""
    rounds: PendingRounds


class Telemetry:
    """Measures the steps of a run, sums them over ranks, and writes records.

    Call `step_begins` and `step_done` around every step, `open` after a step that is logged, and
    `publish` after every step. `folder` is the run's, None to write nothing. A resumed run
    continues `state`. The sums of a logged step are read `lag` steps later.
    """

    def __init__(
        self,
        config: Metrics,
        world: World,
        folder: Path | None,
        plan: RunPlan,
        outer: OuterLoop,
        state: RunState,
        *,
        flops_per_token: int,
        lag: int,
    ) -> None:
        self._world, self._plan, self._outer, self._lag = world, plan, outer, lag
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops(world.device)
        self._started, self._earlier_seconds = time.perf_counter(), float(state.elapsed_seconds)
        self._interval_started = self._step_started = self._started
        self._exposed_before = self._reading_seconds = self._agreement_before = 0.0
        self._steps, self._sums, self._rounds = 0, self._zeros(), list[Round]()
        self._in_flight: deque[_LoggedStep] = deque()
        self.totals: dict[str, float] = dict(state.totals)
        """Sums over all ranks and the whole run: the outer loop's metrics, times, worker keys."""
        self.round_records: deque[RoundRecord] = deque(maxlen=KEPT_ROUNDS)
        self._folder = folder if world.is_first else None
        self._file: TextIO | None = None
        self._board: SummaryWriter | None = None
        self._write_failed = False
        self._writes, self._last_step = threading.Lock(), state.step
        world.liveness.on_silence = self._silent
        if self._folder is not None:
            path = self._folder / "metrics.jsonl"
            drop_records_after(path, state.step)
            self._file = path.open("a", buffering=1, encoding="utf-8")
            if config.tensorboard:
                self._board = _open_board(self._folder, state.step, world.workers)

    def _zeros(self) -> dict[str, float]:
        """Return the counters of an interval between logged steps, before its first step."""
        names = ["cross_entropy", "tokens", "gradient_norm", "skipped_steps"]
        names += [f"time/{name}_seconds" for name in ("wall", "step", "data", "agreement")]
        for worker in range(self._world.workers):
            names += [worker_key(worker, name) for name in ("steps", "seconds", "squares")]
        return dict.fromkeys(names, 0.0)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of the whole run, including those before a resume."""
        return self._earlier_seconds + (time.perf_counter() - self._started)

    def step_begins(self) -> None:
        self._step_started, self._exposed_before = time.perf_counter(), self._outer.exposed_seconds

    def step_done(self, result: StepResult, data_seconds: float) -> None:
        """Count a step. `data_seconds`: how long it waited for data."""
        seconds, sums = time.perf_counter() - self._step_started, self._sums
        sums["time/step_seconds"] += seconds
        sums["time/data_seconds"] += data_seconds
        sums["gradient_norm"] = result.gradient_norm
        sums["skipped_steps"] += result.skipped
        if not result.skipped:
            sums["cross_entropy"] += result.cross_entropy
            sums["tokens"] += self._plan.tokens_per_step / self._world.size
        if self._world.rank_in_worker == 0:
            compute = seconds - data_seconds - (self._outer.exposed_seconds - self._exposed_before)
            for name, value in {"steps": 1, "seconds": compute, "squares": compute**2}.items():
                sums[worker_key(self._world.worker, name)] += value
        self._steps += 1
        self._rounds += self._outer.rounds()  # at every step: only the latest are kept there

    def drained(self, seconds: float) -> None:
        """Count the outer loop's drain after the last step as training."""
        self._sums["time/step_seconds"] += seconds

    def pause(self, seconds: float) -> None:
        """Exclude time that was not spent on training, such as validation, from the rates."""
        self._interval_started += seconds
        self._world.liveness.clock.excuse()

    def open(self, step: int, lr: float, agreement_seconds: float = 0.0) -> None:
        """Log the steps since the last logged one. Every rank calls it at the same steps.

        `agreement_seconds`: how long the training thread has waited in this process, so far, for
        all ranks to agree on something.
        """
        check_open_files()
        now, agreement = time.perf_counter(), agreement_seconds + self._reading_seconds
        wall_seconds = now - self._interval_started
        tokens_per_second, mfu = self._plan.tokens_per_step * self._steps / wall_seconds, None
        if self._peak_flops is not None:
            flops = self._flops_per_token * tokens_per_second
            mfu = 100 * flops / (self._peak_flops * self._world.size)
        record: Record = {
            "train/lr": lr,
            "train/tokens_global": self._plan.tokens_at(step),
            "speed/tokens_per_second_global": tokens_per_second,
            "speed/seconds_per_step": wall_seconds / self._steps,
            "speed/mfu_percent": mfu,
            "time/elapsed_seconds": self.elapsed_seconds,
        }
        sums = self._sums | self._outer.metrics()
        sums["time/wall_seconds"] = wall_seconds
        sums["time/agreement_seconds"] = agreement - self._agreement_before
        where, names = f"up to step {step}", self._outer.fragment_names
        totals = PendingReduction(self._world, list(sums.values()), where)
        maxima = [peak_memory_bytes(self._world.device), *[0.0] * self._world.workers]
        maxima[1 + self._world.worker] = self._world.liveness.clock.longest_gap()
        largest = PendingReduction(self._world, maxima, where, ReduceOp.MAX)
        rounds = [*self._rounds, *self._outer.rounds()]
        gathered = PendingRounds(self._world, rounds, names, clock_start=self._started, where=where)
        self._in_flight.append(_LoggedStep(step, record, tuple(sums), totals, largest, gathered))
        self._steps, self._sums, self._rounds = 0, self._zeros(), []
        self._interval_started, self._agreement_before = now, agreement

    def publish(self, step: int, *, all: bool = False) -> None:
        """Write the steps that were logged at least `lag` steps ago, or all of them."""
        self._last_step = step
        while self._in_flight and (all or self._in_flight[0].step + self._lag <= step):
            logged = self._in_flight.popleft()
            started = time.perf_counter()
            rounds = logged.rounds.records()
            sums = dict(zip(logged.names, logged.sums.result(), strict=True))
            memory, *gaps = logged.maxima.result()
            self._reading_seconds += time.perf_counter() - started
            self.round_records += rounds
            for found in rounds:
                self._write(found, found["step"], round_scalars(found))
            record = logged.record | self._over_ranks(sums, rounds)
            record["memory/peak_gib_max_over_ranks"] = memory / GIB
            record["time/longest_gap_seconds_max_over_ranks"] = max(gaps)
            record["time/longest_gap_worker"] = gaps.index(max(gaps))
            self.write(logged.step, record)
            logger.info(_console_line(logged.step, self._plan.total_steps, record))

    def _over_ranks(self, sums: dict[str, float], rounds: Sequence[RoundRecord]) -> Record:
        size, workers = self._world.size, self._world.workers
        cross_entropy, tokens = sums.pop("cross_entropy"), sums.pop("tokens")
        record: Record = {
            "train/loss_nats_per_token_global": cross_entropy / tokens if tokens else math.nan,
            "train/gradient_norm_mean_over_workers": sums.pop("gradient_norm") / size,
            "train/skipped_steps_mean_over_workers": sums.pop("skipped_steps") / size,
        }
        for name, total in sums.items():
            self.totals[name] = self.totals.get(name, 0.0) + total
            if name.endswith("_bytes"):
                record[f"{name}_sum_over_ranks"] = total
            elif not name.startswith("worker_"):
                record[f"{name}_mean_over_ranks"] = total / size
        for name, share in time_shares(sums).items():
            record[f"time/share_{name}_percent_mean_over_ranks"] = share
        if "diloco/sent_bytes" in sums and workers > 1:
            sent_bytes = sums["diloco/sent_bytes"] / workers
            seconds, peak = sums["time/wall_seconds"] / size, peak_mbit_per_second(rounds)
            used = 8e-6 * sent_bytes / seconds
            record["diloco/bandwidth_used_mbit_per_second_mean_over_workers"] = used
            record["diloco/bandwidth_peak_mbit_per_second_max_over_workers"] = peak
        return record

    def write(self, step: int, record: Record) -> None:
        """Write global numbers, such as those of a validation."""
        self._write({"step": step, **record}, step, record)

    def _silent(self, worker: int, seconds: float) -> None:
        """Record that a worker is silent or holds up the others. Called from another thread."""
        line = {"kind": "silence", "step": self._last_step, "worker": worker, "seconds": seconds}
        self._write(line, self._last_step, {"time/silence_of_a_worker_seconds": seconds})

    def write_summary(self, record: Mapping[str, Any]) -> None:
        self._write({"kind": "summary", **record})

    def draw(self, step: int) -> None:
        """Write a trace file and an image of the latest rounds. This is slow."""
        if self._folder is None or not self.round_records:
            return
        with self._writing():
            write_trace(self._folder / "traces" / "fragments.json", self.round_records)
            if self._board is not None:
                figure = timeline_figure(self.round_records)
                self._board.add_figure("timeline/last_rounds", figure, step)

    def _write(self, line: Mapping[str, Any], step: int = 0, scalars: Record | None = None) -> None:
        """Write a line of JSON and the TensorBoard scalars of a step."""
        with self._writing():
            if self._file is not None:  # JSON has no NaN and no infinity: they become text
                text = json.dumps(line)
                finite = json.loads(text, parse_constant=lambda name: str(float(name)))
                self._file.write(json.dumps(finite) + "\n")
            if self._board is not None:
                for tag, value in (scalars or {}).items():
                    if value is not None:
                        self._board.add_scalar(tag, value, step)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Log a failure to write, once. A full disk loses records but does not end the run."""
        try:
            with self._writes:
                yield
        except OSError as error:
            if not self._write_failed:
                reason = f"cannot write records to {self._folder} ({error.strerror})"
                logger.error(f"{reason}; they are lost until there is room again")
            self._write_failed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._world.liveness.on_silence = None
        for opened in (self._file, self._board):
            with suppress(OSError):
                if opened is not None:
                    opened.close()


def time_shares(sums: Mapping[str, float]) -> Record:
    """Return the shares of the wall time in percent.

    With data parallelism, communication is a part of the backward pass: it is not known by itself
    (None) and counts as compute. Waiting for ranks to agree is communication that is exposed.
    """
    wall, steps, data, agreement = (
        sums[f"time/{name}_seconds"] for name in ("wall", "step", "data", "agreement")
    )
    exposed = sums.get("diloco/exposed_seconds")
    between_steps = 0.0 if exposed is None else agreement
    seconds = {
        "compute": steps - data - (exposed or 0.0),
        "data": data,
        "exposed_communication": None if exposed is None else exposed + between_steps,
        "other": wall - steps - between_steps,
    }
    return {
        name: None if value is None else 100 * min(1.0, max(0.0, value / wall))
        for name, value in seconds.items()
    }


def _console_line(step: int, total_steps: int, record: Record) -> str:
    mfu, seconds = record["speed/mfu_percent"], record["speed/seconds_per_step"] or 0.0
    parts = [
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {record['train/loss_nats_per_token_global']:.4f}",
        f"gradient norm {record['train/gradient_norm_mean_over_workers']:.3f}",
        f"lr {record['train/lr']:.2e}",
        f"{record['speed/tokens_per_second_global']:,.0f} tokens/s",
        f"MFU {'n/a' if mfu is None else f'{mfu:.1f} %'}",
        f"memory {record['memory/peak_gib_max_over_ranks']:.2f} GiB",
        f"ETA {clock((total_steps - step) * seconds)}",
    ]
    return "  ".join(parts)


def _open_board(folder: Path, start_step: int, workers: int) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    board = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1, flush_secs=10)
    if workers > 1:
        charts = {
            section: {chart: ["Multiline", tags] for chart, tags in charts.items()}
            for section, charts in OVERVIEW.items()
        }
        board.add_custom_scalars(charts)
    return board


def drop_records_after(path: Path, step: int) -> None:
    """Drop records of steps that a resumed run repeats. If it starts over, put them all aside."""
    if not path.exists():
        return
    if step == 0:
        names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        path.rename(aside)
        logger.warning(
            f"{path.parent} holds a run without a checkpoint, which starts over; its records are "
            f"kept in {aside.name}"
        )
        return
    records, unreadable = read_json_lines(path)
    known = [record for record in records if isinstance(record.get("step"), int)]
    unreadable += len(records) - len(known)
    if unreadable:
        logger.warning(f"{unreadable} lines of {path} cannot be read and are left out")
    kept = [json.dumps(record) + "\n" for record in known if record["step"] <= step]
    new = path.with_suffix(".new")
    new.write_text("".join(kept), encoding="utf-8")
    new.replace(path)
