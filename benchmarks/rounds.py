"""Fit what few rounds cost: the loss against data parallelism over the number of outer rounds.

    .venv/bin/python -m benchmarks.parity --table rounds --seeds 0,1 --jobs 2 --out DIR
    .venv/bin/python -m benchmarks.rounds [--records DIR] [--at 73]

The first command trains one model for as many tokens in smaller and smaller batches, and so for
more and more rounds. The second one reads its records, from benchmarks/records/ if no folder is
given, and fits c * rounds^-p to the difference in percent, without and with a beginning: for each
seed, and for the mean. It also prints the mean difference from 100 rounds on. `--at`: numbers of
rounds at which the fit is printed, too.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import core, records
from benchmarks.parity import expand, read_tables

TABLE = "rounds"
KINDS = {"no beginning": "", "a beginning of 0.1": ", beginning 0.1"}
EXPONENTS = [number / 100 for number in range(301)]
"""Those that are tried. With the largest one, only the fewest rounds say something."""
MANY = 100
"""Rounds from which on the mean of all differences is printed, beside the fit, which falls to 0."""

Gaps = dict[int, dict[int, float]]
"""Difference from the control in percent, by seed and number of rounds."""


class Fit(NamedTuple):
    """c * rounds^-p, in percent."""

    scale: float
    exponent: float

    def at(self, rounds: int) -> float:
        return self.scale / math.pow(rounds, self.exponent)


def fit(gaps: Mapping[int, float]) -> Fit:
    """Return the power law with the smallest sum of squares. Differences may be negative, so that
    their logarithms cannot be fitted."""

    def with_exponent(exponent: float) -> Fit:
        basis = {rounds: math.pow(rounds, -exponent) for rounds in gaps}
        scale = sum(gaps[rounds] * value for rounds, value in basis.items())
        return Fit(scale / sum(value**2 for value in basis.values()), exponent)

    def squares(candidate: Fit) -> float:
        return sum((candidate.at(rounds) - gap) ** 2 for rounds, gap in gaps.items())

    return min(map(with_exponent, EXPONENTS), key=squares)


def find_gaps(runs: Sequence[core.Record], ending: str) -> Gaps:
    """Return the differences of runs of which the name ends so."""
    losses = {(record["run"], record["seed"]): record["loss"] for record in runs}
    gaps: Gaps = {}
    for group in read_tables().tables[TABLE].groups:
        control, *_ = expand(group[0])
        rounds = control.removeprefix("data parallel, ")
        run = f"streaming, H=30, {rounds}{ending}"
        for seed in sorted({seed for _, seed in losses}):
            if {(run, seed), (control, seed)} <= losses.keys():
                gap = 100 * (losses[run, seed] / losses[control, seed] - 1)
                gaps.setdefault(seed, {})[int(rounds.split()[0])] = gap
    return gaps


def rows_of(gaps: Gaps, at: Sequence[int]) -> list[list[str]]:
    """Return a row for each number of rounds: measured, fitted to the mean, and to each seed.
    After them come the fits, and the mean of many rounds."""
    measured = sorted({rounds for seed in gaps.values() for rounds in seed})
    values = {n: [seed[n] for seed in gaps.values() if n in seed] for n in measured}
    whole = fit({rounds: statistics.fmean(of_seeds) for rounds, of_seeds in values.items()})
    fits = [fit(seed) for seed in gaps.values() if len(seed) > 1]
    rows = [
        [
            str(rounds),
            str(len(values.get(rounds, []))),
            core.summary(values[rounds], "+.2f") if rounds in values else "",
            f"{whole.at(rounds):+.2f}",
            core.summary([law.at(rounds) for law in fits], "+.2f"),
        ]
        for rounds in sorted({*measured, *at})
    ]
    exponents = core.summary([law.exponent for law in fits], ".2f")
    if any(law.exponent == EXPONENTS[-1] for law in fits):
        exponents += f"; {EXPONENTS[-1]:.2f} is the largest that is tried"
    law = f"{whole.scale:.0f} / rounds^{whole.exponent:.2f}"
    rows.append(["the fit, and the exponents p", "", "", law, exponents])
    of_many = [gap for n in measured if n >= MANY for gap in values[n]]
    if len(of_many) > 1:
        error = statistics.stdev(of_many) / math.sqrt(len(of_many))
        mean = f"{statistics.fmean(of_many):+.2f}, standard error {error:.2f}"
        rows.append([f"mean from {MANY} rounds on", str(len(of_many)), mean, "", ""])
    return rows


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--records", type=Path, default=records.RECORDS)
    parser.add_argument("--text", default="stdlib", help="name of the text in records")
    parser.add_argument("--at", type=core.list_of(core.positive), default=[])
    options = parser.parse_args()
    of_all_texts = records.read(f"parity-{TABLE}", [options.records])
    of_text = [record for record in of_all_texts if record["text"] == options.text]
    for kind, ending in KINDS.items():
        gaps = find_gaps(of_text, ending)
        if all(len(seed) < 2 for seed in gaps.values()):
            print(f"{kind}: fewer than two numbers of rounds are measured")
            continue
        title = f"{kind}: loss against data parallelism, %"
        columns = "rounds | n | measured | fit to the mean | fits to the seeds"
        core.print_table(title, columns, rows_of(gaps, options.at))


if __name__ == "__main__":
    main()
