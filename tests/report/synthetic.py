"""Records of runs that never were, in the format of metrics.jsonl (docs/report.md)."""

import json
import math
import random
from pathlib import Path
from typing import Any

FRAGMENTS = ("layers 0, 2", "layers 1, 3", "embedding")
PARAMETERS = (800_000, 800_000, 1_200_000)
TOKENS_PER_STEP = 16_384


def step_records(
    steps: int,
    *,
    workers: int = 2,
    every: int = 10,
    seconds: float = 0.5,
    noise: int = 0,
    final: float = 1.6,
) -> list[dict[str, Any]]:
    """A logged step every so many, a validation every tenth of those."""
    rng = random.Random(noise)
    records: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        loss = final + 4 * math.exp(-step / (0.15 * steps)) + rng.gauss(0, 0.03)
        exposed = 2 + rng.random()
        records.append(
            {
                "step": step,
                "train/loss_nats_per_token_global": loss,
                "train/tokens_global": step * TOKENS_PER_STEP,
                "time/elapsed_seconds": step * seconds,
                "speed/seconds_per_step": seconds,
                "speed/tokens_per_second_global": TOKENS_PER_STEP / seconds,
                "speed/mfu_percent": None,
                "diloco/sent_bytes_sum_over_ranks": workers * 1.5e6 * every / 10,
                "diloco/exchange_seconds_mean_over_ranks": 1.2,
                "diloco/exposed_seconds_mean_over_ranks": 0.11,
                "diloco/exposed_waiting_seconds_mean_over_ranks": 0.05,
                "diloco/bandwidth_used_mbit_per_second_mean_over_workers": 2.4 + rng.random(),
                "diloco/bandwidth_peak_mbit_per_second_max_over_workers": 18 + 3 * rng.random(),
                "diloco/fragments_in_flight_mean_over_ranks": 1,
                "time/share_compute_percent_mean_over_ranks": 94 - exposed,
                "time/share_data_percent_mean_over_ranks": 2.0,
                "time/share_exposed_communication_percent_mean_over_ranks": exposed,
                "time/share_other_percent_mean_over_ranks": 4.0,
            }
        )
        if step % (10 * every) == 0:
            shared = final + 0.05 + 4 * math.exp(-step / (0.15 * steps))
            records.append(
                {
                    "step": step,
                    "validation/loss_nats_per_token_global": shared,
                    "validation/tokens_global": 65_536,
                }
            )
    return records


def round_records(
    steps: int,
    *,
    workers: int = 2,
    sync_every: int = 30,
    seconds: float = 0.5,
    delay: int = 3,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Fragments take turns. Each worker's clock has begun at another moment; headers take no time, so that the moment at which
    all were heard is the same on all."""
    rng = random.Random(seed)
    began = [0.0] + [rng.uniform(-500, 500) for _ in range(workers - 1)]
    records = []
    apart = sync_every // len(FRAGMENTS)
    for number, sent_step in enumerate(range(sync_every, steps - delay + 1, apart)):
        fragment = number % len(FRAGMENTS)
        arrivals = [
            sent_step * seconds + (0.02 + 0.05 * worker) + rng.uniform(0, 0.06)
            for worker in range(workers)
        ]
        all_heard = max(arrivals) + 0.05
        order = sorted(arrivals)
        records.append(
            {
                "kind": "round",
                "step": sent_step + delay,
                "fragment": fragment,
                "fragment_name": FRAGMENTS[fragment],
                "outer_round": number // len(FRAGMENTS) + 1,
                "sent_step": sent_step,
                "applied_step": sent_step + delay,
                "parameters": PARAMETERS[fragment],
                "participants": workers,
                "update_norm": 0.5 / (1 + number),
                "last_worker": arrivals.index(max(arrivals)),
                "late_by_seconds": order[-1] - order[-2] if workers > 1 else None,
                "workers": [
                    _moments(
                        worker,
                        number,
                        sent_step * seconds,
                        arrivals,
                        all_heard,
                        delay * seconds,
                        began[worker],
                        rng,
                    )
                    for worker in range(workers)
                ],
            }
        )
    return records


def _moments(
    worker: int,
    number: int,
    due: float,
    arrivals: list[float],
    all_heard: float,
    in_flight: float,
    began: float,
    rng: random.Random,
) -> dict[str, Any]:
    workers, taken = len(arrivals), due + 0.02
    begun, encoded = arrivals[worker], arrivals[worker] + 0.04
    received = all_heard + 0.6 + rng.uniform(0, 0.2)
    ready = received + 0.08
    asked = due + in_flight
    arrived = max(asked, ready)
    others = [other for other in range(workers) if other != worker]
    moments = {
        "due": due,
        "taken": taken,
        "begun": begun,
        "encoded": encoded,
        "heard": all_heard,
        "received": received,
        "ready": ready,
        "asked": asked,
        "arrived": arrived,
        "applied": arrived + 0.03,
    }
    return {
        "weight": 4096.0,
        **{f"{name}_at_seconds": moment - began for name, moment in moments.items()},
        "encoding_seconds": encoded - begun,
        "decoding_seconds": 0.02,
        "transfer_seconds": received - all_heard,
        "exchange_seconds": ready - begun,
        "waited_seconds": arrived - asked,
        "exposed_seconds": arrived - asked + 0.05,
        "ahead_of_last_seconds": max(arrivals) - arrivals[worker],
        "sent_bytes": 1_500_000,
        "received_bytes": 1_500_000,
        "sent_bits_per_parameter": 4.125,
        "outer_gradient_norm": 0.9 / (1 + 0.02 * number),
        "cosine_to_mean": 0.75 - 0.2 * math.exp(-number / 20) + 0.02 * worker + rng.gauss(0, 0.02),
        "drift_norm": (1 + number % len(FRAGMENTS)) * (0.3 + 0.5 * math.exp(-number / 30))
        + 0.02 * worker,
        "heard_after_seconds": [
            max(0.0, arrivals[other] - begun) if other in others else None
            for other in range(workers)
        ],
        "received_bits_per_second_from": [
            (4e7 if (other, worker) == (workers - 1, 0) else 2.1e8) * rng.uniform(0.9, 1.1)
            if other in others
            else None
            for other in range(workers)
        ],
    }


def summary_record(steps: int) -> dict[str, Any]:
    """Of three workers."""
    return {
        "kind": "summary",
        "step": steps,
        "counted_after_step": 0,
        "data_parallel_bytes_per_worker": 2 * 2 / 3 * 2 * sum(PARAMETERS) * steps,
        "measured_utilisation_percent": 97.1,
        "predicted_utilisation_percent": 95.0,
    }


def write_run(folder: Path, records: list[dict[str, Any]], settings: str = "") -> Path:
    """A run's folder as the trainer leaves it, as far as a report reads it."""
    folder.mkdir(parents=True)
    ordered = sorted(records, key=lambda record: record["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ordered))
    if settings:
        (folder / "config.toml").write_text(settings)
    return folder
