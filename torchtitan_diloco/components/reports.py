"""A logged step: numbers of every rank made global, then written and printed."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torchtitan_diloco.components.metrics import MetricsWriter, Record, StepTimer, log_step
from torchtitan_diloco.components.round_records import PendingRounds, RoundRecord
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.step_time import time_shares
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.distributed.collectives import PendingReduction, start_max, start_sum
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.planner.utilisation import Observed, worker_key
from torchtitan_diloco.utils import GIB, peak_flops, peak_memory_bytes


class StepResult(NamedTuple):
    cross_entropy: float
    """Sum over this rank's tokens, in nats."""
    gradient_norm: float
    """Of the gradient of this worker's model, before clipping."""
    skipped: bool


class OuterLoop(Protocol):
    """StreamingDiLoCo, or data parallelism in its place."""

    @property
    def fragment_names(self) -> Sequence[str]: ...

    @property
    def exposed_seconds(self) -> float: ...

    def metrics(self) -> dict[str, float]: ...

    def rounds(self) -> list[Round]: ...


@dataclass(frozen=True)
class _Open:
    step: int
    record: Record
    names: tuple[str, ...]
    sums: PendingReduction
    maxima: PendingReduction
    rounds: PendingRounds


class StepReports:
    """Ranks do not wait for each other to report: sums are started at a logged step and read `lag` steps later."""

    def __init__(
        self,
        world: World,
        plan: RunPlan,
        flops_per_token: int,
        writer: MetricsWriter,
        lag: int,
        outer: OuterLoop,
        behind: dict[str, Any],
    ) -> None:
        """`behind`: what a run that goes on has behind it."""
        self._world, self._plan, self._writer, self._lag, self._outer = (
            world,
            plan,
            writer,
            lag,
            outer,
        )
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops(world.device)
        self._timer = StepTimer(behind.get("elapsed_seconds", 0.0))
        self._clock_start = time.perf_counter()
        self._interval: list[StepResult] = []
        self._rounds: list[Round] = []
        """Applied since the last report: asked for after every step, as the outer loop keeps the latest only."""
        self._step_began, self._exposed_before = 0.0, 0.0
        self._step_seconds, self._data_seconds = 0.0, 0.0
        self._read_seconds, self._agreement_before = 0.0, 0.0
        """Waited for other ranks to read their numbers; waited for all agreement until the last report."""
        self._computed: list[float] = []
        """Seconds of every step since the last report, without what is not compute."""
        self.observed = Observed(world.workers, world.ranks_per_worker)
        self._waiting: deque[_Open] = deque()
        self.totals: dict[str, float] = dict(behind.get("totals") or {})
        """Of the outer loop and of the seconds of training, over the whole run and all ranks."""

    @property
    def elapsed_seconds(self) -> float:
        return self._timer.elapsed_seconds

    def step_begins(self) -> None:
        self._step_began, self._exposed_before = time.perf_counter(), self._outer.exposed_seconds

    def step_done(self, result: StepResult, data_seconds: float) -> None:
        """`data_seconds`: what the step waited for its data."""
        seconds = time.perf_counter() - self._step_began
        self._step_seconds += seconds
        self._data_seconds += data_seconds
        self._computed.append(
            seconds - data_seconds - (self._outer.exposed_seconds - self._exposed_before)
        )
        self._interval.append(result)
        self._rounds += self._outer.rounds()
        self._timer.step_done()

    def drained(self, seconds: float) -> None:
        """What the outer loop took after the last step is training as well."""
        self._step_seconds += seconds

    def pause(self, seconds: float) -> None:
        self._timer.pause(seconds)

    def open(self, step: int, lr: float, agreement_seconds: float = 0.0) -> None:
        """A logged step, over the steps since the last one. Every rank calls it at the same steps. `agreement_seconds`: what
        the training thread has waited so far for the others to agree on something."""
        agreement = agreement_seconds + self._read_seconds
        trained = [result for result in self._interval if not result.skipped]
        seconds = self._timer.seconds_per_step()
        tokens_per_second = self._plan.tokens_per_step / seconds
        mfu = None
        if self._peak_flops is not None:
            mfu = (
                100
                * self._flops_per_token
                * tokens_per_second
                / (self._peak_flops * self._world.size)
            )
        record: Record = {
            "train/lr": lr,
            "train/tokens_global": self._plan.tokens_at(step),
            "speed/tokens_per_second_global": tokens_per_second,
            "speed/seconds_per_step": seconds,
            "speed/mfu_percent": mfu,
            "time/elapsed_seconds": self._timer.elapsed_seconds,
        }
        outer = self._outer.metrics() | {
            "time/wall_seconds": seconds * len(self._interval),
            "time/step_seconds": self._step_seconds,
            "time/data_seconds": self._data_seconds,
            "time/agreement_seconds": agreement - self._agreement_before,
        }
        outer |= self._own_steps()
        self._step_seconds, self._data_seconds, self._computed = 0.0, 0.0, []
        self._agreement_before = agreement
        rank_tokens = self._plan.tokens_per_step / self._world.size
        where = f"up to step {step}"
        sums = start_sum(
            self._world,
            [
                math.fsum(result.cross_entropy for result in trained),
                len(trained) * rank_tokens,
                self._interval[-1].gradient_norm,
                sum(result.skipped for result in self._interval),
                *outer.values(),
            ],
            where,
        )
        maxima = start_max(self._world, [peak_memory_bytes(self._world.device)], where)
        names = self._outer.fragment_names
        self._rounds += self._outer.rounds()
        rounds = PendingRounds(
            self._world, self._rounds, names, clock_start=self._clock_start, where=where
        )
        self._waiting.append(_Open(step, record, tuple(outer), sums, maxima, rounds))
        self._interval, self._rounds = [], []

    def _own_steps(self) -> dict[str, float]:
        """Of each worker's first rank: zeros but for this one's, so that the sum over ranks is a table of all."""
        found: dict[str, float] = {}
        for worker in range(self._world.workers):
            speaks = self._world.rank_in_worker == 0 and self._world.worker == worker
            own = self._computed if speaks else []
            sums = {
                "steps": float(len(own)),
                "seconds": math.fsum(own),
                "squares": math.fsum(one**2 for one in own),
            }
            found |= {worker_key(worker, name): value for name, value in sums.items()}
        return found

    def publish(self, step: int, *, all: bool = False) -> None:
        """Writes what was opened at least `lag` steps ago."""
        while self._waiting and (all or self._waiting[0].step + self._lag <= step):
            opened = self._waiting.popleft()
            started = time.perf_counter()
            rounds = opened.rounds.records()
            opened.sums.result()
            opened.maxima.result()
            self._read_seconds += time.perf_counter() - started
            for round_record in rounds:
                self._writer.write_round(round_record)
                self.observed.add(round_record)
            record = opened.record | self._global_part(opened, rounds)
            self._writer.write(opened.step, record)
            log_step(opened.step, self._plan.total_steps, record)

    def _global_part(self, opened: _Open, rounds: Sequence[RoundRecord]) -> Record:
        cross_entropy, tokens, norm, skipped, *outer = opened.sums.result()
        size = self._world.size
        part: Record = {
            "train/loss_nats_per_token_global": cross_entropy / tokens if tokens else math.nan,
            "train/gradient_norm_mean_over_workers": norm / size,
            "train/skipped_steps_mean_over_workers": skipped / size,
            "memory/peak_gib_max_over_ranks": opened.maxima.result()[0] / GIB,
        }
        totals = dict(zip(opened.names, outer, strict=True))
        for name, total in totals.items():
            self.totals[name] = self.totals.get(name, 0.0) + total
            if name.startswith("worker_"):
                continue
            if name.endswith("_bytes"):
                part[f"{name}_sum_over_ranks"] = total
            else:
                part[f"{name}_mean_over_ranks"] = total / size
        exposed = totals.get("diloco/exposed_seconds")
        wall = totals["time/wall_seconds"] / size
        shares = time_shares(
            wall=wall,
            steps=totals["time/step_seconds"] / size,
            data=totals["time/data_seconds"] / size,
            exposed=None if exposed is None else exposed / size,
            agreement=totals["time/agreement_seconds"] / size,
        )
        part |= {
            f"time/share_{name}_percent_mean_over_ranks": share for name, share in shares.items()
        }
        if exposed is not None and self._world.workers > 1 and wall > 0:
            used = 8 * totals["diloco/sent_bytes"] / self._world.workers / wall
            part["diloco/bandwidth_used_mbit_per_second_mean_over_workers"] = used / 1e6
            peak = max(map(peak_bits_per_second, rounds), default=None)
            part["diloco/bandwidth_peak_mbit_per_second_max_over_workers"] = (
                None if peak is None else peak / 1e6
            )
        return part


def peak_bits_per_second(record: RoundRecord) -> float:
    """Of the worker that had the most to carry in its transfer, in the direction that had more."""
    return max(
        (
            8 * max(worker["sent_bytes"], worker["received_bytes"]) / worker["transfer_seconds"]
            for worker in record["workers"]
            if worker["transfer_seconds"] and worker["sent_bytes"] is not None
        ),
        default=0.0,
    )
