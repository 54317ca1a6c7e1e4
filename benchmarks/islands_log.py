"""Write the log of a run of many rounds, and read it as `islands status` and a joiner do.

    .venv/bin/python -m benchmarks.islands_log [--rounds 1000000]

Two islands with one fragment write all records of a round: an opening, two parts and a close. A
state is stored where islands store it. A reader then begins with the newest one. Seconds of a
reader: connect, get the state, and read the records since. A joiner also transfers the copies.

Needs the extra `islands`.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks import core
from torchtitan_diloco.islands.bulk import Streams
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.joining import STATE_EVERY
from torchtitan_diloco.islands.local import local_server
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.reader import open_reader
from torchtitan_diloco.islands.records import (
    Chunk,
    Facts,
    Open,
    Part,
    Record,
    Take,
    encode,
)
from torchtitan_diloco.islands.server import Server
from torchtitan_diloco.islands.session import STATE_INDEX, Session, open_session, subject_of

TOKENS, REPEATS = 1_000, 5


def records(run: str, rounds: int, state: State) -> Iterator[Record]:
    """Yield the records of a run. The caller passes each one to the state."""
    yield Facts(
        run=run,
        slots=2,
        begin=2,
        total_tokens=2 * TOKENS * (rounds + 1),
        cycle=2 * TOKENS,
        outer_lr=0.4,
        checksums=("0" * 16,),
        fingerprints={"diloco.sync_every": "100"},
    )
    owners: list[dict[str, Any]] = [
        {"run": run, "slot": slot, "incarnation": f"island-{slot}/0123abcd"} for slot in (0, 1)
    ]
    yield from (Take(**owner, replaces=None) for owner in owners)
    for number in range(1, rounds + 1):
        shared = state.fragments[0]
        yield Open(**owners[0], fragment=0, version=number, grace=1.0)
        for owner in owners:
            yield Part(
                **owner,
                fragment=0,
                number=number,
                base=number - 1,
                checksum=shared.checksums[number - 1],
                start=(number - 1) * TOKENS,
                end=number * TOKENS,
                weight=TOKENS,
                chunks=tuple(Chunk(number, 1_000_000, f"{number:064x}") for _ in range(3)),
            )
        by = 0, owners[0]["incarnation"]
        norms = dict.fromkeys(shared.waiting, 1.0)
        state.learn(0, number, f"{number:016x}")
        yield state.build_close(0, by, norms, (), 0.4)


def write(join: Join, rounds: int) -> State:
    state, streams = State(), Streams(join, "states")
    with open_session(join, "writer") as session:
        for record in records(join.run, rounds, state):
            raw = encode(record)
            assert not state.read(state.sequence + 1, raw).void
            session.publish(subject_of(join.run, "log"), raw)
            if state.sequence % STATE_EVERY == 0:
                wait_until_stored(session, state.sequence)
                index = msgspec.json.encode(streams.store(state.encode(), "states"))
                streams.store(index, "states", STATE_INDEX)
        wait_until_stored(session, state.sequence)
    streams.close()
    return state


def wait_until_stored(session: Session, last: int) -> None:
    """A server drops records that it cannot store soon."""
    while session.state_of("log")["last_seq"] < last:
        time.sleep(0.01)


def do_not_flush_each_record() -> None:
    """Only here: flushing each record to disk, as `serve` does, takes 0.4 ms."""
    configuration = Server._configuration

    def changed(server: Server) -> dict[str, Any]:
        found = configuration(server)
        found["jetstream"]["sync_interval"] = "1m"
        return found

    Server._configuration = changed  # type: ignore[method-assign, assignment]


def read(join: Join, last: int) -> tuple[float, int]:
    """Return the seconds until everything is read, and the first record that the server keeps."""
    started = time.perf_counter()
    with open_reader(join) as reader:
        assert reader.state.sequence == last
        return time.perf_counter() - started, reader.connection.first


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--rounds", type=core.positive, default=10_000)
    rounds = parser.parse_args().rounds
    do_not_flush_each_record()
    with TemporaryDirectory() as folder, local_server(Path(folder) / "server") as server:
        state = write(server.join, rounds)
        found = [read(server.join, state.sequence) for _ in range(REPEATS)]
    kept = state.sequence - found[0][1] + 1
    core.print_table(
        f"a log of {rounds:,} rounds, n = {REPEATS}, median (min ... max)",
        "records | kept by the server | bytes of a state | seconds of a reader",
        [
            [
                f"{state.sequence:,}",
                f"{kept:,}",
                f"{len(state.encode()):,}",
                core.summary([seconds for seconds, _ in found]),
            ]
        ],
    )


if __name__ == "__main__":
    main()
