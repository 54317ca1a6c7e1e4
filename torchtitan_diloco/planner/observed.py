"""Measurements of a run: its summary at the end, and links and steps for the planner."""

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
from torchtitan_diloco.planner.prediction import Conditions, Links, all_reduce_bytes
from torchtitan_diloco.planner.scenario import payloads_of, predict_diloco
from torchtitan_diloco.utils import logger, read_json_lines

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
    workers, per_worker, steps = config.workers, ranks // config.workers, step - totals_after
    streaming = workers > 1 and "diloco/sent_bytes" in totals
    exchange = totals.get("diloco/exchange_seconds", 0.0) / ranks
    sent = totals.get("diloco/sent_bytes", 0.0) / workers
    waited = totals.get("diloco/exposed_waiting_seconds", 0.0) / ranks
    measured = measured_utilisation(totals) if streaming else None
    conditions = observed_conditions(config, totals, rounds, per_worker) if streaming else None
    predicted = None
    sizes = {record["fragment"]: record["parameters"] for record in rounds}
    if conditions is not None and sorted(sizes) == list(range(len(sizes))):
        fragments = [sizes[fragment] for fragment in sorted(sizes)]
        found = predict_diloco(fragments, config, conditions, ranks=per_worker, steps=steps)
        predicted = found.utilisation
    expected = all_reduce_bytes(plan.parameters, workers) * steps
    return {
        "step": step,
        "counted_after_step": totals_after,
        "validation/step": None if validated is None else validated[0],
        "validation/loss_nats_per_token_global": None if validated is None else validated[1],
        "sent_bytes_mean_over_workers": sent if streaming else None,
        "data_parallel_bytes_per_worker": expected if workers > 1 else None,
        "exchange_seconds_mean_over_ranks": exchange if streaming else None,
        "exposed_waiting_seconds_mean_over_ranks": waited if streaming else None,
        "hidden_percent": 100 * max(0.0, 1 - waited / exchange) if streaming and exchange else None,
        "measured_utilisation_percent": None if measured is None else 100 * measured,
        "predicted_utilisation_percent": None if predicted is None else 100 * predicted,
        "observed": None if conditions is None else asdict(conditions),
    }


def log_summary(record: Mapping[str, Any]) -> None:
    """Log the table at the end of a run."""
    rows = {}
    sent = record["sent_bytes_mean_over_workers"]
    expected = record["data_parallel_bytes_per_worker"]
    after = record["counted_after_step"]
    since = f" after step {after}" if after else ""
    if (loss := record["validation/loss_nats_per_token_global"]) is not None:
        text = f"{loss:.4f} nats per held-out token, after step {record['validation/step']}"
        rows["loss of the shared model"] = text
    if sent is not None:
        rows["sent between workers"] = f"{sent / 1e6:,.1f} MB by each worker{since}, as counted"
        ratio = f", {expected / sent:,.1f} times as much" if sent else ""
        text = f"{expected / 1e6:,.1f} MB (bf16 gradients, every step){ratio}"
        rows["data parallelism would send"] = text
    elif expected is not None:
        text = f"about {expected / 1e6:,.1f} MB by each worker{since} (bf16 gradients, every step)"
        rows["sent between workers"] = text
    if (hidden := record["hidden_percent"]) is not None:
        exchange = record["exchange_seconds_mean_over_ranks"]
        waited = record["exposed_waiting_seconds_mean_over_ranks"]
        times = f"exchanges took {exchange:.2f} s, training waited {waited:.2f} s, mean over ranks"
        rows["communication hidden"] = f"{hidden:.1f} % ({times})"
    if (measured := record["measured_utilisation_percent"]) is not None:
        predicted = record["predicted_utilisation_percent"]
        known = predicted is not None
        text = f"; the planner predicts {predicted:.1f} % for these links" if known else ""
        rows["time spent computing"] = f"{measured:.1f} % of the training steps{text}"
    for name, text in rows.items():
        logger.info(f"{name:<28} {text}")


def measured_utilisation(totals: Mapping[str, float]) -> float | None:
    """Return the share of training time without exposed communication; None without steps."""
    agreement = totals.get("time/agreement_seconds", 0.0)
    exposed = totals.get("diloco/exposed_seconds", 0.0) + agreement
    whole = totals.get("time/step_seconds", 0.0) + agreement
    return max(0.0, 1 - exposed / whole) if whole else None


# --- links and steps as measured -----------------------------------------------------------------


def observed_conditions(
    config: DiLoCoConfig,
    totals: Mapping[str, float],
    rounds: Collection[RoundRecord],
    ranks_per_worker: int,
) -> Conditions | None:
    """Return links, step times and coding speeds; None where too little was measured."""
    workers = config.workers
    latencies = [
        seconds
        for record in rounds
        for worker in record["workers"]
        for seconds in worker["heard_after_seconds"]
        if seconds is not None
    ]
    steps = [_step_time(totals, worker) for worker in range(workers)]
    known = [step for step in steps if step is not None]
    if not latencies or len(known) < workers:
        return None
    coding, outer = _coding_speeds(config, rounds, ranks_per_worker)
    return Conditions(
        _links(rounds, workers, min(latencies)),
        tuple(mean for mean, _ in known),
        jitter=min(1.0, statistics.fmean(spread for _, spread in known)),
        coding_bytes_per_second=coding,
        outer_bytes_per_second=outer,
        codec=config.quantization.codec,
    )


def _links(rounds: Collection[RoundRecord], workers: int, latency: float) -> Links:
    """Return median rates. A worker sends to all others at once, so their rates add up."""
    largest = max(record["parameters"] for record in rounds)
    large = [one for one in rounds if 2 * one["parameters"] > largest]  # small ones are too brief

    def rate(to: int, source: int) -> float:
        rates = [one["workers"][to]["received_bits_per_second_from"][source] for one in large]
        known = [one for one in rates if one is not None]
        return statistics.median(known) if known else 0.0

    table = [[rate(to, source) for source in range(workers)] for to in range(workers)]
    up = tuple(sum(column) or UNLIMITED for column in zip(*table, strict=True))
    return Links(up, tuple(sum(row) or UNLIMITED for row in table), latency)


def _coding_speeds(
    config: DiLoCoConfig, rounds: Collection[RoundRecord], ranks_per_worker: int
) -> tuple[float, float]:
    """Return median fp32 bytes a second of coding and of the outer step."""
    coding, outer = [], []
    for record in rounds:
        sizes = [record["parameters"]]
        (payload,) = payloads_of(sizes, config.quantization, config.workers, ranks_per_worker)
        for worker in record["workers"]:
            seconds = (worker["encoding_seconds"] or 0.0) + (worker["decoding_seconds"] or 0.0)
            if seconds > 0:
                coding.append(payload.coded_bytes / seconds)
            ready, received = worker["ready_at_seconds"], worker["received_at_seconds"]
            if ready is not None and received is not None and ready > received:
                outer.append(payload.state_bytes / (ready - received))
    return statistics.median(coding or [math.inf]), statistics.median(outer or [math.inf])


def _step_time(totals: Mapping[str, float], worker: int) -> tuple[float, float] | None:
    """Return the mean of a worker's steps and their spread as a share of it."""
    names = ("steps", "seconds", "squares")
    steps, seconds, squares = (totals.get(worker_key(worker, name), 0.0) for name in names)
    if not steps or not seconds:
        return None
    mean = seconds / steps
    return mean, math.sqrt(max(0.0, squares / steps - mean**2)) / mean


def conditions_of_run(run: Path) -> Conditions:
    """Read links and steps from a finished run's folder or metrics.jsonl."""
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
    """Measure links and steps by a short run with these command-line arguments.

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
