"""Programs of `benchmarks.islands`: one island, and an audit of the log of a run.

    .venv/bin/python -m benchmarks.islands_program island '{"join": ..., "name": ..., ...}'
    .venv/bin/python -m benchmarks.islands_program audit JOIN

An island trains a small model. A step is a sleep and a small real step, so that several islands fit
on two cores. It appends a line of JSON to the file `path` for each step and event.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_diloco.diloco import DiLoCoConfig, Fragments, Overlap, Quantization, StreamingDiLoCo
from torchtitan_diloco.islands import IslandPeers, Islands
from torchtitan_diloco.islands.__main__ import open_reader
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.log import Entry, Outcome, State

TOKENS, SAMPLES = 4, 2
"""Weight of a step, and number of samples that it reads."""
DELAY = 5
"""tau. The grace is as long as this number of steps of 0.1 s."""
CONFIG = DiLoCoConfig(
    sync_every=20, fragments=Fragments(layers_per_fragment=2), overlap=Overlap(delay=DELAY)
)


class Net(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def train(
    join: str,
    name: str,
    path: str,
    total_tokens: int,
    *,
    begin: int,
    slots: int,
    step_seconds: float = 0.1,
    blocks: int = 4,
    width: int = 32,
    codec: str = "fp4_e3m0",
) -> None:
    """Train an island. Islands of a run differ only in name and speed."""
    with notes(path) as note:
        note(event="started")
        model = Net(blocks, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        island = IslandPeers(
            Islands(join, name, slots=slots, begin=begin, grace_seconds=DELAY * 0.1),
            total_tokens=total_tokens,
            tokens_per_step=TOKENS,
            samples_per_step=SAMPLES,
        )
        config = replace(CONFIG, quantization=Quantization(codec=codec))  # type: ignore[arg-type]
        outer = StreamingDiLoCo(model, island, config, optimizer=optimizer)
        seat = island.join()
        note(event="joined", slot=seat.slot, position=seat.position)
        leader = island._leader
        assert leader is not None
        step, ledgers = 0, leader.state.slots[seat.slot].ledgers
        joined_at = [one.version for one in leader.state.fragments]
        while not island.finished:
            step, started = step + 1, time.time()
            time.sleep(step_seconds)
            inner_step(model, optimizer, seat.slot, step)
            computed = time.time()
            outer.step(weight=TOKENS)
            now = time.time()
            note(
                step=step,
                seconds=now - started,
                exposed=now - computed,
                merged=max(one.clock for one in leader.state.fragments),
                rounds=sum(one.version for one in leader.state.fragments),
                own=sum(one.merged_in > at for one, at in zip(ledgers, joined_at, strict=True)),
            )
        outer.drain()
        note(event="ended", digest=_digest(outer.global_state_dict()), ledger=_ledger(leader.state))
        outer.close()


@contextmanager
def notes(path: str) -> Iterator[Callable[..., None]]:
    """Open a file, and yield a function that appends a line to it."""
    with Path(path).open("a", buffering=1) as file:

        def note(**facts: Any) -> None:
            file.write(json.dumps({"time": time.time(), **facts}) + "\n")

        yield note


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, slot: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100_000 * slot + step)
    output: Tensor = model(torch.randn(4, 8, generator=generator))
    (output - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _digest(shared: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(shared):
        found.update(shared[name].contiguous().numpy().tobytes())
    return found.hexdigest()


# --- ledger and audit -----------------------------------------------------------------------------


def _ledger(state: State) -> list[list[list[tuple[int, int, str]]]]:
    """Return spans of samples and their fates, by slot and fragment."""
    return [
        [[(span.start, span.end, span.fate) for span in one.spans] for one in slot.ledgers]
        for slot in state.slots
    ]


def audit(join: Join) -> dict[str, Any]:
    """Return statistics and inconsistencies of a log."""
    outcomes: list[Outcome] = []
    with open_reader(join, outcomes.append) as reader:
        state = reader.state
    entries = [one.entry for one in outcomes if one.entry is not None]
    spans = [(span, slot) for slot in state.slots for one in slot.ledgers for span in one.spans]
    fragments = len(state.fragments)
    return {
        "problems": list(_problems(state, entries)),
        "ended": state.ended,
        "ledger": _ledger(state),
        "merged_tokens": sum(one.clock for one in state.fragments) / fragments,
        "lost_samples": [
            sum(span.end - span.start for span, of in spans if of is slot and span.fate == "lost")
            / fragments
            for slot in state.slots
        ],
        "read_twice": [slot.read_twice for slot in state.slots],
        "participants": [len(entry.parts) for entry in entries],
        "late": [entry.close.version - 1 - part.base for entry in entries for part in entry.parts],
    }


def _problems(state: State, entries: Sequence[Entry]) -> list[str]:
    """Check what was merged by recomputing it from the entries."""
    found, merged = [], dict[tuple[int, int], list[tuple[int, int]]]()
    for entry in entries:
        for part in entry.parts:
            merged.setdefault((part.slot, part.fragment), []).append((part.start, part.end))
            if part.finite and part.weight * SAMPLES != (part.end - part.start) * TOKENS:
                found.append(f"{part.incarnation}: {part.weight} tokens in {part.start, part.end}")
    for (slot, fragment), ranges in merged.items():
        if any(one[1] > other[0] for one, other in pairwise(sorted(ranges))):
            found.append(f"slot {slot}, fragment {fragment}: a range is merged twice")
        spans = state.slots[slot].ledgers[fragment].spans
        known = sum(span.end - span.start for span in spans if span.fate == "merged")
        if known != sum(end - start for start, end in ranges):
            found.append(f"slot {slot}, fragment {fragment}: the ledger has {known} samples merged")
    for number, made in enumerate(state.fragments):
        closes = [entry.close for entry in entries if entry.close.fragment == number]
        if made.clock != sum(sum(close.weights) for close in closes):
            found.append(f"fragment {number}: its clock is not the sum of the weights")
    return found


def main(command: str, text: str) -> None:
    torch.set_num_threads(1)
    if command == "island":
        train(**json.loads(text))
    else:
        print(json.dumps(audit(Join.parse(text))))


if __name__ == "__main__":
    main(*sys.argv[1:])
