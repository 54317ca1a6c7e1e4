"""Simulate two islands with and without two of the rules by which they send and wait.

    .venv/bin/python -m benchmarks.islands_rules [--seeds 6]

Two islands, H = 20 steps of 0.1 s, tau = 1 step, a grace of 0.05 s. Of a slow one, uploads take a
share of a cycle, or its steps are twice as long; in some cases it joins 1.7 s later. *Together*:
rounds with a part of both islands that was made for this round. *Late*: steps until a part of the
fast island is applied, after the one in which it was due.

Needs the extra `test`, as it runs the simulations of the tests, which drive the same machine as
production.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from benchmarks import core
from tests.islands.plan import Nature, Plan
from tests.islands.simulation import World
from torchtitan_diloco.islands import members
from torchtitan_diloco.islands.records import Open
from torchtitan_diloco.islands.rounds import Rounds

CASES = {
    "uploads 30 % of a cycle": (Nature(upload=0.6), 0.0),
    "30 %, and joins late": (Nature(upload=0.6), 1.7),
    "uploads 60 % of a cycle": (Nature(upload=1.2), 0.0),
    "60 %, and joins late": (Nature(upload=1.2), 1.7),
    "uploads 90 % of a cycle": (Nature(upload=1.8), 0.0),
    "half as fast": (Nature(step=0.2), 0.0),
}
FIRST, LAST = 6, 4
"""Rounds at the beginning and the end that do not count."""


@contextmanager
def without_shifted_turns() -> Iterator[None]:
    """A part that has waited for an opening does not move the island's next turn."""
    read_open = Rounds._read_open

    def keep_turn(rounds: Rounds, record: Open, now: float) -> None:
        turn = rounds.turn
        read_open(rounds, record, now)
        rounds.turn = turn

    with patch.object(Rounds, "_read_open", keep_turn):
        yield


def measure(nature: Nature, later: float, seeds: int) -> str:
    together, late = list[bool](), list[int]()
    for seed in range(seeds):
        plan = Plan(sync_every=20, slots=2, begin=1 if later else 2, floor=0.05, steps=300)
        world = World(plan, seed)
        fast = world.start("fast")
        world.start("slow", nature, at=later)
        world.run()
        for _, entry in world.entries[FIRST:-LAST]:
            bases = {part.base for part in entry.parts}
            together.append(len(entry.parts) == 2 and bases == {entry.close.version - 1})
        late += fast.waits[FIRST:]
    return f"{100 * statistics.mean(together):.0f} %, {statistics.mean(late):.1f}"


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--seeds", type=core.positive, default=6)
    seeds = parser.parse_args().seeds
    rows = []
    for name, (nature, later) in CASES.items():
        cells = [measure(nature, later, seeds)]
        with patch.object(members, "PATIENCE", 0.0):
            cells.append(measure(nature, later, seeds))
        with without_shifted_turns():
            cells.append(measure(nature, later, seeds))
        rows.append([name, *cells])
    core.print_table(
        f"rounds together, steps late; {seeds} seeds",
        "slow island | all rules | without 1.5 usual lags | without shifted turns",
        rows,
    )


if __name__ == "__main__":
    main()
