"""Measurements of a run: its summary at the end, and link and steps for the planner."""

import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from torchtitan_diloco.components.round_records import RoundRecord
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.telemetry import worker_key
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.planner.prediction import Conditions, coded_bytes, predict
from torchtitan_diloco.utils import all_reduce_bytes, logger, read_json_lines

UNLIMITED = 1e12
"""Bits a second of a link that nobody had to wait for."""
PROBE_SYNC_EVERY = 4
PROBE_STEPS = 5 * PROBE_SYNC_EVERY
"""Steps of a probe, in which every fragment is exchanged four times."""
PROBE_SETTINGS = {
    "training.steps": PROBE_STEPS,
    "training.tokens": 0,
    "training.tokens_per_parameter": 0,
    "training.stop_after": 0,
    "diloco.method": "streaming",
    "diloco.sync_every": PROBE_SYNC_EVERY,
    "validation.every": 0,
    "checkpoint.every": 0,
    "checkpoint.every_minutes": 0,
    "checkpoint.at_end": "false",
    "checkpoint.resume": "never",
    "metrics.log_every": 1,
    "metrics.tensorboard": "false",
}


# --- the summary of a run ------------------------------------------------------------------------


def run_summary(
    plan: RunPlan,
    config: DiLoCoConfig,
    *,
    ranks: int,
    step: int,
    validated: tuple[int, float] | None,
    totals: Mapping[str, float],
    totals_after: int,
    rounds: Collection[RoundRecord],
) -> dict[str, Any]:
    """Return the record that ends metrics.jsonl. Values that are not known are None.

    `totals` are sums of the outer loop's metrics over all ranks and the steps after `totals_after`.
    """
    workers, steps = config.workers, step - totals_after
    validation_step, loss = validated or (None, None)
    sent = exchange = waited = hidden = measured = predicted = conditions = None
    if workers > 1 and "diloco/sent_bytes" in totals:
        sent = totals["diloco/sent_bytes"] / workers
        exchange = totals.get("diloco/exchange_seconds", 0.0) / ranks
        waited = totals.get("diloco/exposed_waiting_seconds", 0.0) / ranks
        hidden = 100 * max(0.0, 1 - waited / exchange) if exchange else None
        measured = _measured_utilisation(totals)
        conditions = observed_conditions(config, totals, rounds)
    sizes = {record["fragment"]: record["parameters"] for record in rounds}
    if conditions is not None and sorted(sizes) == list(range(len(sizes))):
        fragments = [sizes[fragment] for fragment in range(len(sizes))]
        found = predict(fragments, config, conditions, ranks=ranks // workers, steps=steps)
        predicted = 100 * found.utilisation
    expected = all_reduce_bytes(plan.parameters, workers) * steps
    return {
        "step": step,
        "counted_after_step": totals_after,
        "validation/step": validation_step,
        "validation/loss_nats_per_token_global": loss,
        "sent_bytes_mean_over_workers": sent,
        "data_parallel_bytes_per_worker": expected if workers > 1 else None,
        "exchange_seconds_mean_over_ranks": exchange,
        "exposed_waiting_seconds_mean_over_ranks": waited,
        "hidden_percent": hidden,
        "measured_utilisation_percent": measured,
        "predicted_utilisation_percent": predicted,
        "observed": None if conditions is None else asdict(conditions),
    }


def _measured_utilisation(totals: Mapping[str, float]) -> float | None:
    """Return percent of training time without exposed communication; None without steps."""
    agreement = totals.get("time/agreement_seconds", 0.0)
    exposed = totals.get("diloco/exposed_seconds", 0.0) + agreement
    whole = totals.get("time/step_seconds", 0.0) + agreement
    return 100 * max(0.0, 1 - exposed / whole) if whole else None


def log_summary(record: Mapping[str, Any]) -> None:
    """Log the table at the end of a run."""
    rows = {}
    sent = record["sent_bytes_mean_over_workers"]
    expected = record["data_parallel_bytes_per_worker"]
    after = record["counted_after_step"]
    by_each = "MB by each worker" + (f" after step {after}" if after else "")
    gradients = "(bf16 gradients, every step)"
    if (loss := record["validation/loss_nats_per_token_global"]) is not None:
        text = f"{loss:.4f} nats per held-out token, after step {record['validation/step']}"
        rows["loss of the shared model"] = text
    if sent is not None:
        rows["sent between workers"] = f"{sent / 1e6:,.1f} {by_each}, as counted"
        ratio = f", {expected / sent:,.1f} times as much" if sent else ""
        rows["data parallelism would send"] = f"{expected / 1e6:,.1f} MB {gradients}{ratio}"
    elif expected is not None:
        rows["sent between workers"] = f"about {expected / 1e6:,.1f} {by_each} {gradients}"
    if (hidden := record["hidden_percent"]) is not None:
        exchange = record["exchange_seconds_mean_over_ranks"]
        waited = record["exposed_waiting_seconds_mean_over_ranks"]
        times = f"exchanges took {exchange:.2f} s, training waited {waited:.2f} s, mean over ranks"
        rows["communication hidden"] = f"{hidden:.1f} % ({times})"
    if (measured := record["measured_utilisation_percent"]) is not None:
        predicted = record["predicted_utilisation_percent"]
        text = (
            f"; the planner predicts {predicted:.1f} % for these links"
            if predicted is not None
            else ""
        )
        rows["time spent computing"] = f"{measured:.1f} % of the training steps{text}"
    for name, text in rows.items():
        logger.info(f"{name:<28} {text}")


# --- link and steps as measured ------------------------------------------------------------------


def observed_conditions(
    config: DiLoCoConfig, totals: Mapping[str, float], rounds: Collection[RoundRecord]
) -> Conditions | None:
    """Return link, step times and coding speeds; None where too little was measured."""
    heard_after = [
        seconds
        for record in rounds
        for worker in record["workers"]
        for seconds in worker["heard_after_seconds"]
        if seconds is not None
    ]
    means, spreads = [], []
    for worker in range(config.workers):
        steps, seconds, squares = (
            totals.get(worker_key(worker, name), 0.0) for name in ("steps", "seconds", "squares")
        )
        if not steps or not seconds or not heard_after:
            return None
        means.append(seconds / steps)
        spreads.append(math.sqrt(max(0.0, squares / steps - means[-1] ** 2)) / means[-1])
    coding, outer = [], []  # fp32 bytes a second
    for record in rounds:
        parameters = record["parameters"]
        for worker in record["workers"]:
            seconds = (worker["encoding_seconds"] or 0.0) + (worker["decoding_seconds"] or 0.0)
            if seconds > 0:
                coding.append(coded_bytes(parameters, config.workers) / seconds)
            ready, received = worker["ready_at_seconds"], worker["received_at_seconds"]
            if ready is not None and received is not None and ready > received:
                outer.append(4 * parameters / (ready - received))
    return Conditions(
        _slowest_link(rounds, config.workers),
        tuple(means),
        latency_seconds=min(heard_after),
        jitter=min(1.0, statistics.fmean(spreads)),
        coding_bytes_per_second=statistics.median(coding or [math.inf]),
        outer_bytes_per_second=statistics.median(outer or [math.inf]),
        codec=config.quantization.codec,
    )


def _slowest_link(rounds: Collection[RoundRecord], workers: int) -> float:
    """Return the slowest worker's rate. A worker sends to all others at once: their rates add."""
    largest = max(record["parameters"] for record in rounds)
    large = [one for one in rounds if 2 * one["parameters"] > largest]  # small ones are too brief

    def median_rate(to: int, source: int) -> float:
        rates = [one["workers"][to]["received_bits_per_second_from"][source] for one in large]
        known = [one for one in rates if one is not None]
        return statistics.median(known) if known else 0.0

    table = [[median_rate(to, source) for source in range(workers)] for to in range(workers)]
    return min(sum(rates) or UNLIMITED for rates in (*table, *zip(*table, strict=True)))


def conditions_of_run(run: Path) -> Conditions:
    """Read link and steps from a finished run's folder or metrics.jsonl."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise ValueError(f"{run} has no metrics.jsonl: give the folder of a run")
    records, _ = read_json_lines(path)
    if not records or records[-1].get("kind") != "summary":
        raise ValueError(f"{path} has no summary at its end, so its run has not ended: wait for it")
    observed = records[-1].get("observed")
    if observed is None:
        raise ValueError(
            f"the run of {path} measured no links: give a run of several workers in which every "
            "fragment was exchanged (over NCCL: a run of two workers)"
        )
    try:
        return conditions_from(observed)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{path}: its summary cannot be read ({error}): give another run"
        ) from None


def conditions_from(observed: Mapping[str, Any]) -> Conditions:
    """Read the `observed` record of a summary, in which infinity is text."""
    return msgspec.convert(observed, Conditions, strict=False)


def probe(arguments: Sequence[str], delay: int) -> Conditions | None:
    """Measure link and steps by a short run with these command-line arguments.

    Return None on nodes other than the first, which gets the answer.
    """
    with tempfile.TemporaryDirectory(prefix="probe-") as folder:
        run = Path(folder) / "run"
        settings = PROBE_SETTINGS | {
            "run.folder": run,
            "diloco.overlap.delay": min(delay, PROBE_SYNC_EVERY - 1),
        }
        flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "torchtitan_diloco.launch", *arguments, *flags]
        print(f"probing links and steps in {PROBE_STEPS} steps", file=sys.stderr, flush=True)
        outcome = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if outcome.returncode:
            last = "\n  ".join(outcome.stdout.strip().splitlines()[-8:])
            raise ValueError(f"the probe failed with exit code {outcome.returncode}:\n  {last}")
        return conditions_of_run(run) if (run / "metrics.jsonl").exists() else None
