"""Compare the utilisation that the planner predicts with that of real runs, over links from slow to
plenty.

    python -m benchmarks.plan_vs_run [--rates 100,50,20] [--section.key value ...]

Every run is a real one in a network of its own (benchmarks/network.py). The planner is given the
link's rate (Mbit/s, less the headers of TCP, IP and Ethernet, which the bucket counts), latency and
speed of coding as measured in a run without a limit, and the step times of the run itself, as the
speed of a shared machine changes from run to run; it is given nothing about waiting. Errors are in
points of utilisation. Finished runs are kept in --out.
"""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import core
from benchmarks.slow_link_run import RESERVED, build_settings, length_settings, watch
from torchtitan_diloco.planner.observed import conditions_from
from torchtitan_diloco.planner.prediction import predict

METHOD = "streaming + overlap"
GOODPUT = 1448 / 1514
"""Payload of a full packet / its size as the bucket counts it."""
SYNC_EVERY = 10
HEADER = "codec | tau | Mbit/s | predicted % | measured % | error, points"


def finished_run(rate: float, settings: core.Settings, folder: Path) -> dict[str, Any]:
    """Return the summary of a run and the sizes of its fragments; train unless `folder` has it."""

    def run() -> dict[str, Any]:
        watch(METHOD, rate, settings, folder)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rounds = [record for record in records if record.get("kind") == "round"]
        sizes = {record["fragment"]: record["parameters"] for record in rounds}
        fragments = [sizes[fragment] for fragment in sorted(sizes)]
        return {"core.summary": records[-1], "fragments": fragments}

    return core.kept(folder, settings, run)


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--workers", type=core.positive, default=2)
    rates = [200.0, 100.0, 50.0, 20.0, 10.0, 5.0]
    rates_help = "Mbit/s of each worker's link, in each direction"
    parser.add_argument(
        "--rates", type=core.list_of(core.positive_number), default=rates, help=rates_help
    )
    parser.add_argument(
        "--codecs", type=core.list_of(core.codec_name), default=["fp32", "fp4_e3m0"]
    )
    parser.add_argument("--delays", type=core.list_of(int), default=[1, 5])
    parser.add_argument("--steps", type=core.positive, default=60)
    parser.add_argument("--out", type=Path, default=Path("outputs/plan-vs-run"))
    options, words = parser.parse_known_args()
    workers, extra = options.workers, core.parse_settings(parser, words, RESERVED)
    runs = {}
    for codec in options.codecs:
        for delay in options.delays:
            chosen = {"diloco.quantization.codec": codec} | extra
            settings = build_settings(METHOD, workers, SYNC_EVERY, delay, chosen)
            settings |= length_settings(options.steps, 1)
            runs[codec, delay] = (
                settings,
                core.parse_config(parser, core.command_line(settings)).diloco,
            )

    rows: list[list[str]] = []
    errors: list[float] = []
    for (codec, delay), (settings, diloco) in runs.items():
        name = f"{codec}-tau{delay}"
        free = finished_run(math.inf, settings, options.out / f"{name}-unlimited")
        known = conditions_from(free["core.summary"]["observed"])
        for rate in options.rates:
            run = finished_run(rate, settings, options.out / f"{name}-{rate:g}mbit")
            own = conditions_from(run["core.summary"]["observed"])
            conditions = replace(
                known,
                bits_per_second=rate * 1e6 * GOODPUT,
                step_seconds=own.step_seconds,
                jitter=own.jitter,
            )
            predicted = predict(run["fragments"], diloco, conditions, steps=options.steps)
            expected = 100 * predicted.utilisation
            measured = run["core.summary"]["measured_utilisation_percent"]
            errors.append(expected - measured)
            values = f"{expected:.1f}", f"{measured:.1f}", f"{errors[-1]:+.1f}"
            rows.append([codec, str(delay), f"{rate:g}", *values])
            print(" ".join(rows[-1]), flush=True)
    title = (
        f"utilisation predicted and measured, {workers} workers, H = {SYNC_EVERY}, {options.steps} "
        "steps, n = 1 run a row; error of the prediction, points: "
        f"{core.summary(errors, 1)}; absolute, median {statistics.median(map(abs, errors)):.1f}"
    )
    core.print_table(title, HEADER, rows)


if __name__ == "__main__":
    main()
