"""Simulate many runs with faults: `python -m tests.islands.rules.simulate --seeds 5000`."""

import argparse
import sys
import time
import traceback
from collections import Counter
from multiprocessing import Pool

from tests.islands.rules.faults import build
from torchtitan_diloco.islands.rules.decision import Fate

PROGRESS = 250
"""Seeds from one line to the next."""


def simulate(seed: int) -> tuple[int, Counter[str], str]:
    """Run a seed. Return counts, and what went wrong."""
    simulation = build(seed)
    problem = ""
    try:
        simulation.run()
    except Exception:
        problem = traceback.format_exc(limit=-4)
    counts = Counter[str]()
    counts["decisions"] = len(simulation.decisions)
    counts["versions"] = len(simulation.versions)
    counts["merged parts"] = simulation.fates.get(Fate.MERGED, 0)
    counts["lost ranges"] = len(simulation.losses)
    merged = (Fate.MERGED, Fate.LOSS)
    kinds = {fate: n for fate, n in simulation.fates.items() if fate not in merged}
    counts["refused parts"] = sum(n for fate, n in kinds.items() if not fate.is_lost)
    for fate, number in kinds.items():
        counts[f"  {fate.words}"] = number
    counts["late parts"] = sum(late > 0 for late in simulation.late)
    counts["terms of syncers"] = simulation.terms
    counts["superseded syncers"] = simulation.superseded
    counts["stores put back"] = simulation.restores
    counts["processes that saw it"] = simulation.went_back
    counts["starts of islands"] = len(simulation.islands)
    for island in simulation.islands:
        counts[f"  ended: {island.ending or 'killed'}"] += 1
    counts["faults"] = len(simulation.planned)
    counts["virtual seconds"] = round(simulation.world.now)
    return seed, counts, problem and f"seed {seed}: {simulation.planned}\n{problem}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    began = time.monotonic()
    total = Counter[str]()
    violations = 0
    with Pool(arguments.processes) as pool:
        results = pool.imap_unordered(simulate, seeds, chunksize=4)
        for done, (_, counts, problem) in enumerate(results, start=1):
            total += counts
            violations += bool(problem)
            if problem:
                print(problem, flush=True)
            if done % PROGRESS == 0 and done < len(seeds):
                merged = total["merged parts"]
                print(f"{done} seeds, {merged:,} merged parts, {violations} violations", flush=True)
    for name, number in total.items():
        print(f"{number:>9,} {name}")
    seconds = time.monotonic() - began
    print(f"{violations:>9,} violations in {len(seeds)} seeds, {seconds:.0f} s")
    return int(violations > 0)


if __name__ == "__main__":
    sys.exit(main())
