"""What it costs to see an exchange: every pass and every record that training would not need, one after the other.

    OMP_NUM_THREADS=1 python -m benchmarks.round_records [--megabytes 6.3] [--rounds 30] [--workers 2]

Passes over memory are of one fragment of so many megabytes in fp32. Those "in training" hold up the training thread, the others
run in the background. A record is made, written and drawn for TensorBoard by the first rank.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.arguments import positive
from benchmarks.table import print_table, summary
from torchtitan_diloco.components.metrics import MetricsWriter
from torchtitan_diloco.components.round_records import RoundRecord, named, own_values, round_record
from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.diloco.outer_optimizer import BLOCK
from torchtitan_diloco.diloco.round import Round, Traffic


def seconds(action: Callable[[], object], rounds: int) -> list[float]:
    found = []
    for number in range(rounds + 3):
        started = time.perf_counter()
        action()
        if number >= 3:  # the first ones touch memory and code for the first time
            found.append(time.perf_counter() - started)
    return found


def some_round(workers: int) -> Round:
    now = time.perf_counter()
    others = range(1, workers)
    traffic = Traffic(
        10**6, 10**6, 0.01, 0.01, 0.1, now, now + 0.01, now + 0.5, dict.fromkeys(others, now + 0.1)
    )
    traffic.link_bytes, traffic.link_until = (
        dict.fromkeys(others, 10**6),
        dict.fromkeys(others, now + 0.5),
    )
    traffic.dot = 0.5
    return Round(
        0,
        1,
        10,
        10**6,
        1.0,
        workers,
        11,
        now,
        now,
        now,
        now + 0.6,
        now,
        now,
        now,
        traffic,
        1.0,
        1.0,
        1.0,
        torch.ones(()),
    )


def record_of(facts: Round, workers: int) -> RoundRecord:
    values = own_values(facts, 0.0, workers)
    return round_record(facts, "blocks", [named(values, workers) for _ in range(workers)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=6.3)
    parser.add_argument("--rounds", type=positive, default=30)
    parser.add_argument("--workers", type=positive, default=2)
    own = parser.parse_args()
    values = round(own.megabytes * 1e6 / 4)
    delta, shared, scratch = torch.randn(values), torch.randn(values), torch.empty(values)
    before, dot = torch.empty(BLOCK), torch.zeros((), dtype=torch.float64)

    def scalar_product() -> None:
        for piece in delta.split(BLOCK):
            kept = before[: piece.numel()].copy_(piece)
            dot.add_(torch.dot(kept, piece))

    def distance() -> None:
        total = torch.zeros((), dtype=torch.float64)
        for one, other in zip(delta.split(BLOCK), shared.split(BLOCK), strict=True):
            moved = torch.sub(one, other, out=before[: one.numel()])
            total += torch.dot(moved, moved)

    facts = some_round(own.workers)
    with (
        tempfile.TemporaryDirectory() as folder,
        MetricsWriter(Path(folder), Metrics(), 0, own.workers) as writer,
    ):
        record = record_of(facts, own.workers)
        rows = {
            "drift before the mix": (
                "in training",
                lambda: torch.linalg.vector_norm(torch.sub(delta, shared, out=scratch)),
            ),
            "scalar product with the mean": ("background", scalar_product),
            "norm of the mean": ("background", lambda: torch.linalg.vector_norm(delta)),
            "norm of the update": ("background", distance),
            "record of a round": ("in training, first rank", lambda: record_of(facts, own.workers)),
            "its lines and tags": ("in training, first rank", lambda: writer.write_round(record)),
        }
        measured = {
            name: (where, seconds(action, own.rounds)) for name, (where, action) in rows.items()
        }
    title = f"one exchange of {own.megabytes:g} MB, {own.workers} workers; n = {own.rounds}; milliseconds, median (min ... max)"
    table = [
        [name, where, summary([1e3 * one for one in found])]
        for name, (where, found) in measured.items()
    ]
    print_table(title, ["what", "where", "ms"], table)


if __name__ == "__main__":
    main()
