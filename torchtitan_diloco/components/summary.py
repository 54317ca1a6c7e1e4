"""The outer loop in words: a line at the start of a run, a table at its end."""

from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.config.diloco_schema import DiLoCo
from torchtitan_diloco.diloco.codecs import describe
from torchtitan_diloco.tools.logging import logger

GRADIENT_BYTES = 2
"""Data parallelism is counted with gradients in bf16, as the papers count it."""


def outer_line(config: DiLoCo) -> str:
    outer, overlap = config.outer_optimizer, config.overlap
    return (
        f"each fragment every {config.sync_every} steps, applied {overlap.delay} steps later, local share "
        f"{overlap.mixing:g}; {outer.name} lr {outer.lr:g} momentum {outer.momentum:g}"
    )


def wire_line(config: DiLoCo) -> str:
    return f"{describe(config.quantization, config.workers)}; summed in fp32"


def data_parallel_bytes(plan: RunPlan, workers: int, steps: int) -> float:
    """What one worker would send with a ring all-reduce of all gradients at every step."""
    return 2 * (workers - 1) / workers * GRADIENT_BYTES * plan.parameters * steps


def log_summary(
    plan: RunPlan, config: DiLoCo, ranks: int, steps: int, validated: tuple[int, float] | None, totals: dict[str, float]
) -> None:
    """`totals`: the outer loop's metrics, summed over the run and over ranks."""
    rows: list[tuple[str, str]] = []
    if validated is not None:
        step, loss = validated
        rows.append(("loss of the shared model", f"{loss:.4f} nats per held-out token, after step {step}"))
    expected = data_parallel_bytes(plan, config.workers, steps)
    if config.workers > 1 and totals:
        sent = totals["diloco/sent_bytes"] / config.workers
        rows.append(("sent between workers", f"{sent / 1e6:,.1f} MB by each worker, counted in the buffers sent"))
        ratio = f", {expected / sent:,.1f} times as much" if sent else ""
        rows.append(("data parallelism would send", f"{expected / 1e6:,.1f} MB (bf16 gradients, every step){ratio}"))
        exchange, waited = totals["diloco/exchange_seconds"], totals["diloco/exposed_waiting_seconds"]
        if exchange:
            hidden = 100 * max(0.0, 1 - waited / exchange)
            mean = f"exchanges took {exchange / ranks:.2f} s, training waited {waited / ranks:.2f} s"
            rows.append(("communication hidden", f"{hidden:.1f} % ({mean}, mean over ranks)"))
    elif config.workers > 1:
        rows.append(("sent between workers", f"about {expected / 1e6:,.1f} MB by each worker (bf16 gradients, every step)"))
    for name, text in rows:
        logger.info(f"{name:<28} {text}")
