"""Temporary adapter: replaced by the telemetry module."""

from pathlib import Path
from typing import Any, Self

from torchtitan_diloco.components.metrics import MetricsWriter
from torchtitan_diloco.components.reports import StepReports, StepResult
from torchtitan_diloco.components.step_time import TimedIterator

__all__ = ["StepResult", "Telemetry", "TimedIterator"]


class Telemetry:
    def __init__(
        self,
        config: Any,
        world: Any,
        folder: Path | None,
        plan: Any,
        outer: Any,
        state: Any,
        *,
        flops_per_token: int,
        lag: int,
    ) -> None:
        own = folder if world.is_first else None
        self._writer = MetricsWriter(own, config, state.step, world.workers)
        behind = {"totals": state.totals, "elapsed_seconds": state.elapsed_seconds}
        self._reports = StepReports(world, plan, flops_per_token, self._writer, lag, outer, behind)
        for name in ("step_begins", "step_done", "drained", "pause", "open", "publish"):
            setattr(self, name, getattr(self._reports, name))
        for name in ("write", "write_summary", "draw"):
            setattr(self, name, getattr(self._writer, name))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    @property
    def totals(self) -> dict[str, float]:
        return self._reports.totals

    @property
    def elapsed_seconds(self) -> float:
        return self._reports.elapsed_seconds

    @property
    def round_records(self) -> Any:
        return self._reports.observed._rounds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(None, None, None)
