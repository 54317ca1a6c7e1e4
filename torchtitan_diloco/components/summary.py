"""The table at the end of a run."""

import shlex
from collections.abc import Collection
from pathlib import Path

from torchtitan_diloco.components.metrics import Totals, hidden_percent, utilisation_percent
from torchtitan_diloco.components.telemetry import Telemetry
from torchtitan_diloco.components.timeline import RoundRecord, phases
from torchtitan_diloco.distributed.collectives import PendingSum
from torchtitan_diloco.log import clock, command_line, logger

HIDDEN_WELL_PERCENT = 90
SHOWN = (
    "worker/steps",
    "worker/step_seconds",
    "worker/agreement_seconds",
    "worker/exchange_seconds",
    "worker/exposed_seconds",
    "worker/exposed_waiting_seconds",
    "worker/sent_bytes",
)
REASONS = {
    "encoding": "encoding, on too few cores: diloco.quantization.threads, or a 16-bit codec",
    "waiting for others": "waiting for others: they are slower, or other programs use their cores",
    "transfer": "the link: docs/planning.md says how to find settings for it",
    "outer step": "decoding and the outer step, on too few cores",
}
"""Text for the phase that took most of the time of exchanges."""


def log_summary(
    telemetry: Telemetry,
    folder: Path,
    *,
    step: int,
    validated: tuple[int, float] | None,
    has_control: bool,
    optimizer: str,
) -> None:
    """Log the table. Collective.

    `has_control`: a run with data parallelism and the same settings sees the same data.
    """
    totals, rounds = mean_over_workers(telemetry), telemetry.rounds
    rows = {}
    if validated is not None:
        text = f"{validated[1]:.4f} nats per held-out token, after step {validated[0]}"
        rows["loss of the shared model"] = text
    began = telemetry.plan.ranks // telemetry.world.ranks_per_worker  # islands may have come since
    workers = max([began, *(record.participants for record in rounds)])
    if workers > 1:
        rows |= _bytes(totals, telemetry.plan.parameters, workers, step)
    if "worker/sent_bytes" in totals:
        if has_control and workers > 1:
            config = shlex.quote(str(folder / "config.toml"))
            control = f"{command_line('train')} --config {config} --diloco.method none"
            rows["its loss at equal tokens"] = control
            if optimizer != "adamw":
                rows["and with AdamW"] = f"{control} --optimizer.name adamw"
        if workers > 1:
            rows |= _times(totals, rounds)
    rows["see where the time went"] = f"{command_line('report')} {shlex.quote(str(folder))}"
    for name, text in rows.items():
        logger.info(f"{name:<28} {text}")
    logger.info(f"took {clock(telemetry.elapsed_seconds)}; the run is in {folder}")


def mean_over_workers(telemetry: Telemetry) -> Totals:
    """Return the mean of the totals of all workers, of the first rank of each. Collective."""
    world, totals = telemetry.world, telemetry.totals
    share = 0.0 if world.rank_in_worker else 1 / world.workers
    values = [share * totals.get(name, 0.0) for name in SHOWN]
    means = zip(SHOWN, PendingSum(world, values, "at the end").result(), strict=True)
    return {name: mean for name, mean in means if name in totals}


def _bytes(totals: Totals, parameters: int, workers: int, step: int) -> dict[str, str]:
    steps = round(totals.get("worker/steps", 0))
    by_each = "MB by each worker" + (f" after step {step - steps}" if steps < step else "")
    expected = steps * all_reduce_bytes(parameters, workers)
    would_send = f"{expected / 1e6:,.1f}"
    gradients = "(bf16 gradients, every step)"
    if (sent := totals.get("worker/sent_bytes")) is None:
        return {"sent between workers": f"about {would_send} {by_each} {gradients}"}
    ratio = f", {expected / sent:,.1f} times as much" if sent else ""
    return {
        "sent between workers": f"{sent / 1e6:,.1f} {by_each}, as counted",
        "data parallelism would send": f"{would_send} MB {gradients}{ratio}",
    }


def _times(totals: Totals, rounds: Collection[RoundRecord]) -> dict[str, str]:
    rows = {}
    if exchange := totals["worker/exchange_seconds"]:
        hidden, waited = hidden_percent(totals), totals["worker/exposed_waiting_seconds"]
        rows["communication hidden"] = (
            f"{hidden:.1f} % (exchanges took {exchange:.2f} s, training waited {waited:.2f} s, "
            "mean over workers)"
        )
        if hidden < HIDDEN_WELL_PERCENT and (longest := longest_phase(rounds)):
            rows["most of an exchange was"] = REASONS[longest]
    rows["time spent computing"] = f"{utilisation_percent(totals):.1f} % of the training steps"
    return rows


def longest_phase(rounds: Collection[RoundRecord]) -> str:
    """Return the phase that took most of the time of exchanges, or "" if it is not known."""
    seconds = dict.fromkeys(REASONS, 0.0)
    for phase in phases([record] for record in rounds):
        if phase.name in seconds:
            seconds[phase.name] += phase.seconds
    # Islands do not know the moments of the others, so they have no phases to compare.
    return max(seconds, key=seconds.__getitem__) if seconds["transfer"] else ""


def all_reduce_bytes(parameters: float, workers: int) -> float:
    """Return the bytes that one worker sends in a ring all-reduce of all gradients in bf16."""
    return 2 * (workers - 1) / workers * 2 * parameters
