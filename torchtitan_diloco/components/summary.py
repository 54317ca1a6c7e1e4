"""Summary of a run: its last record, the printed table, and the measured link and steps."""

import math
import shlex
import statistics
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from torchtitan_diloco.components.records import Conditions, RoundRecord, Summary, phases
from torchtitan_diloco.components.round_records import known, percent_without
from torchtitan_diloco.components.telemetry import OF_WORKER, Telemetry, worker_key
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.log import clock, command_line, logger

HIDDEN_WELL_PERCENT = 90
REASONS = {
    "encoding": "encoding, on too few cores: diloco.quantization.threads, or a 16-bit codec",
    "waiting for others": "waiting for others: they are slower, or other programs use their cores",
    "transfer": "the link: docs/planning.md says how to find settings for it",
    "outer step": "decoding and the outer step, on too few cores",
}
"""Text for the phase that took most of the time of exchanges."""
UNLIMITED = 1e12
"""Bits per second of a link whose transfers were too short to be measured."""


def summarise(
    telemetry: Telemetry,
    config: DiLoCoConfig,
    *,
    step: int,
    validated: tuple[int, float] | None,
) -> Summary:
    """Return the last record of metrics.jsonl, without the prediction."""
    totals, world, rounds = telemetry.totals, telemetry.world, telemetry.round_records
    summary = Summary(step, telemetry.counted_after_step)
    if validated is not None:
        summary.validation_step, summary.validation_loss = validated
    began = telemetry.plan.ranks // world.ranks_per_worker  # islands may have come since
    workers = max([began, *(record.participants for record in rounds)])
    if workers == 1:
        return summary
    bytes_of_step = all_reduce_bytes(telemetry.plan.parameters, workers)
    summary.data_parallel_bytes_per_worker = bytes_of_step * (step - summary.counted_after_step)
    if "diloco/sent_bytes" in totals:
        exchange = totals["diloco/exchange_seconds"]
        waited = totals["diloco/exposed_waiting_seconds"]
        agreement = totals["time/agreement_seconds"]
        summary.sent_bytes_mean_over_workers = totals["diloco/sent_bytes"] / world.workers
        summary.exchange_seconds_mean_over_ranks = exchange / world.size
        summary.exposed_waiting_seconds_mean_over_ranks = waited / world.size
        summary.hidden_percent = percent_without(waited, exchange)
        summary.measured_utilisation_percent = percent_without(
            totals["diloco/exposed_seconds"] + agreement, totals["time/step_seconds"] + agreement
        )
        summary.observed = observed_conditions(config, totals, rounds)
        summary.longest_phase = longest_phase(rounds)
    return summary


def longest_phase(rounds: Collection[RoundRecord]) -> str:
    """Return the phase that took most of the time of exchanges, or "" if it is not known."""
    seconds = dict.fromkeys(REASONS, 0.0)
    for phase in phases(tuple(rounds)):
        if phase.name in seconds:
            seconds[phase.name] += phase.seconds
    # Islands do not know the moments of the others, so they have no phases to compare.
    return max(seconds, key=seconds.__getitem__) if seconds["transfer"] else ""


def log_summary(
    summary: Summary, folder: Path, seconds: float, *, has_control: bool, optimizer: str
) -> None:
    """Log the table at the end of a run.

    `has_control`: a run with data parallelism and the same settings sees the same data.
    """
    after = summary.counted_after_step
    by_each = "MB by each worker" + (f" after step {after}" if after else "")
    sent, expected = summary.sent_bytes_mean_over_workers, summary.data_parallel_bytes_per_worker
    would_send = f"{expected / 1e6:,.1f}"
    gradients = "(bf16 gradients, every step)"
    rows = {}
    if math.isfinite(loss := summary.validation_loss):
        text = f"{loss:.4f} nats per held-out token, after step {summary.validation_step}"
        rows["loss of the shared model"] = text
    if math.isfinite(sent):
        rows["sent between workers"] = f"{sent / 1e6:,.1f} {by_each}, as counted"
        ratio = f", {expected / sent:,.1f} times as much" if sent else ""
        rows["data parallelism would send"] = f"{would_send} MB {gradients}{ratio}"
        if has_control:
            config = shlex.quote(str(folder / "config.toml"))
            control = f"{command_line('train')} --config {config} --diloco.method none"
            rows["its loss at equal tokens"] = control
            if optimizer != "adamw":
                rows["and with AdamW"] = f"{control} --optimizer.name adamw"
    elif math.isfinite(expected):
        rows["sent between workers"] = f"about {would_send} {by_each} {gradients}"
    if math.isfinite(hidden := summary.hidden_percent):
        rows["communication hidden"] = (
            f"{hidden:.1f} % (exchanges took {summary.exchange_seconds_mean_over_ranks:.2f} s, "
            f"training waited {summary.exposed_waiting_seconds_mean_over_ranks:.2f} s, mean over "
            "ranks)"
        )
        if hidden < HIDDEN_WELL_PERCENT and summary.longest_phase:
            rows["most of an exchange was"] = REASONS[summary.longest_phase]
    if math.isfinite(measured := summary.measured_utilisation_percent):
        text = f"{measured:.1f} % of the training steps"
        if math.isfinite(predicted := summary.predicted_utilisation_percent):
            text += f"; the planner predicts {predicted:.1f} % for these links"
        rows["time spent computing"] = text
    rows["see where the time went"] = f"{command_line('report')} {shlex.quote(str(folder))}"
    for name, text in rows.items():
        logger.info(f"{name:<28} {text}")
    logger.info(f"took {clock(seconds)}; the run is in {folder}")


# --- link and steps -------------------------------------------------------------------------------


def observed_conditions(
    config: DiLoCoConfig, totals: Mapping[str, float], rounds: Collection[RoundRecord]
) -> Conditions | None:
    """Return link, step times and coding speeds, or None if not enough was measured."""
    tables = [(record.parameters, worker) for record in rounds for worker in record.workers]
    heard_after = known(seconds for _, worker in tables for seconds in worker.heard_after_seconds)
    means, spreads = [], []
    for worker in range(config.workers):
        steps, seconds, squares = (totals.get(worker_key(worker, name), 0.0) for name in OF_WORKER)
        if not steps or not seconds or not heard_after:
            return None
        means.append(seconds / steps)
        spreads.append(math.sqrt(max(0.0, squares / steps - means[-1] ** 2)) / means[-1])
    return Conditions(
        _slowest_link(rounds, config.workers),
        tuple(means),
        latency_seconds=min(heard_after),
        jitter=min(1.0, statistics.fmean(spreads)),
        coding_bytes_per_second=_median_rate(
            (
                coded_bytes(parameters, config.workers, config.quantization.codec),
                one.encoding_seconds + one.decoding_seconds,
            )
            for parameters, one in tables
        ),
        outer_bytes_per_second=_median_rate(
            (4 * parameters, one.seconds("received", "ready")) for parameters, one in tables
        ),
        codec=config.quantization.codec,
    )


def _median_rate(measured: Iterable[tuple[float, float]]) -> float:
    """Return the median of bytes per second, or infinity if nothing took time."""
    rates = [count / seconds for count, seconds in measured if seconds > 0]
    return statistics.median(rates or [math.inf])


def _slowest_link(rounds: Collection[RoundRecord], workers: int) -> float:
    """Return the rate of the slowest worker: the sum of its simultaneous transfers."""
    largest = max(record.parameters for record in rounds)
    large = [one for one in rounds if 2 * one.parameters > largest]  # others are too short

    def median_rate(to: int, source: int) -> float:
        rates = known(one.workers[to].received_bits_per_second_from[source] for one in large)
        return statistics.median(rates or [0.0])

    table = [[median_rate(to, source) for source in range(workers)] for to in range(workers)]
    return min(sum(rates) or UNLIMITED for rates in (*table, *zip(*table, strict=True)))


def coded_bytes(values: int, workers: int, codec: str) -> float:
    """Return the fp32 bytes that a worker encodes and decodes in an exchange.

    Two workers, or any number with `topk`, encode their delta and decode those of all workers.
    Otherwise each encodes its delta and the mean of its slice, and decodes all parts of that slice
    and all means.
    """
    return 4 * values * (1 + workers if workers == 2 or codec == "topk" else 3 + 1 / workers)


def all_reduce_bytes(parameters: float, workers: int) -> float:
    """Return the bytes that one worker sends in a ring all-reduce of all gradients in bf16."""
    return 2 * (workers - 1) / workers * 2 * parameters
