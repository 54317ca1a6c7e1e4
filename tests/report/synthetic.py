"""Records of runs that never took place (docs/report-and-plan.md)."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_diloco.components.metrics import OF_JOB
from torchtitan_diloco.components.records import PhaseRecord, RoundRecord, StartRecord, to_line

FRAGMENTS = {"blocks.0, blocks.2": 800_000, "blocks.1, blocks.3": 800_000, "embedding": 1_200_000}
TOKENS_PER_STEP = 16_384
CORPORA = "data/web", "data/code"
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


def step_records(steps: int, *, seconds: float = 0.5, seed: int = 0) -> list[dict[str, Any]]:
    """Return a record for every tenth step and a validation for every hundredth."""
    rng = random.Random(seed)
    records: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        loss = 1.6 + 4 * math.exp(-step / (0.15 * steps))
        wall = 10 * seconds
        exposed = (0.02 + 0.01 * rng.random()) * wall
        records.append(
            {
                "step": step,
                "time": 1e9 + step * seconds,
                "loss/train": loss + rng.gauss(0, 0.03),
                "train/lr": 1e-3 * min(1.0, 5 * (1 - step / steps)),
                "train/tokens": step * TOKENS_PER_STEP,
                "speed/tokens_per_second": TOKENS_PER_STEP / seconds,
                "sync/mbit_per_second": 2.4 + rng.random(),
                "worker/steps": 10,
                "worker/elapsed_seconds": step * seconds,
                "worker/wall_seconds": wall,
                "worker/step_seconds": 0.96 * wall,
                "worker/data_seconds": 0.02 * wall,
                "worker/agreement_seconds": 0.0,
                "worker/compute_seconds": 0.94 * wall - exposed,
                "worker/compute_spread": 0.1 * seconds,
                "worker/sent_bytes": 1.5e6,
                "worker/exchange_seconds": 1.2,
                "worker/exposed_seconds": exposed,
                "worker/exposed_waiting_seconds": 0.05,
            }
        )
        own = records[-1]
        own |= {name: own[of_worker] for name, of_worker in OF_JOB.items()}
        if step % 100 == 0:
            records.append({"step": step, "loss/val": loss + 0.05, "loss/bits_per_byte": 1.5})
    return records


def with_corpora(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records of a run that reads a mixture, which has a loss for each corpus."""
    losses = {f"loss/val/{name}": 2.0 + place for place, name in enumerate(CORPORA)}
    return [record | losses if "loss/val" in record else record for record in steps]


def phase_records(starts: Sequence[int], steps: int) -> list[PhaseRecord]:
    """Return the mixtures of a run of so many steps, whose phases begin after some of them."""
    web, code = CORPORA
    return [
        PhaseRecord(
            step=step,
            time=1e9 + step / 2,
            mixture=f"{70 - 10 * number} % {web}, {30 + 10 * number} % {code}",
            number=number,
            share=step / steps,
        )
        for number, step in enumerate([0, *starts])
    ]


def round_records(
    steps: int, *, workers: int = 2, seed: int = 0, measure_every: int = 1
) -> list[list[RoundRecord]]:
    """Return the rounds of each worker: one for every tenth step of half a second, fragment after
    fragment.

    The last worker is the last to arrive, and its link to worker 0 is slow. Norms are measured
    in every `measure_every`-th round of a fragment. Each worker has another clock.
    """
    rng = random.Random(seed)
    records: list[list[RoundRecord]] = [[] for _ in range(workers)]
    for number, sent_step in enumerate(range(30, steps - 2, 10)):
        outer_round, fragment = divmod(number, len(FRAGMENTS))
        due = 1e9 + sent_step / 2
        arrivals = [due + 0.02 + 0.05 * worker + rng.uniform(0, 0.03) for worker in range(workers)]
        for worker, own in enumerate(records):
            name, parameters = list(FRAGMENTS.items())[fragment]
            record = RoundRecord(
                step=sent_step + 3,
                fragment=fragment,
                fragment_name=name,
                outer_round=outer_round + 1,
                sent_step=sent_step,
                parameters=parameters,
                participants=workers,
                numbers={"worker/sent_bytes": 1_500_000.0},
                **_times(due, arrivals, worker),
            )
            if outer_round % measure_every == 0:
                record.numbers["round/cosine_to_mean"] = 0.75 + rng.gauss(0, 0.02)
                record.numbers["round/drift_norm"] = 0.3 + 0.5 * math.exp(-number / 30)
            own.append(record)
    return records


def _times(due: float, arrivals: list[float], worker: int) -> dict[str, Any]:
    """Return a worker's times of a round, in which the transfer takes the longest."""
    heard = max(arrivals) + 0.05
    asked = due + 1.5
    others = len(arrivals) - 1
    rates = {sender: 2e8 for sender in range(len(arrivals)) if sender != worker}
    if worker == 0 and others:
        rates[others] = 4e7
    moments = {
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
    }
    waited = dict.fromkeys(rates, heard - arrivals[worker])
    return {
        "at_seconds": {name: at + 0.3 * worker for name, at in moments.items()},
        "heard_after_seconds": waited,
        "received_bits_per_second_from": rates,
    }


def exchanges(rounds: Sequence[Sequence[RoundRecord]]) -> list[tuple[RoundRecord, ...]]:
    return list(zip(*rounds, strict=True))


def write_run(
    folder: Path,
    steps: Sequence[dict[str, Any]],
    rounds: Sequence[Sequence[RoundRecord]] = ((),),
    settings: str = "",
    run: str = "",
    phases: Sequence[PhaseRecord] = (),
) -> Path:
    """Write the folder of a run as far as a report reads it. All workers have the same steps."""
    for worker, own in enumerate(rounds):
        start = StartRecord(
            0, 1e9, workers=len(rounds), parameters=sum(FRAGMENTS.values()), run=run
        )
        path = folder / f"worker-{worker}"
        path.mkdir(parents=True)
        lines = [to_line(start), *map(to_line, phases), *map(to_line, steps), *map(to_line, own)]
        (path / "metrics.jsonl").write_text("".join(lines))
    if settings:
        (folder / "config.toml").write_text(settings)
    return folder
