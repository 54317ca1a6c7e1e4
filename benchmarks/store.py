"""Rates and times of a folder and of a bucket on this machine.

    .venv/bin/python -m benchmarks.store [--stores folder,seaweed] [--streams 1,4] [--rounds 7]

A large object of --megabytes is stored and fetched, in chunks over --streams connections. The small
operations have a content of 2 kB, as a decision has. Client and server are processes of their own
on the same machine, over the loopback with TLS: what a link adds is not in it. CPU is that of the
client.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import core
from tests.store.seaweed import SITE, SeaweedServer
from torchtitan_diloco.store import LargeObjects, Store, open_store

STORES = "folder", "seaweed"
OWN = f"part/{SITE}/"
NOTE = f"island/{SITE}/1"
SMALL = bytes(2000)
LISTED = 100
RATE_HEADER = "store | streams | up, MB/s | down, MB/s | CPU up, ms/MB | CPU down, ms/MB | n"
TIME_HEADER = (
    f"store | create | replace | replace, not durable | get | get, missing | list of {LISTED} | n"
)


@contextlib.contextmanager
def opened(kind: str) -> Iterator[Store]:
    """Yield a store of this kind that is empty."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        location = Path(folder, "run")
        if kind == "seaweed":
            location.mkdir()
            server = SeaweedServer(location)
            stack.callback(server.close)
            location = server.join_file(Path(folder, "join.toml"))
        store = open_store(location, writes=OWN)
        stack.callback(store.close)
        yield store


def rates(store: Store, kind: str, streams: int, megabytes: float, rounds: int) -> list[str]:
    """Return a row about a large object."""
    content = os.urandom(round(1e6 * megabytes))
    up = list[core.Seconds]()
    down = list[core.Seconds]()
    with LargeObjects(store, streams) as large:
        for number in range(1 + rounds):
            name = f"{OWN}large-{streams}-{number}"
            up.append(core.timed(lambda name=name: large.create(name, content)))  # type: ignore[misc]
            down.append(core.timed(lambda name=name: large.get(name, len(content))))  # type: ignore[misc]
            large.delete(name)
    columns = [
        *(
            core.summary([megabytes / duration.wall for duration in way[1:]], ",.0f")
            for way in (up, down)
        ),
        *(
            core.summary([duration.cpu / megabytes for duration in way[1:]], ".1f", 1e3)
            for way in (up, down)
        ),
    ]
    return [kind, str(streams), *columns, str(rounds)]


def times(store: Store, kind: str, rounds: int) -> list[str]:
    """Return a row about small objects."""
    for number in range(LISTED):
        store.create(f"{OWN}listed/{number:03d}", SMALL)
    numbers = iter(range(10**6))
    tasks = {
        "create": lambda: store.create(f"{OWN}{next(numbers)}", SMALL),
        "replace": lambda: store.replace(NOTE, SMALL),
        "note": lambda: store.replace(NOTE, SMALL, durable=False),
        "get": lambda: store.get(f"{OWN}listed/050"),
        "missing": lambda: store.get(f"{OWN}missing"),
        "list": lambda: store.list(f"{OWN}listed/"),
    }
    seconds = core.take_turns(
        {name: lambda task=task: core.timed(task).wall for name, task in tasks.items()},  # type: ignore[misc]
        rounds,
    )
    columns = [core.summary(values, ".1f", 1e3) for values in seconds.values()]
    return [kind, *columns, str(rounds)]


def main() -> None:
    parser = core.build_parser(__doc__)
    add = parser.add_argument
    add("--stores", type=core.one_of(STORES), default="")
    add("--streams", type=core.list_of(int), default=[1, 4])
    add("--megabytes", type=float, default=64.0)
    add("--rounds", type=core.positive, default=7)
    options = parser.parse_args()
    of_rates = list[list[str]]()
    of_times = list[list[str]]()
    for kind in options.stores:
        with opened(kind) as store:
            for streams in options.streams:
                row = rates(store, kind, streams, options.megabytes, options.rounds)
                of_rates.append(row)
            of_times.append(times(store, kind, 3 * options.rounds))
    core.print_table(f"An object of {options.megabytes:g} MB", RATE_HEADER, of_rates)
    core.print_table("Small operations, ms", TIME_HEADER, of_times)
    print(f"\nload of this machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
