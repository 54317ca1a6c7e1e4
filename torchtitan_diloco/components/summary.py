"""The table at the end of a run.

Its figures have the names and values of a report (report/page.py): both are computed from the
records, with the functions of metrics.py.
"""

import math
import os
import shlex
from pathlib import Path

from torchtitan_diloco.base.formatting import clock
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import LOCAL_ISLANDS, command_line, training_command
from torchtitan_diloco.components.metrics import (
    BASELINE,
    GRADIENTS,
    SENT,
    all_reduce_bytes,
    baseline_bytes,
    compute_percent,
    exchange_times,
    hidden_percent,
    kept_time,
)
from torchtitan_diloco.components.telemetry import Telemetry
from torchtitan_diloco.components.traffic import RunTraffic, traffic_rows
from torchtitan_diloco.config.schema import Price


def log_summary(
    telemetry: Telemetry,
    folder: Path,
    step: int,
    validated: tuple[int, float, float] | None,
    *,
    has_control: bool,
    compared: Path | None,
    traffic: RunTraffic,
    price: Price,
    epochs: str = "",
) -> None:
    """Log the figures of a run, and the commands to run next.

    Args:
        has_control: a run with data parallelism and the same settings sees the same data.
        compared: the folder of the run of which this one is the control, if it is one.
    """
    figures = {}
    if validated is not None:
        after, loss, bits = validated
        figures["loss of the shared model"] = (
            f"{loss:.4f} nats per held-out token, {bits:.4f} bits per byte, after step {after}"
        )
    if telemetry.workers > 1:
        figures |= _bytes_sent(telemetry, step) | _shares(telemetry)
    figures |= traffic_rows(traffic.counted(telemetry.totals), price)
    figures |= _kept_time(telemetry)
    if "," in epochs:  # of several corpora
        figures["read"] = epochs

    commands = {}
    if has_control and telemetry.workers > 1 and SENT in telemetry.totals:
        config = shlex.quote(str(folder / "config.toml"))
        control = f"{training_command()} --config {config} --diloco.method none"
        commands["to compare with data parallelism, run"] = control
    if compared is not None:
        folders = shlex.join([str(compared), str(folder)])
        commands["to compare both runs, run"] = f"{command_line('report')} {folders}"
    whole = shlex.quote(os.environ.get(LOCAL_ISLANDS, str(folder)))
    commands["to see where the time went, run"] = f"{command_line('report')} {whole}"
    for table in (figures, commands):
        width = max(map(len, table), default=0)
        for name, text in table.items():
            logger.info(f"{name:<{width}}  {text}")
    duration = clock(telemetry.elapsed_seconds)
    if before := telemetry.elapsed_before:
        duration = (
            f"{duration}, of which {clock(telemetry.elapsed_seconds - before)} since it was resumed"
        )
    logger.info(f"took {duration}; the run is in {folder}")


def _bytes_sent(telemetry: Telemetry, step: int) -> dict[str, str]:
    """Return what each worker has sent, and what the baseline would send."""
    totals = telemetry.totals
    plan = telemetry.plan
    workers = telemetry.workers
    steps = round(totals.get("worker/steps", 0))
    since = f" after step {step - steps}" if steps < step else ""
    if SENT in totals:
        sent = totals[SENT]
        whole_cycle = totals.get("worker/fragments_applied", 0) >= len(telemetry.outer.fragments)
        text = f"{sent / 1e6:,.1f} MB{since}, counted in the buffers"
    else:
        gradients = GRADIENTS[plan.reduce_dtype]
        sent = steps * all_reduce_bytes(plan.parameters, workers, each=gradients.bytes_each)
        whole_cycle = True
        text = f"{sent / 1e6:,.1f} MB{since}, computed: {gradients.name} gradients, every step"
    expected = steps * baseline_bytes(plan.parameters, workers)
    ratio = f", {expected / sent:,.1f} times as much" if sent and whole_cycle else ""
    return {"sent by each worker": text, BASELINE: f"{expected / 1e6:,.1f} MB{ratio}"}


def _shares(telemetry: Telemetry) -> dict[str, str]:
    """Return what communication has cost."""
    totals = telemetry.totals
    rows = {}
    scope = "all workers" if telemetry.world.workers > 1 else "this island"
    if math.isfinite(hidden := hidden_percent(totals)):
        took, waited = exchange_times(totals)
        rows["hidden"] = (
            f"{hidden:.1f} % of the exchanges' time, {scope} (training waited for {waited:.2f} of "
            f"{took:.2f} s)"
        )
    if math.isfinite(computing := compute_percent(totals)):
        rows["compute share"] = f"{computing:.1f} % of the training time, {scope}"
    return rows


def _kept_time(telemetry: Telemetry) -> dict[str, str]:
    """Return the share of the wall time that went into steps that were kept, if it is known."""
    records = telemetry.files.read() if telemetry.world.is_first else []
    starts = [record["time"] for record in records if record.get("kind") == "start"]
    steps = [record for record in records if "kind" not in record]
    shares = kept_time(starts, steps)
    if not shares:
        return {}
    return {
        "kept time": f"{shares['run']:.1f} % of the wall time went into steps that were kept "
        f"({shares['last hour']:.1f} % in the last hour)"
    }
