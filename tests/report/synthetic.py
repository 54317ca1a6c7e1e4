"""Records of runs that never took place, in the format of metrics.jsonl (docs/report.md)."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchtitan_diloco.components.records import RoundRecord, Summary, WorkerRound, to_line

FRAGMENTS = {"blocks.0, blocks.2": 800_000, "blocks.1, blocks.3": 800_000, "embedding": 1_200_000}
TOKENS_PER_STEP = 16_384
SETTINGS = """[run]
name = "a"
description = "a <tale> of \\"two\\" runs & more"

[diloco]
method = "streaming"
workers = 3
sync_every = 30

[diloco.quantization]
codec = "fp4_e3m0"
"""


def step_records(
    steps: int, *, workers: int = 2, seconds: float = 0.5, seed: int = 0
) -> list[dict[str, Any]]:
    """Return a record for every tenth step and a validation for every hundredth."""
    rng = random.Random(seed)
    records: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        loss, exposed = 1.6 + 4 * math.exp(-step / (0.15 * steps)), 2 + rng.random()
        records.append(
            {
                "step": step,
                "train/loss_nats_per_token_global": loss + rng.gauss(0, 0.03),
                "train/tokens_global": step * TOKENS_PER_STEP,
                "time/elapsed_seconds": step * seconds,
                "time/wall_seconds_mean_over_ranks": 10 * seconds,
                "speed/tokens_per_second_global": TOKENS_PER_STEP / seconds,
                "speed/mfu_percent": None,
                "diloco/sent_bytes_sum_over_ranks": workers * 1.5e6,
                "diloco/exchange_seconds_mean_over_ranks": 1.2,
                "diloco/exposed_waiting_seconds_mean_over_ranks": 0.05,
                "diloco/bandwidth_used_mbit_per_second_mean_over_workers": 2.4 + rng.random(),
                "diloco/bandwidth_peak_mbit_per_second_max_over_workers": 18 + 3 * rng.random(),
                "time/share_compute_percent_mean_over_ranks": 94 - exposed,
                "time/share_data_percent_mean_over_ranks": 2.0,
                "time/share_exposed_communication_percent_mean_over_ranks": exposed,
                "time/share_other_percent_mean_over_ranks": 4.0,
            }
        )
        if step % 100 == 0:
            records.append({"step": step, "validation/loss_nats_per_token_global": loss + 0.05})
    return records


def round_records(
    steps: int, *, workers: int = 2, seed: int = 0, measure_every: int = 1
) -> list[RoundRecord]:
    """Return a round for every tenth step of half a second, fragment after fragment.

    The last worker is the last to arrive, and its link to worker 0 is slow. Norms are measured
    in every `measure_every`-th round of a fragment.
    """
    rng = random.Random(seed)
    records = []
    for number, sent_step in enumerate(range(30, steps - 2, 10)):
        outer_round, fragment = divmod(number, len(FRAGMENTS))
        due = sent_step / 2
        arrivals = [due + 0.02 + 0.05 * worker + rng.uniform(0, 0.03) for worker in range(workers)]
        tables = [_worker_round(due, arrivals, worker) for worker in range(workers)]
        if outer_round % measure_every == 0:
            for table in tables:
                table.cosine_to_mean = 0.75 + rng.gauss(0, 0.02)
                table.drift_norm = 0.3 + 0.5 * math.exp(-number / 30)
        records.append(
            RoundRecord(
                step=sent_step + 3,
                fragment=fragment,
                fragment_name=list(FRAGMENTS)[fragment],
                outer_round=outer_round + 1,
                sent_step=sent_step,
                parameters=list(FRAGMENTS.values())[fragment],
                last_worker=workers - 1,
                late_by_seconds=max(arrivals) - max(sorted(arrivals)[:-1], default=math.nan),
                workers=tables,
            )
        )
    return records


def _worker_round(due: float, arrivals: list[float], worker: int) -> WorkerRound:
    """Return a worker's part of a round, in which the transfer takes the longest."""
    heard, asked, others = max(arrivals) + 0.05, due + 1.5, len(arrivals) - 1
    rates = [math.nan if sender == worker else 2e8 for sender in range(len(arrivals))]
    if worker == 0:
        rates[others] = 4e7
    return WorkerRound(
        at_seconds={
            "due": due,
            "taken": due + 0.02,
            "begun": arrivals[worker],
            "encoded": arrivals[worker] + 0.04,
            "heard": heard,
            "received": heard + 0.6 + 0.1 * worker,
            "ready": heard + 0.8 + 0.1 * worker,
            "asked": asked,
            "arrived": asked + 0.1,
            "applied": asked + 0.13,
        },
        sent_bytes=1_500_000,
        received_bytes=1_500_000,
        received_bits_per_second_from=rates,
    )


def summary(steps: int) -> Summary:
    """Return the summary of a run of three workers."""
    return Summary(
        steps,
        data_parallel_bytes_per_worker=2 * 2 / 3 * 2 * sum(FRAGMENTS.values()) * steps,
        measured_utilisation_percent=97.1,
        predicted_utilisation_percent=95.0,
    )


def write_run(
    folder: Path, records: Sequence[dict[str, Any] | msgspec.Struct], settings: str = ""
) -> Path:
    """Write the folder of a run as far as a report reads it."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(map(to_line, records)))
    if settings:
        (folder / "config.toml").write_text(settings)
    return folder
