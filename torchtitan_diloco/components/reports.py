"""A logged step: numbers of every rank made global, then written and printed."""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_diloco.components.metrics import MetricsWriter, Record, StepTimer, log_step
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.distributed.reductions import PendingReduction, start_max, start_sum
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.tools.device import GIB, peak_flops, peak_memory_bytes


class StepResult(NamedTuple):
    cross_entropy: float
    """Sum over this rank's tokens, in nats."""
    gradient_norm: float
    """Of the gradient of this worker's model, before clipping."""
    skipped: bool


@dataclass(frozen=True)
class _Open:
    step: int
    record: Record
    names: tuple[str, ...]
    sums: PendingReduction
    maxima: PendingReduction


class StepReports:
    """Ranks do not wait for each other to report: sums are started at a logged step and read `lag` steps later."""

    def __init__(
        self,
        world: World,
        plan: RunPlan,
        flops_per_token: int,
        writer: MetricsWriter,
        lag: int,
        *,
        elapsed_seconds: float = 0.0,
        totals: dict[str, float] | None = None,
    ) -> None:
        """`elapsed_seconds` and `totals`: what a run that goes on has behind it."""
        self._world, self._plan, self._writer, self._lag = world, plan, writer, lag
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops(world.device)
        self._timer = StepTimer(elapsed_seconds)
        self._interval: list[StepResult] = []
        self._waiting: deque[_Open] = deque()
        self.totals = dict(totals or {})
        """Of the outer loop, over the whole run and all ranks."""

    @property
    def elapsed_seconds(self) -> float:
        return self._timer.elapsed_seconds

    def step_done(self, result: StepResult) -> None:
        self._interval.append(result)
        self._timer.step_done()

    def pause(self, seconds: float) -> None:
        self._timer.pause(seconds)

    def open(self, step: int, lr: float, outer: dict[str, float]) -> None:
        """A logged step, over the steps since the last one. Every rank calls it at the same steps."""
        trained = [result for result in self._interval if not result.skipped]
        seconds = self._timer.seconds_per_step()
        tokens_per_second = self._plan.tokens_per_step / seconds
        mfu = None
        if self._peak_flops is not None:
            mfu = 100 * self._flops_per_token * tokens_per_second / (self._peak_flops * self._world.size)
        record: Record = {
            "train/lr": lr,
            "train/tokens_global": self._plan.tokens_at(step),
            "speed/tokens_per_second_global": tokens_per_second,
            "speed/seconds_per_step": seconds,
            "speed/mfu_percent": mfu,
            "time/elapsed_seconds": self._timer.elapsed_seconds,
        }
        names = tuple(outer)
        rank_tokens = self._plan.tokens_per_step / self._world.size
        sums = start_sum(
            self._world,
            [
                math.fsum(result.cross_entropy for result in trained),
                len(trained) * rank_tokens,
                self._interval[-1].gradient_norm,
                sum(result.skipped for result in self._interval),
                *outer.values(),
            ],
            f"up to step {step}",
        )
        maxima = start_max(self._world, [peak_memory_bytes(self._world.device)], f"up to step {step}")
        self._waiting.append(_Open(step, record, names, sums, maxima))
        self._interval = []

    def publish(self, step: int, *, all: bool = False) -> None:
        """Writes what was opened at least `lag` steps ago."""
        while self._waiting and (all or self._waiting[0].step + self._lag <= step):
            opened = self._waiting.popleft()
            record = opened.record | self._global_part(opened)
            self._writer.write(opened.step, record)
            log_step(opened.step, self._plan.total_steps, record)

    def _global_part(self, opened: _Open) -> Record:
        cross_entropy, tokens, norm, skipped, *outer = opened.sums.result()
        size = self._world.size
        part: Record = {
            "train/loss_nats_per_token_global": cross_entropy / tokens if tokens else math.nan,
            "train/gradient_norm_mean_over_workers": norm / size,
            "train/skipped_steps_mean_over_workers": skipped / size,
            "memory/peak_gib_max_over_ranks": opened.maxima.result()[0] / GIB,
        }
        for name, total in zip(opened.names, outer, strict=True):
            self.totals[name] = self.totals.get(name, 0.0) + total
            if name.endswith("_bytes"):
                part[f"{name}_sum_over_ranks"] = total
            else:
                part[f"{name}_mean_over_ranks"] = total / size
        return part
