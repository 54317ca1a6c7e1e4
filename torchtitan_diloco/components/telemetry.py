"""Telemetry of a run: measures its steps, logs lines, and writes the records of this worker.

Every rank counts. At a logged step, the numbers of all ranks are merged in the background, as their
declarations say: those of the job in a small sum over all ranks (`StopRequest`) and a maximum, and
those of the worker, with its rounds, among the ranks of the worker. The results are read after a
later step, when they are there. Then the first rank of the run logs a line, and the first rank of
each worker writes the records of the step and of the rounds since the last one.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from torchtitan_diloco.base.formatting import clock
from torchtitan_diloco.base.hardware import (
    GIB,
    crowded,
    peak_flops,
    peak_memory_bytes,
    queued_seconds,
)
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.components.checkpoint_folder import folder_of_worker
from torchtitan_diloco.components.logged_step import JobSums, LoggedStep, summands
from torchtitan_diloco.components.metrics import (
    OVER_STEPS,
    Record,
    Totals,
    add_totals,
    compute_percent,
    exposed_percent,
    hidden_percent,
    percent,
)
from torchtitan_diloco.components.records import (
    PhaseRecord,
    RecordFiles,
    StartRecord,
    round_record,
)
from torchtitan_diloco.components.run_plan import AfterStep, RunPlan
from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.data.batch import Batch
from torchtitan_diloco.diloco.data_parallel import OuterLoop
from torchtitan_diloco.diloco.metrics import Merging
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.vitals import Vitals
from torchtitan_diloco.distributed.collectives import PendingSum
from torchtitan_diloco.distributed.world import World

RECENT = 16
"""Steps in which the usual times of a step are measured."""


class RunProgress(NamedTuple):
    """Progress of the whole run, if islands share it."""

    steps: float
    tokens: int


@dataclass(frozen=True)
class SavedTelemetry:
    """What a resumed run goes on counting from."""

    elapsed_seconds: float
    totals: Totals
    has_outer_loop: bool
    """Whether the totals are of steps with an outer loop."""


class StepResult(NamedTuple):
    cross_entropy: float
    """Sum over this rank's tokens, in nats."""
    gradient_norm: float
    """Norm of this worker's gradient before clipping."""
    skipped: bool


class _Logged(NamedTuple):
    """A logged step whose numbers of other ranks are in flight."""

    progress: str
    """Progress of the run, as the console shows it."""
    steps_left: float
    step: LoggedStep


class Telemetry:
    """A context manager, which opens the files and starts the clock. Call `measure` and `numbers`
    for every step, `open_record` after a step that is logged, and `publish` after every step.

    `folder`: that of the run, None to write nothing. `step`: the step from which the run is
    resumed. `settings`: what the boards show beside the numbers. `run`: id of the run that an
    island is in.

    A resumed run goes on with the totals of the run so far (`load_state`).
    """

    files: RecordFiles

    def __init__(
        self,
        config: Metrics,
        world: World,
        folder: Path | None,
        plan: RunPlan,
        outer: OuterLoop,
        step: int,
        *,
        flops_per_token: int,
        settings: Mapping[str, Any] | None = None,
        run: str = "",
    ) -> None:
        self.world = world
        self.plan = plan
        self.outer = outer
        self._config = config
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops(world.device)
        self._start_clock()
        self.elapsed_before = 0.0
        """Seconds of the run in the processes before a resume."""
        self._agreement_before = 0.0
        self._begin_interval()
        self._in_flight: deque[_Logged] = deque()
        self.workers = plan.ranks // world.ranks_per_worker
        """Workers of the run: so many as have begun, or the most islands that shared a round."""
        if folder is not None:
            folder = None if world.rank_in_worker else folder_of_worker(folder, world.worker)
        self._new_start = partial(
            StartRecord, step=step, workers=self.workers, parameters=plan.parameters, run=run
        )
        self._open_files = partial(
            RecordFiles,
            config=config,
            folder=folder,
            settings=settings or {},
            workers=world.workers,
            of_run=world.is_first,
        )
        self.totals: Totals = {}
        """Merged records of this worker, including those before a resume. Those under world/ are of
        all ranks."""
        self._done: float | None = None
        self.loss: float | None = None
        """Training loss of the latest logged step that was published."""
        self.applied = list[Round]()
        """Rounds that were applied in the last step."""
        self._warned = False
        self._steps = deque[tuple[float, float, float]](maxlen=RECENT)
        self._save_seconds = 0.0
        self._saved_step = step

    def __enter__(self) -> Self:
        self._start_clock()
        self.files = self._open_files(start=self._new_start(time=time.time()))
        return self

    def __exit__(self, *error: object) -> None:
        self.files.close()

    def _start_clock(self) -> None:
        self._interval_started = time.perf_counter()
        self._started = self._interval_started
        self._clock = time.time() - self._started

    def saved_state(self) -> SavedTelemetry:
        """Return the totals up to the last logged step."""
        return SavedTelemetry(
            elapsed_seconds=self.elapsed_seconds,
            totals=self.totals,
            has_outer_loop=bool(self.outer.fragments),
        )

    def load_state(self, saved: SavedTelemetry, /) -> None:
        self.elapsed_before = saved.elapsed_seconds
        if saved.has_outer_loop == bool(self.outer.fragments):  # others cannot be compared
            self.totals = saved.totals

    def is_due(self, after: AfterStep) -> bool:
        """Return whether to log a step."""
        return after.stops or after.is_multiple_of(self._config.log_every) or after.step == 1

    def vitals(self) -> Vitals:
        """Return the usual times of this rank's recent steps. Any thread may call this."""
        steps = list(self._steps)
        if len(steps) < RECENT // 2:
            return Vitals()
        compute, data, queued = zip(*steps, strict=True)
        usual = statistics.median(compute)
        # The share of all these steps, as the first of them that are slow should count.
        share = math.fsum(queued) / (math.fsum(compute) or 1.0)
        return Vitals(
            compute=usual,
            data=statistics.fmean(data),
            save=self._save_seconds,
            queued=share * usual,
        )

    def note_save(self, step: int, seconds: float) -> None:
        """Take note of a save after a step, for which training paused."""
        self._save_seconds = seconds / max(1, step - self._saved_step)
        self._saved_step = step
        self.exclude_pause(seconds)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of the run, including those before a resume."""
        return self.elapsed_before + (time.perf_counter() - self._started)

    def _begin_interval(self) -> None:
        self._interval = Merging(OVER_STEPS)
        self._compute_squares = 0.0
        self._sums = JobSums()
        self._rounds = list[Round]()

    # --- every step -------------------------------------------------------------------------------

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and count the time of waiting for them."""
        started = time.perf_counter()
        for batch in batches:
            self._count(data_seconds=time.perf_counter() - started)
            yield batch
            started = time.perf_counter()

    def measure(self, train_step: Callable[[], StepResult]) -> None:
        """Run a step of training, and count its times, tokens, loss and rounds."""
        started = time.perf_counter()
        waited = self._waited()
        queued = queued_seconds()
        data = self._counted("worker/data_seconds")
        self._last = train_step()
        seconds = time.perf_counter() - started
        compute = seconds - (self._waited() - waited)
        queued = queued_seconds() - queued
        data = self._counted("worker/data_seconds") - data
        self._count(
            steps=1,
            skipped_steps=float(self._last.skipped),
            step_seconds=seconds,
            compute_seconds=compute,
            queued_seconds=queued,
        )
        self._compute_squares += compute**2
        self._interval.add({"world/longest_data_seconds": data})
        self._steps.append((compute, data, queued))
        rounds = self.outer.rounds()  # at every step, as it keeps only the latest
        self._rounds = [*self._rounds, *rounds]
        self.applied = rounds
        self.workers = max([self.workers, *(exchange.participants for exchange in rounds)])
        self._interval.add(self.outer.metrics())
        if not self._last.skipped:
            before = self._sums
            self._sums = before._replace(
                cross_entropy=before.cross_entropy + self._last.cross_entropy,
                tokens=before.tokens + self.plan.tokens_per_step / self.plan.ranks,
            )

    def _count(self, **numbers: float) -> None:
        """Merge numbers of this worker into those of the interval."""
        self._interval.add({f"worker/{name}": value for name, value in numbers.items()})

    def _counted(self, name: str) -> float:
        return self._interval.values.get(name, 0.0)

    def _waited(self) -> float:
        """Return seconds of waiting for data and communication, for differences within a step."""
        return self._counted("worker/data_seconds") + self.outer.exposed_seconds

    def numbers(self, agreement_seconds: float) -> list[float]:
        """Return what this rank adds to the sums over all ranks: `JobSums`, then `SUMMED_OVER_JOB`.

        They are of the time from the last logged step until now. Call it once after each step.

        `agreement_seconds`: total time for which the training thread of this process has waited for
        other ranks.
        """
        now = time.perf_counter()
        self._count(
            wall_seconds=now - self._interval_started,
            agreement_seconds=agreement_seconds - self._agreement_before,
        )
        self._interval_started = now
        self._agreement_before = agreement_seconds
        return summands(self._sums, self._interval.values)

    def exclude_pause(self, seconds: float) -> None:
        """Exclude time that was not spent on training, such as validation, from the rates."""
        self._interval_started += seconds

    # --- a logged step ----------------------------------------------------------------------------

    def open_record(
        self,
        step: int,
        lr: float,
        sums: PendingSum,
        run: RunProgress | None = None,
        *,
        phase: int | None = None,
    ) -> None:
        """Log the steps since the last logged one.

        `sums`: those of the latest `numbers` over all ranks. `run`: only on an island. `phase`: the
        number of the phase of the data that the next step is in, if there are phases.
        """
        record: Record = {
            "step": step,
            "time": time.time(),
            "train/lr": lr,
            "train/tokens": self.plan.tokens_at(step) if run is None else run.tokens,
            "train/gradient_norm": self._last.gradient_norm,
            "train/memory_gib": peak_memory_bytes(self.world.device) / GIB,
            **self._interval.values,
            "worker/elapsed_seconds": self.elapsed_seconds,
        }
        if phase is not None:
            record["train/phase"] = phase
        compute = record["worker/compute_seconds"] / record["worker/steps"]
        variance = self._compute_squares / record["worker/steps"] - compute**2
        record["worker/compute_spread"] = max(0.0, variance) ** 0.5
        warning = "" if self._warned else crowded(torch.get_num_threads())
        if warning and self.world.device.type == "cpu":
            self._warned = True
            logger.warning(warning)
        progress, steps_left = self._progress(step, None if run is None else run.steps)
        fragments = self.outer.fragments
        rounds = [
            round_record(exchange, fragments[exchange.fragment], clock=self._clock)
            for exchange in self._rounds
        ]
        logged = LoggedStep(self.world, record, rounds=rounds, exchanges=self._rounds, sums=sums)
        self._in_flight.append(_Logged(progress=progress, steps_left=steps_left, step=logged))
        self._begin_interval()

    def _rates(self, record: Record) -> Record:
        """Return the numbers that follow from merged ones."""
        steps = record["worker/steps"]
        wall = record["worker/wall_seconds"]
        tokens = self.plan.tokens_per_step * self.world.size / self.plan.ranks * steps / wall
        rates: Record = {
            "speed/seconds_per_step": wall / steps,
            "speed/tokens_per_second": tokens,
        }
        if "worker/sent_bytes" in record:
            rates["sync/mbit_per_second"] = 8e-6 * record["worker/sent_bytes"] / wall
        if self._peak_flops is not None:
            peak = self._peak_flops * self.world.size
            rates["speed/mfu_percent"] = percent(self._flops_per_token * tokens, peak)
        shares = {
            "speed/compute_percent": compute_percent(record),
            "sync/exposed_percent": exposed_percent(record),
            "sync/hidden_percent": hidden_percent(record),
        }
        rates |= {name: share for name, share in shares.items() if math.isfinite(share)}
        return rates

    def _progress(self, step: int, done: float | None) -> tuple[str, float]:
        """Return the progress of the run, and the steps left to this island or run at its rate."""
        whole = self.plan.total_steps
        padded_step = f"{step:>{len(str(whole))}}"
        if done is None:
            return f"{padded_step}/{whole}", whole - step
        own_steps = self._counted("worker/steps")
        run_steps = own_steps if self._done is None else done - self._done
        self._done = done
        # This island makes `own_steps` while the run makes `run_steps`: what is left of the run is
        # counted in steps of this island. The share of a run that is done becomes smaller when
        # `islands change total_tokens` makes it longer, so `run_steps` may be negative.
        own_share = own_steps / run_steps if run_steps > 0 else 1.0
        steps_left = max(0.0, whole - done) * own_share
        return f"{padded_step}  run {100 * min(1.0, done / whole):.0f} %", steps_left

    def publish(self, *, all: bool = False) -> None:
        """Write the logged steps whose numbers of other ranks are there, or wait for all."""
        while self._in_flight and (all or self._in_flight[0].step.is_complete):
            progress, steps_left, logged = self._in_flight.popleft()
            started = time.perf_counter()
            logged.merge()
            self._count(agreement_seconds=time.perf_counter() - started)
            record = logged.record
            record |= self._rates(record)
            self.loss = record["loss/train"]
            add_totals(self.totals, record)
            for round_of_fragment in logged.rounds:
                self.files.write(round_of_fragment)
            self.files.write(record)
            logger.info(_console_line(record, progress, steps_left))

    # --- other records ----------------------------------------------------------------------------

    def write(self, step: int, record: Record) -> None:
        """Write a record of other numbers, such as those of a validation."""
        self.files.write({"step": step, "time": time.time()} | record)

    def begin_phase(self, phase: PhaseRecord | None) -> None:
        """Take note of the mixture of corpora that is read from here on, if it is another one."""
        if phase is None:
            return
        if phase.step:  # the header of a run has the first one
            logger.info(f"phase after step {phase.step}: {phase.mixture}")
        self.files.write(phase)


def _console_line(record: Record, progress: str, steps_left: float) -> str:
    """Return the line of a logged step."""
    mfu = record.get("speed/mfu_percent")
    mfu_text = "" if mfu is None else f"  MFU {mfu:.1f} %"
    hidden = record.get("sync/hidden_percent")
    hidden_text = "" if hidden is None else f"  hidden {hidden:.0f} %"
    return (
        f"step {progress}"
        f"  loss {record['loss/train']:.4f}"
        f"  gradient norm {record['train/gradient_norm']:.3f}"
        f"  lr {record['train/lr']:.2e}"
        f"  {record['speed/tokens_per_second']:,.0f} tokens/s"
        f"{mfu_text}{hidden_text}"
        f"  memory {record['train/memory_gib']:.2f} GiB"
        f"  ETA {clock(steps_left * record['speed/seconds_per_step'])}"
    )
