"""What the planner says of a run beside what the run then does, over links from slow to plenty.

    python -m benchmarks.plan_vs_run [--workers 2] [--rates 200,100,50,20,10,5] [--codecs fp32,fp4_e3m0] [--delays 1,5]
                                     [--steps 60] [--out outputs/plan-vs-run] [--section.key value ...]

Every run is a real one in a network of its own (benchmarks/network.py). The planner is told the link's rate (Mbit/s, less the
headers of TCP, IP and Ethernet, which the bucket counts), latency and speed of coding as a run without a limit has met them,
and what a step of the run itself computes, as a shared machine is not the same from one run to the next: nothing of its
waiting. The error is in points of utilisation. Finished runs are kept in --out and not repeated.
"""

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.arguments import codec_names, further_settings, positive
from benchmarks.slow_link_runs import MODEL, OVERLAP, SET_BY_THE_TABLE, watch
from benchmarks.table import print_table, summary
from torchtitan_diloco.config import load_config
from torchtitan_diloco.planner.conditions import even_links
from torchtitan_diloco.planner.observed import conditions_from
from torchtitan_diloco.planner.outer_loop import predict_diloco

GOODPUT = 1448 / 1514
"""Payload of a full packet / what the bucket counts of it."""
SYNC_EVERY = 10


def settings(
    workers: int, codec: str, delay: int, steps: int, extra: dict[str, str]
) -> dict[str, str]:
    outer = {
        "diloco.workers": str(workers),
        "diloco.sync_every": str(SYNC_EVERY),
        "diloco.overlap.delay": str(delay),
        "diloco.quantization.codec": codec,
    }
    return MODEL | outer | {"training.steps": str(steps), "metrics.log_every": "1"} | extra


def finished_run(rate: float, chosen: dict[str, str], workers: int, folder: Path) -> dict[str, Any]:
    """The summary of a run and the sizes of its fragments; trained unless the folder holds it."""
    kept = folder / "finished.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("metrics*.jsonl"):  # an earlier start was interrupted
            path.unlink()
        watch(OVERLAP, rate, chosen | {"run.folder": str(folder)}, workers, folder)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        sizes = {
            record["fragment"]: record["parameters"]
            for record in records
            if record.get("kind") == "round"
        }
        fragments = [sizes[fragment] for fragment in sorted(sizes)]
        kept.write_text(
            json.dumps({"settings": chosen, "summary": records[-1], "fragments": fragments})
        )
    found: dict[str, Any] = json.loads(kept.read_text())
    if found["settings"] != chosen:
        raise SystemExit(
            f"{folder} holds a run with other settings: choose another --out, or remove it"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument(
        "--rates", default="200,100,50,20,10,5", help="Mbit/s of every worker's link, each way"
    )
    parser.add_argument("--codecs", type=codec_names, default=["fp32", "fp4_e3m0"])
    parser.add_argument("--delays", default="1,5")
    parser.add_argument("--steps", type=positive, default=60)
    parser.add_argument("--out", type=Path, default=Path("outputs/plan-vs-run"))
    own, words = parser.parse_known_args()
    extra = further_settings(parser, words, SET_BY_THE_TABLE)

    rows: list[list[str]] = []
    errors: list[float] = []
    for codec in own.codecs:
        for delay in map(int, own.delays.split(",")):
            chosen = settings(own.workers, codec, delay, own.steps, extra)
            diloco = load_config("debug", chosen).diloco
            free = finished_run(
                math.inf, chosen, own.workers, own.out / f"{codec}-tau{delay}-unlimited"
            )
            known = conditions_from(free["summary"]["observed"])
            for rate in map(float, own.rates.split(",")):
                folder = own.out / f"{codec}-tau{delay}-{rate:g}mbit"
                run = finished_run(rate, chosen, own.workers, folder)
                links = even_links(own.workers, rate * 1e6 * GOODPUT, known.links.latency_seconds)
                own_steps = conditions_from(run["summary"]["observed"])
                told = replace(
                    known, links=links, step_seconds=own_steps.step_seconds, jitter=own_steps.jitter
                )
                said = (
                    100
                    * predict_diloco(run["fragments"], diloco, told, steps=own.steps).utilisation
                )
                measured = run["summary"]["measured_utilisation_percent"]
                errors.append(said - measured)
                rows.append(
                    [
                        codec,
                        str(delay),
                        f"{rate:g}",
                        f"{said:.1f}",
                        f"{measured:.1f}",
                        f"{said - measured:+.1f}",
                    ]
                )
                print(" ".join(rows[-1]), flush=True)
    title = (
        f"utilisation predicted and measured, {own.workers} workers, H = {SYNC_EVERY}, {own.steps} steps, n = 1 run a row; "
        f"error of the prediction, points: {summary(errors, 1)}; absolute, median {statistics.median(map(abs, errors)):.1f}"
    )
    print_table(
        title, ["codec", "tau", "Mbit/s", "predicted %", "measured %", "error, points"], rows
    )


if __name__ == "__main__":
    main()
