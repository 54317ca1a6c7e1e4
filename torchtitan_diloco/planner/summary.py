"""The outer loop in words: a line at the start of a run, a table at its end."""

from dataclasses import asdict
from typing import Any

from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.diloco.codecs import describe
from torchtitan_diloco.diloco.config import DiLoCoConfig as DiLoCo
from torchtitan_diloco.diloco.outer_optimizer import STATE_BUFFERS
from torchtitan_diloco.planner.prediction import all_reduce_bytes
from torchtitan_diloco.planner.utilisation import Observed, measured_utilisation
from torchtitan_diloco.utils import logger


def outer_line(config: DiLoCo) -> str:
    outer, overlap = config.outer_optimizer, config.overlap
    momentum = f" momentum {outer.momentum:g}" if STATE_BUFFERS[outer.name] else ""
    return (
        f"each fragment every {config.sync_every} steps, applied {overlap.delay} steps later, local share "
        f"{overlap.mixing:g}; {outer.name} lr {outer.lr:g}{momentum}"
    )


def wire_line(config: DiLoCo) -> str:
    return f"{describe(config.quantization, config.workers)}; summed in fp32"


def summary_record(
    plan: RunPlan,
    config: DiLoCo,
    ranks: int,
    steps: int,
    validated: tuple[int, float] | None,
    totals: dict[str, float],
    since: int,
    observed: Observed,
) -> dict[str, Any]:
    """The run in a few numbers, for metrics.jsonl and the table at its end. `totals`: the outer loop's metrics, summed over the
    steps after `since` and over ranks. What is not known, or does not exist in such a run, is None."""
    apart = config.workers > 1
    streaming = apart and "diloco/sent_bytes" in totals
    exchange, waited = (
        totals.get("diloco/exchange_seconds", 0.0),
        totals.get("diloco/exposed_waiting_seconds", 0.0),
    )
    measured = measured_utilisation(totals) if streaming else None
    predicted = observed.predicted_utilisation(config, totals, steps - since) if streaming else None
    conditions = observed.conditions(config, totals) if streaming else None
    expected = all_reduce_bytes(plan.parameters, config.workers) * (steps - since)
    return {
        "step": steps,
        "counted_after_step": since,
        "validation/step": None if validated is None else validated[0],
        "validation/loss_nats_per_token_global": None if validated is None else validated[1],
        "sent_bytes_mean_over_workers": totals["diloco/sent_bytes"] / config.workers
        if streaming
        else None,
        "data_parallel_bytes_per_worker": expected if apart else None,
        "exchange_seconds_mean_over_ranks": exchange / ranks if streaming else None,
        "exposed_waiting_seconds_mean_over_ranks": waited / ranks if streaming else None,
        "hidden_percent": 100 * max(0.0, 1 - waited / exchange) if streaming and exchange else None,
        "measured_utilisation_percent": None if measured is None else 100 * measured,
        "predicted_utilisation_percent": None if predicted is None else 100 * predicted,
        "observed": None if conditions is None else asdict(conditions),
    }


def log_summary(record: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = []
    loss, sent = (
        record["validation/loss_nats_per_token_global"],
        record["sent_bytes_mean_over_workers"],
    )
    expected, hidden = record["data_parallel_bytes_per_worker"], record["hidden_percent"]
    measured, predicted = (
        record["measured_utilisation_percent"],
        record["predicted_utilisation_percent"],
    )
    since = f" after step {record['counted_after_step']}" if record["counted_after_step"] else ""
    if loss is not None:
        rows.append(
            (
                "loss of the shared model",
                f"{loss:.4f} nats per held-out token, after step {record['validation/step']}",
            )
        )
    if sent is not None and expected is not None:
        rows.append(
            (
                "sent between workers",
                f"{sent / 1e6:,.1f} MB by each worker{since}, counted in the buffers sent",
            )
        )
        ratio = f", {expected / sent:,.1f} times as much" if sent else ""
        rows.append(
            (
                "data parallelism would send",
                f"{expected / 1e6:,.1f} MB (bf16 gradients, every step){ratio}",
            )
        )
    elif expected is not None:
        rows.append(
            (
                "sent between workers",
                f"about {expected / 1e6:,.1f} MB by each worker{since} (bf16 gradients, every step)",
            )
        )
    if hidden is not None:
        times = (
            record["exchange_seconds_mean_over_ranks"],
            record["exposed_waiting_seconds_mean_over_ranks"],
        )
        mean = f"exchanges took {times[0]:.2f} s, training waited {times[1]:.2f} s"
        rows.append(("communication hidden", f"{hidden:.1f} % ({mean}, mean over ranks)"))
    if measured is not None:
        said = (
            ""
            if predicted is None
            else f"; the planner says {predicted:.1f} % for such links and steps"
        )
        rows.append(("time spent computing", f"{measured:.1f} % of the training steps{said}"))
    for name, text in rows:
        logger.info(f"{name:<28} {text}")
