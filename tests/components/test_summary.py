"""The table at the end of a run, which shows the figures of its report under the same names."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from tests.components.test_telemetry import PLAN, SENT, Clock, Outer, log, telemetry, train
from tests.test_trainer import records
from torchtitan_diloco.components import telemetry as module
from torchtitan_diloco.components.metrics import (
    BASELINE,
    baseline_bytes,
    exchange_times,
    hidden_percent,
    kept_time,
)
from torchtitan_diloco.components.summary import log_summary
from torchtitan_diloco.components.telemetry import SavedTelemetry, StepResult, Telemetry
from torchtitan_diloco.components.traffic import RunTraffic
from torchtitan_diloco.config.schema import Price
from torchtitan_diloco.diloco import DiLoCoConfig
from torchtitan_diloco.diloco.data_parallel import DataParallel
from torchtitan_diloco.distributed.collectives import Asked, PendingSum
from torchtitan_diloco.report.page import facts_table
from torchtitan_diloco.report.run_records import open_runs

OF_TWO = replace(PLAN, parameters=10**6, ranks=2)


class Uneven(Outer):
    """Sends, exchanges and waits as it is told, for an applied round at each step."""

    def __init__(self, sent: float, exchange: float, waiting: float, merging: float) -> None:
        super().__init__()
        self.exposed_seconds = 0.0
        self._each = {SENT: sent, "worker/fragments_applied": 1.0}
        self._each |= {"worker/exchange_seconds": exchange}
        self._each |= {"worker/exposed_waiting_seconds": waiting}
        self._each |= {"worker/exposed_seconds": waiting + merging}

    def step(self) -> None:
        super().step()
        self.exposed_seconds += self._each["worker/exposed_seconds"]
        Clock.now += 0.7 + self._each["worker/exposed_seconds"]

    def train_step(self) -> StepResult:
        self.step()
        return StepResult(64.0, 1.0, skipped=False)

    def metrics(self) -> dict[str, float]:
        return dict(self._each)


def train_workers(
    folder: Path, steps: range, states: Sequence[SavedTelemetry] = ()
) -> list[SavedTelemetry]:
    """Train two workers of which only the second waits, and log every other step.

    Go on from the states that were saved, and return those after the last step.
    """
    outers = Uneven(3e6, 0.5, 0.0, 0.01), Uneven(4e6, 1.1, 0.37, 0.05)
    begin = steps[0] - 1
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                telemetry(folder, outer, rank=rank, workers=2, step=begin, plan=OF_TWO)
            )
            for rank, outer in enumerate(outers)
        ]
        for worker, state in zip(workers, states, strict=False):
            worker.load_state(state)
        for step in steps:
            each = []
            for own, outer in zip(workers, outers, strict=True):
                own.measure(outer.train_step)
                Clock.now += 0.2
                each.append(own.numbers(agreement_seconds=0.03 * (step - begin)))
            summed = [*Asked(), *map(sum, zip(*each, strict=True))]
            for own in workers:
                if step % 2 == 0:
                    own.open_record(step, 0.1, PendingSum(own.world, summed, "in the test"))
                own.publish(all=True)
        Clock.now += 3.0  # of the validation
        workers[0].write(steps[-1], {"loss/val": 1.5})
        summarize(workers[0], folder, steps[-1], (steps[-1], 1.5, 2.0), has_control=True)
        return [worker.saved_state() for worker in workers]


def summarize(
    own: Telemetry,
    folder: Path,
    step: int,
    validated: tuple[int, float, float] | None,
    *,
    has_control: bool = False,
    compared: Path | None = None,
) -> None:
    """Log the summary of a run of two workers."""
    traffic = RunTraffic(
        diloco=DiLoCoConfig(workers=2),
        fragments=[own.plan.parameters],
        parameters=own.plan.parameters,
        workers=2,
        ranks=1,
        steps=step,
        reduce_dtype=own.plan.reduce_dtype,
    )
    price = Price(per_gb=50.0)
    log_summary(
        own,
        folder,
        step,
        validated,
        has_control=has_control,
        compared=compared,
        traffic=traffic,
        price=price,
    )


def logged(messages: Sequence[str]) -> dict[str, str]:
    """Return the rows of the table at the end by their names."""
    pairs = (re.split(r" {2,}", line, maxsplit=1) for line in messages)
    return dict(pair for pair in pairs if len(pair) == 2)


def test_the_table_at_the_end_has_the_figures_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a run that was started twice, with workers that differ."""
    monkeypatch.setattr(module, "time", Clock())
    caplog.set_level("INFO", "torchtitan_diloco")
    states = train_workers(tmp_path, range(1, 5))
    first_end = caplog.messages[-1]
    Clock.now += 9.0
    caplog.clear()
    train_workers(tmp_path, range(5, 13), states)
    (run,) = open_runs([tmp_path])
    report = {name.text: cell for name, cell in facts_table([run]).rows}
    log = logged(caplog.messages)
    shared = set(log) & set(report)
    assert shared == {
        "loss of the shared model",
        "sent by each worker",
        BASELINE,
        "hidden",
        "compute share",
        "kept time",
    }
    for name in shared:
        assert log[name].startswith(report[name].text), name
    assert log["hidden"].startswith(f"{100 * (1 - 0.37 / 1.6):.1f} %"), "of both workers"
    # 3.5 MB in each of twelve steps, of 2.23 seconds on the clock of both workers, but the first
    # of each start, which has only the 0.91 seconds of the first worker.
    sent = re.match(r"each worker sends ([\d.]+) and .* ([\d.]+) GB in the run", log["traffic"])
    assert sent is not None
    assert float(sent[1]) == pytest.approx(12 * 3.5e-3 * 3600 / (10 * 2.23 + 2 * 0.91), rel=0.02)
    assert sent[2] == "0.042"
    assert " an hour, 4.20 in the run, of all of these" in log["cost"]
    last_hour = re.findall(r"[\d.]+ % in the last hour", log["kept time"])
    assert last_hour[0] in report["kept time"].note
    first, second = (records(tmp_path, worker=worker)[0] for worker in (0, 1))
    for name in ("sync/hidden_percent", "speed/compute_percent", "sync/exposed_percent"):
        assert 0 < first[name] == second[name] < 100, name
    assert first_end.startswith("took 0:00:12; the run is in ")
    resumed_end = caplog.messages[-1]
    assert resumed_end.startswith("took 0:00:33, of which 0:00:21 since it was resumed; the run is")


def test_a_wait_is_at_most_as_long_as_the_exchanges() -> None:
    totals = {
        "world/sent_bytes": 1.0,
        "world/exchange_seconds": 0.18,
        "world/exposed_waiting_seconds": 0.19,
    }
    assert exchange_times(totals) == (0.18, 0.18)
    assert hidden_percent(totals) == 0.0


def test_the_summary_counts_islands_that_came_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with telemetry(None) as own:
        train(own, range(1, 9))
    caplog.set_level("INFO", "torchtitan_diloco")
    summarize(own, tmp_path, 10, None)
    expected = 8 * baseline_bytes(PLAN.parameters, 2) / 1e6
    assert logged(caplog.messages)[BASELINE].startswith(f"{expected:,.1f} MB")
    assert " MB after step 2, counted in the buffers" in caplog.text


@pytest.mark.parametrize(
    ("reduce_dtype", "name", "factor"), [("float32", "fp32", 2), ("bfloat16", "bf16", 1)]
)
def test_the_control_has_sent_what_it_averages_and_ratios_are_against_bf16(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    reduce_dtype: str,
    name: str,
    factor: int,
) -> None:
    model = nn.Linear(3, 3)
    plan = replace(OF_TWO, reduce_dtype=reduce_dtype)
    with telemetry(None, DataParallel(model, 2), workers=2, plan=plan) as own:
        for step in range(1, 9):
            own.measure(lambda: StepResult(64.0, 1.0, skipped=False))
            log(own, step)
        own.publish(all=True)
    caplog.set_level("INFO", "torchtitan_diloco")
    summarize(own, tmp_path, 8, None, compared=tmp_path / "the other")
    table = logged(caplog.messages)
    assert table["sent by each worker"] == (
        f"{8 * factor * 2:.1f} MB, computed: {name} gradients, every step"
    )
    assert table[BASELINE] == f"16.0 MB, {1 / factor:.1f} times as much"
    command = table["to compare both runs, run"]
    assert command.endswith(f" report '{tmp_path}/the other' {tmp_path}")


@pytest.mark.parametrize(
    ("starts", "steps", "expected"),
    [
        ([0.0], {100.0: 100.0}, {}),
        ([0.0, 200.0], {100.0: 100.0, 400.0: 200.0}, {"run": 75.0, "last hour": 75.0}),
        ([0.0], {3600.0: 2700.0, 7200.0: 1800.0}, {"run": 62.5, "last hour": 50.0}),
        ([4000.0, 600.0], {5000.0: 900.0, 1200.0: 500.0}, {}),  # on a clock that is behind
        ([0.0, 6000.0], {7200.0: 1000.0, 6600.0: 500.0}, {}),
    ],
)
def test_kept_time_is_the_share_of_the_wall_time_in_steps_that_are_kept(
    starts: list[float], steps: dict[float, float], expected: dict[str, float]
) -> None:
    records = [{"time": at, "world/step_seconds": took} for at, took in steps.items()]
    records.append({"time": 9e9, "loss/val": 1.0})
    assert kept_time(starts, records) == expected
