"""Telemetry of a run: measurements, their sums over ranks, and records.

Every rank counts `COUNTED` and the outer loop's metrics. At a logged step, ranks start to sum their
counters and the numbers of the rounds since the last one (round_records.py), by worker. They do not
wait for each other: the sums are read after a later step, as soon as they are complete. The first
rank then writes a record of the step and of each round to metrics.jsonl (records.py), shows the
step on the boards, and logs a line.

To add a metric, count it on every rank, under a name with a slash: in the outer loop's metrics, or
with an entry in `COUNTED` and `Telemetry.count`. It is then written, shown, and summed over the run
in `Telemetry.totals`. Compute values from several sums in `Telemetry._step_record`. Put curves that
are shown first in board.FIRST. Describe the metric in docs/report.md.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchtitan_diloco.components.checkpoint import RunState
from torchtitan_diloco.components.records import Record, RecordFiles, RoundRecord
from torchtitan_diloco.components.round_records import (
    RoundTable,
    peak_mbit_per_second,
    percent_without,
)
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.diloco.outer_loop import OuterLoop
from torchtitan_diloco.diloco.round import Round, total
from torchtitan_diloco.distributed.collectives import PendingSums
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.hardware import GIB, peak_flops, peak_memory_bytes
from torchtitan_diloco.log import clock, logger

Batch = tuple[Tensor, Tensor]
OF_WORKER = ("steps", "seconds", "squares")
"""Steps, their seconds of compute, and the sum of squares of these. Totals are kept by worker, for
step time and jitter in the planner."""
TIMES = ("time/wall_seconds", "time/step_seconds", "time/data_seconds", "time/agreement_seconds")
COUNTED = (*OF_WORKER, "cross_entropy", "tokens", "gradient_norm", "skipped_steps", *TIMES)
"""Counters of a rank between two logged steps. Names with a slash are written: as a sum over ranks
if they end in _bytes, else as a mean."""
HIDDEN = "diloco/hidden_percent_mean_over_ranks"
KEPT_ROUNDS = 1000
"""Latest round records to keep for the trace file and the planner."""


def worker_key(worker: int, name: str) -> str:
    """Return the key of a counter of OF_WORKER in `Telemetry.totals`."""
    return f"worker_{worker}/{name}"


class RunProgress(NamedTuple):
    """Progress of the whole run, if islands share it."""

    steps: float
    tokens: int


class StepResult(NamedTuple):
    cross_entropy: float
    """Sum over this rank's tokens, in nats."""
    gradient_norm: float
    """Norm of this worker's gradient before clipping."""
    skipped: bool


class _LoggedStep(NamedTuple):
    """A logged step whose sums over ranks are in flight."""

    step: int
    progress: str
    """Text such as "30/250", for islands with the progress of the run in percent."""
    steps_left: float
    record: Record
    rounds: list[Round]
    sums: PendingSums
    """By worker: counters, peak memory by rank, and the numbers of each round."""


class Telemetry:
    """Measures the steps of a run, sums measurements over ranks, and writes records.

    Call `measure` for every step, `open` after a step that is logged, and `publish` after every
    step. `folder`: of the run, None to write nothing. `state`: of the run that is resumed.
    `settings`: those by which boards compare runs.
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
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.world, self.plan, self._outer = world, plan, outer
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops(world.device)
        self._interval_started = time.perf_counter()
        self._started = self._interval_started - float(state.elapsed_seconds)
        self._counters = dict.fromkeys(COUNTED, 0.0)
        self._agreement_before = 0.0
        self._rounds: list[Round] = []
        self._table = RoundTable(world, outer.fragment_names, clock_start=self._started)
        self._in_flight: deque[_LoggedStep] = deque()
        self.totals: dict[str, float] = dict(state.totals)
        """Sums of written counters over the run and all ranks, and of OF_WORKER by `worker_key`."""
        self.counted_after_step = state.counted_after_step
        self.round_records: deque[RoundRecord] = deque(maxlen=KEPT_ROUNDS)
        where = folder if world.is_first else None
        self.files = RecordFiles(config, where, state.step, settings or {})
        self._done: float | None = None
        self._live = tqdm(
            total=plan.total_steps,
            initial=state.step,
            unit=" steps",
            colour="green",
            leave=False,
            dynamic_ncols=True,
            disable=None if world.is_first else True,  # None: only on a terminal
        )
        self._stack = ExitStack()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of the run, including those before a resume."""
        return time.perf_counter() - self._started

    # --- every step -------------------------------------------------------------------------------

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and count the time of waiting for them."""
        started = time.perf_counter()
        for batch in batches:
            self.count("time/data_seconds", time.perf_counter() - started)
            yield batch
            started = time.perf_counter()

    def measure(self, train_step: Callable[[], StepResult]) -> None:
        started, waited = time.perf_counter(), self._waited()
        result = train_step()
        seconds = time.perf_counter() - started
        compute = seconds - (self._waited() - waited)
        for name, value in zip(OF_WORKER, (1, compute, compute**2), strict=True):
            self.count(name, value)
        self.count("time/step_seconds", seconds)
        self.count("skipped_steps", result.skipped)
        if not result.skipped:
            self.count("cross_entropy", result.cross_entropy)
            self.count("tokens", self.plan.tokens_per_step / self.plan.ranks)
        self._counters["gradient_norm"] = result.gradient_norm  # of the last step
        self._live.update()
        self._rounds += self._outer.rounds()  # at every step, as it keeps only the latest

    def _waited(self) -> float:
        """Return seconds of waiting for data and communication, for differences within a step."""
        return self._counters["time/data_seconds"] + self._outer.exposed_seconds

    def count(self, name: str, value: float) -> None:
        """Add to a counter of this rank."""
        self._counters[name] += value

    def pause(self, seconds: float) -> None:
        """Exclude time that was not spent on training, such as validation, from the rates."""
        self._interval_started += seconds

    # --- a logged step ----------------------------------------------------------------------------

    def open(
        self, step: int, lr: float, agreement_seconds: float = 0.0, run: RunProgress | None = None
    ) -> None:
        """Log the steps since the last logged one. Collective.

        `agreement_seconds`: total time for which the training thread of this process has waited
        for agreement of all ranks. `run`: only on an island.
        """
        progress, steps_left = self._progress(step, None if run is None else run.steps)
        world, now, where = self.world, time.perf_counter(), f"up to step {step}"
        self.count("time/wall_seconds", now - self._interval_started)
        self.count("time/agreement_seconds", agreement_seconds - self._agreement_before)
        self._interval_started, self._agreement_before = now, agreement_seconds
        rounds = [*self._rounds, *self._outer.rounds()]
        numbers = [
            self._counters | self._outer.metrics(),
            self._of_rank(peak_memory_bytes(world.device)),
            *map(self._table.numbers, rounds),
        ]
        record: Record = {
            "train/lr": lr,
            "train/tokens_global": self.plan.tokens_at(step) if run is None else run.tokens,
            "time/elapsed_seconds": self.elapsed_seconds,
        }
        sums = PendingSums(world, numbers, where)
        self._in_flight.append(_LoggedStep(step, progress, steps_left, record, rounds, sums))
        self._counters, self._rounds = dict.fromkeys(COUNTED, 0.0), []

    def _progress(self, step: int, done: float | None) -> tuple[str, float]:
        """Return the progress of the run, and the steps left to this island or run at its rate."""
        whole, own = self.plan.total_steps, self._counters["steps"]
        if done is None:
            return f"{step:>{len(str(whole))}}/{whole}", whole - step
        made = own if self._done is None else done - self._done
        self._done = done
        left = max(0.0, whole - done) * (own / made if made else 1.0)
        return f"{step:>{len(str(whole))}}  run {100 * min(1.0, done / whole):.0f} %", left

    def _of_rank(self, value: float) -> dict[str, float]:
        """Key a value by rank, so that the sum over the worker keeps the value of each rank."""
        own = self.world.rank_in_worker
        return {str(n): value if n == own else 0.0 for n in range(self.world.ranks_per_worker)}

    def publish(self, *, all: bool = False) -> None:
        """Write the logged steps whose sums are complete, or wait for all."""
        while self._in_flight and (all or self._in_flight[0].sums.is_complete):
            logged = self._in_flight.popleft()
            started = time.perf_counter()
            counters, memory, *rounds = zip(*logged.sums.by_worker(), strict=True)
            self.count("time/agreement_seconds", time.perf_counter() - started)
            records = list(map(self._table.record, logged.rounds, rounds))
            self.round_records += records
            for found in records:
                self.files.write(found)
            record = logged.record | self._step_record(counters, records)
            peaks = [max(by_rank.values()) for by_rank in memory]
            record["memory/peak_gib_max_over_ranks"] = max(peaks) / GIB
            self.write(logged.step, record)
            logger.info(_console_line(logged, record))
            self._live.set_postfix_str(f"loss {record['train/loss_nats_per_token_global']:.4f}")

    def _step_record(
        self, counters: Sequence[Mapping[str, float]], rounds: Sequence[RoundRecord]
    ) -> Record:
        """Return the record of the counters of each worker, and add the counters to the totals."""
        size, workers = self.world.size, self.world.workers
        sums = total(counters)
        steps, wall_seconds = sums["steps"] / size, sums["time/wall_seconds"] / size
        tokens = self.plan.tokens_per_step * size / self.plan.ranks
        tokens_per_second = tokens * steps / wall_seconds
        record: Record = {
            "train/loss_nats_per_token_global": sums["cross_entropy"]
            / (sums["tokens"] or math.nan),
            "train/gradient_norm_mean_over_workers": sums["gradient_norm"] / size,
            "train/skipped_steps_mean_over_workers": sums["skipped_steps"] / size,
            "speed/tokens_per_second_global": tokens_per_second,
            "speed/seconds_per_step": wall_seconds / steps,
            "speed/mfu_percent": None,
        }
        if self._peak_flops is not None:
            flops = self._flops_per_token * tokens_per_second
            record["speed/mfu_percent"] = 100 * flops / (self._peak_flops * size)
        written = {name: value for name, value in sums.items() if "/" in name}
        of_worker = {
            worker_key(worker, name): own[name]
            for worker, own in enumerate(counters)
            for name in OF_WORKER
        }
        self.totals = total([self.totals, of_worker, written])
        for name, value in written.items():
            if name.endswith("_bytes"):
                record[f"{name}_sum_over_ranks"] = value
            else:
                record[f"{name}_mean_over_ranks"] = value / size
        for name, share in time_shares(sums).items():
            record[f"time/share_{name}_percent_mean_over_ranks"] = share
        if exchange := sums.get("diloco/exchange_seconds"):
            waited = sums.get("diloco/exposed_waiting_seconds", 0.0)
            record[HIDDEN] = percent_without(waited, exchange)
        if "diloco/sent_bytes" in sums and workers > 1:
            used = 8e-6 * sums["diloco/sent_bytes"] / workers / wall_seconds
            record["diloco/bandwidth_used_mbit_per_second_mean_over_workers"] = used
            peak = peak_mbit_per_second(rounds)
            record["diloco/bandwidth_peak_mbit_per_second_max_over_workers"] = peak
        return record

    # --- other records ----------------------------------------------------------------------------

    def write(self, step: int, record: Record) -> None:
        """Write a record of global numbers, such as those of a validation."""
        self.files.write({"step": step} | record)

    def write_trace(self) -> None:
        """Write a trace file of the latest rounds, which is slow."""
        self.files.write_trace(self.round_records)

    def __enter__(self) -> Self:
        if not self._live.disable:  # log lines must not break the bar
            self._stack.enter_context(logging_redirect_tqdm([logger]))
        return self

    def __exit__(self, *error: object) -> None:
        self._live.close()
        self._stack.close()
        self.files.close()


def time_shares(sums: Mapping[str, float]) -> Record:
    """Return the shares of the wall time in percent.

    Waiting for agreement of ranks is exposed communication. With data parallelism, communication
    is part of the backward pass: its share is unknown (None) and counts as compute.
    """
    wall, steps, data, agreement = (sums[name] for name in TIMES)

    def share(seconds: float) -> float:
        return 100 * min(1.0, max(0.0, seconds / wall))

    streaming = "diloco/exposed_seconds" in sums
    exposed = sums.get("diloco/exposed_seconds", 0.0)
    agreement = agreement if streaming else 0.0
    return {
        "compute": share(steps - data - exposed),
        "data": share(data),
        "exposed_communication": share(exposed + agreement) if streaming else None,
        "other": share(wall - steps - agreement),
    }


def _console_line(logged: _LoggedStep, record: Record) -> str:
    mfu, eta = record["speed/mfu_percent"], logged.steps_left * record["speed/seconds_per_step"]
    return (
        f"step {logged.progress}"
        f"  loss {record['train/loss_nats_per_token_global']:.4f}"
        f"  gradient norm {record['train/gradient_norm_mean_over_workers']:.3f}"
        f"  lr {record['train/lr']:.2e}"
        f"  {record['speed/tokens_per_second_global']:,.0f} tokens/s"
        f"{'' if mfu is None else f'  MFU {mfu:.1f} %'}"
        f"{f'  hidden {record[HIDDEN]:.0f} %' if HIDDEN in record else ''}"
        f"  memory {record['memory/peak_gib_max_over_ranks']:.2f} GiB"
        f"  ETA {clock(eta)}"
    )
