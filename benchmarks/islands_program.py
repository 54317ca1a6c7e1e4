"""Programs of `benchmarks.islands`.

    .venv/bin/python -m benchmarks.islands_program train '{"settings": {...}, "path": ..., ...}'
    .venv/bin/python -m benchmarks.islands_program audit JOIN

The first runs the trainer as an island, or as a worker of torchft that comes and goes. It appends a
line of JSON to the file `path` for each step and event. The second prints statistics and
inconsistencies of the log of a run.
"""

import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import core
from benchmarks.parity import read_tables
from benchmarks.torchft_loop import TorchftLoop, TorchftTrainer
from torchtitan_diloco import train
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.islands import IslandPeers, connection, leader
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.ledger import Entry, Outcome
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.reader import open_reader
from torchtitan_diloco.trainer import Trainer

LENGTH = 64
"""Tokens of a sample."""


def island_settings(samples: int) -> core.Settings:
    """Return the settings of the decoder of 0.12M parameters of docs/measurements.md."""
    tables = read_tables()
    settings = tables.defaults | tables.shapes["many-steps"]
    for key in ("training.global_batch_size", "diloco.workers"):
        del settings[key]
    return settings | {"training.batch_size": str(samples)}


# --- the trainer ----------------------------------------------------------------------------------


def train_island(
    settings: core.Settings,
    path: str,
    *,
    sleep: float = 0.0,
    slow: float = 1.0,
    late: int = 0,
    torchft: bool = False,
    clock: Any = None,
) -> None:
    """Run the trainer in this process.

    `sleep`: seconds that a step takes longer. `slow`: its length / that of the others. `late`:
    steps that an upload takes longer. `clock`: shared with another process, for the tokens so far.
    """
    torch.set_num_threads(1)
    step, outer_step, upload = Trainer.train_step, StreamingDiLoCo.step, IslandPeers._upload
    seconds, exposed = deque[float](maxlen=32), [0.0]
    joined: list[int] = []

    def usual() -> float:
        return statistics.median(seconds or [0.0])

    with Path(path).open("a", buffering=1) as file:

        def note(**facts: Any) -> None:
            file.write(json.dumps({"time": time.time(), **facts}) + "\n")

        def observed_step(trainer: Trainer, batches: Any) -> Any:
            outer, started = trainer.outer, time.time()
            if trainer.island is not None and not joined:
                joined.extend(versions(trainer.island.peers))
                note(event="joined", slot=trainer.island.peers.seat.slot)
            time.sleep(sleep + (slow - 1) * usual())
            begun, before = time.time(), exposed_seconds(outer)
            result = step(trainer, batches)
            seconds.append(time.time() - begun)
            facts = progress(outer, joined)
            lost = exposed_seconds(outer) - before
            note(step=trainer.step, seconds=time.time() - started, exposed=lost, **facts)
            if clock is not None and trainer.island is not None:
                clock.value = max(clock.value, trainer.island.peers.clock)
            return result

        def exposed_seconds(outer: object) -> float:
            return outer.exposed_seconds if isinstance(outer, TorchftLoop) else exposed[0]

        def timed_step(outer: StreamingDiLoCo, weight: float = 1.0) -> None:
            exposed[0] += core.timed(lambda: outer_step(outer, weight)).wall

        def late_upload(*part: Any) -> None:
            time.sleep(late * usual())
            upload(*part)

        note(event="started")
        for owner, name, replaced in (
            (Trainer, "train_step", observed_step),
            (StreamingDiLoCo, "step", timed_step),
            (IslandPeers, "_upload", late_upload),
            (train, "Trainer", TorchftTrainer if torchft else Trainer),
        ):
            setattr(owner, name, replaced)
        sys.exit(train.main(core.command_line(settings)))


def versions(peers: IslandPeers) -> list[int]:
    assert peers._leader is not None
    return [one.version for one in peers._leader.state.fragments]


def progress(outer: object, joined: list[int]) -> dict[str, float]:
    """Return the tokens and rounds of a run so far, and those with parts of this island."""
    if isinstance(outer, TorchftLoop):
        return {"rounds": outer.commits, "own": outer.commits, "lost": outer.lost_steps}
    assert isinstance(outer, StreamingDiLoCo)
    peers = outer.peers
    assert isinstance(peers, IslandPeers)
    assert peers._leader is not None
    state = peers._leader.state
    ledgers = state.slots[peers.seat.slot].ledgers
    return {
        "merged": max(one.clock for one in state.fragments),
        "rounds": sum(one.version for one in state.fragments),
        "own": sum(one.merged_in > at for one, at in zip(ledgers, joined, strict=True)),
    }


def fork(log: Path, arguments: dict[str, Any]) -> None:
    """Run the trainer in this forked process, with its output in `log`."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    connection.EXPIRY, leader.BEAT = 2.0, 0.1  # shorter than the defaults, as steps are short
    train_island(**arguments)


# --- audit ----------------------------------------------------------------------------------------


def audit(join: Join) -> dict[str, Any]:
    """Return statistics and inconsistencies of a log."""
    outcomes: list[Outcome] = []
    with open_reader(join, outcomes.append, whole=True) as reader:
        state = reader.state
    entries = [one.entry for one in outcomes if one.entry is not None]
    fragments = len(state.fragments)

    def samples(fate: str) -> list[float]:
        """Return the samples of each slot with this fate."""
        return [sum(getattr(one, fate) for one in slot.ledgers) / fragments for slot in state.slots]

    return {
        "problems": [*_problems(state, entries), *([] if state.ended else ["it has not ended"])],
        "merged_tokens": sum(one.clock for one in state.fragments) / fragments,
        "merged_samples": samples("merged"),
        "lost_samples": samples("lost"),
        "read_twice": [slot.read_twice for slot in state.slots],
        "participants": [len(entry.parts) for entry in entries],
        "late": [entry.close.version - 1 - part.base for entry in entries for part in entry.parts],
    }


def _problems(state: State, entries: Sequence[Entry]) -> Iterator[str]:
    """Check what was merged by recomputing it from the entries."""
    merged = dict[tuple[int, int], list[tuple[int, int]]]()
    for number, made in enumerate(state.fragments):
        closes = [entry.close for entry in entries if entry.close.fragment == number]
        if made.clock != sum(sum(close.weights) for close in closes):
            yield f"fragment {number}: its clock is not the sum of the weights"
    for part in (part for entry in entries for part in entry.parts):
        merged.setdefault((part.slot, part.fragment), []).append((part.start, part.end))
        if part.finite and part.weight != (part.end - part.start) * LENGTH:
            yield f"{part.incarnation}: {part.weight} tokens in {part.start, part.end}"
    for (slot, fragment), ranges in merged.items():
        if any(one[1] > other[0] for one, other in pairwise(sorted(ranges))):
            yield f"slot {slot}, fragment {fragment}: a range is merged twice"
        known = state.slots[slot].ledgers[fragment].merged
        if known != sum(end - start for start, end in ranges):
            yield f"slot {slot}, fragment {fragment}: the ledger has {known} samples merged"


def main(program: str, text: str) -> None:
    if program == "train":
        train_island(**json.loads(text))
    else:
        print(json.dumps(audit(Join.parse(text))))


if __name__ == "__main__":
    main(*sys.argv[1:])
