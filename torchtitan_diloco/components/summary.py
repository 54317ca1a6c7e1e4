"""The table at the end of a run."""

import os
import shlex
from pathlib import Path

from torchtitan_diloco.components.metrics import (
    Totals,
    hidden_percent,
    percent,
    utilisation_percent,
)
from torchtitan_diloco.components.records import METRICS_FILE, read_json_lines
from torchtitan_diloco.components.run_folder import folder_of_worker
from torchtitan_diloco.components.telemetry import Telemetry
from torchtitan_diloco.log import LOCAL_ISLANDS, clock, command_line, logger

HOUR = 3600.0


def log_summary(
    telemetry: Telemetry,
    folder: Path,
    step: int,
    validated: tuple[int, float, float] | None,
    *,
    has_control: bool,
) -> None:
    """Log the table, with the times of the first worker.

    `has_control`: a run with data parallelism and the same settings sees the same data.
    """
    totals, rows = telemetry.totals, {}
    if validated is not None:
        after, loss, bits = validated
        rows["loss of the shared model"] = (
            f"{loss:.4f} nats per held-out token, {bits:.4f} bits per byte, after step {after}"
        )
    if telemetry.workers > 1:
        rows |= _bytes(totals, telemetry, step)
        if has_control and "worker/sent_bytes" in totals:
            config = shlex.quote(str(folder / "config.toml"))
            control = f"{command_line('train')} --config {config} --diloco.method none"
            rows["its loss at equal tokens"] = control
        rows |= _times(totals)
    if telemetry.world.is_first:
        rows |= _goodput(folder_of_worker(folder, 0) / METRICS_FILE)
    whole = os.environ.get(LOCAL_ISLANDS, str(folder))
    rows["see where the time went"] = f"{command_line('report')} {shlex.quote(whole)}"
    for name, text in rows.items():
        logger.info(f"{name:<28} {text}")
    logger.info(f"took {clock(telemetry.elapsed_seconds)}; the run is in {folder}")


def _bytes(totals: Totals, telemetry: Telemetry, step: int) -> dict[str, str]:
    steps = round(totals.get("worker/steps", 0))
    by_each = "MB by each worker" + (f" after step {step - steps}" if steps < step else "")
    expected = steps * all_reduce_bytes(telemetry.plan.parameters, telemetry.workers)
    would_send = f"{expected / 1e6:,.1f}"
    gradients = "(bf16 gradients, every step)"
    if (sent := totals.get("worker/sent_bytes")) is None:
        return {"sent between workers": f"about {would_send} {by_each} {gradients}"}
    whole = totals.get("worker/fragments_applied", 0) >= telemetry.fragments  # a cycle
    ratio = f", {expected / sent:,.1f} times as much" if sent and whole else ""
    return {
        "sent between workers": f"{sent / 1e6:,.1f} {by_each}, as counted",
        "data parallelism would send": f"{would_send} MB {gradients}{ratio}",
    }


def _times(totals: Totals) -> dict[str, str]:
    rows = {}
    if exchange := totals.get("worker/exchange_seconds"):
        rows["communication hidden"] = (
            f"{hidden_percent(totals):.1f} % (exchanges took {exchange:.2f} s, training waited "
            f"{totals['worker/exposed_waiting_seconds']:.2f} s, first worker)"
        )
    if "worker/exposed_seconds" in totals:
        rows["time spent computing"] = f"{utilisation_percent(totals):.1f} % of the training steps"
    return rows


def _goodput(path: Path) -> dict[str, str]:
    """Return the goodput of a run that was started several times, or took more than an hour."""
    records = read_json_lines(path)[0] if path.exists() else []
    starts = [one["time"] for one in records if one.get("kind") == "start"]
    steps = [one for one in records if "worker/step_seconds" in one]  # repeated ones are dropped
    if not starts or not steps:
        return {}
    now = steps[-1]["time"]
    shares = {"run": now - starts[0], "last hour": min(HOUR, now - starts[0])}
    if len(starts) < 2 and shares["run"] < HOUR:
        return {}
    for name, seconds in shares.items():
        own = (one["worker/step_seconds"] for one in steps if one["time"] > now - seconds)
        shares[name] = percent(sum(own), seconds)
    texts = (f"{share:.1f} % of the {name}" for name, share in shares.items())
    return {"goodput": f"steps that count took {', '.join(texts)}, first worker"}


def all_reduce_bytes(parameters: float, workers: int) -> float:
    """Return the bytes that one worker sends in a ring all-reduce of all gradients in bf16."""
    return 2 * (workers - 1) / workers * 2 * parameters
