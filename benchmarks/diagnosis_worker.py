"""A worker of `benchmarks.diagnosis`: the trainer, with a fault in its process."""

import errno
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from torchtitan_diloco import train
from torchtitan_diloco.components import checkpoint
from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.telemetry import Batch
from torchtitan_diloco.diagnosis.verdicts import Judge, Verdict
from torchtitan_diloco.diloco.vitals import Report
from torchtitan_diloco.islands import IslandPeers
from torchtitan_diloco.trainer import Trainer

STEP_SECONDS, SAVE_EVERY = 0.06, 20
REACHED = "here the faults begin"
BEGIN = 120
"""Step at which a fault begins."""
Seen = Mapping[str, Report]


class Victim(Trainer):
    """Trainer whose steps sleep, and which has a fault from step BEGIN on."""

    fault: Mapping[str, float] = {}

    def amount(self, name: str) -> float:
        return self.fault.get(name, 0.0) if self.step >= BEGIN else 0.0

    def train_step(self, batches: Iterator[Batch]) -> Any:
        time.sleep(STEP_SECONDS * (1 + self.amount("compute")))
        if self.amount("outlier"):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(torch.randn_like(parameter))
        if self.step == BEGIN - 1:
            self.break_once()
        result = super().train_step(batches)
        if self.amount("nan") and self.step == BEGIN:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(float("nan"))
        if self.step == BEGIN:
            print(REACHED, flush=True)
        return result

    def break_once(self) -> None:
        if "bit" in self.fault:
            peers = self.outer.peers  # type: ignore[union-attr]
            copy = peers.states[0].outer
            if isinstance(peers, IslandPeers):
                fragment = peers._copies.fragments[0]
                copy = fragment.versions[fragment.newest]
            copy.view(torch.int32)[0] ^= 1 << 20
        if "clock" in self.fault:
            now, jump = time.time, self.fault["clock"]
            setattr(time, "time", lambda: now() + jump)  # noqa: B010
        if "disk" in self.fault:
            full = OSError(errno.ENOSPC, "No space left on device")
            setattr(checkpoint, "save_file", mock.Mock(side_effect=full))  # noqa: B010

    def begin(self) -> None:
        super().begin()
        loader = self.loader

        def delayed(batches: Iterator[Batch]) -> Iterator[Batch]:
            for batch in batches:
                time.sleep(STEP_SECONDS * self.amount("data"))
                yield batch

        original = type(loader).__iter__
        type(loader).__iter__ = lambda one: delayed(original(one))  # type: ignore[method-assign]
        save = Checkpointer.save

        def slow_save(one: Checkpointer, manifest: Any) -> float:
            seconds = STEP_SECONDS * self.amount("save")
            time.sleep(seconds)
            return seconds + save(one, manifest)

        setattr(Checkpointer, "save", slow_save)  # noqa: B010 - a fault
        setattr(Checkpointer, "due_by_time", lambda _: self.step % SAVE_EVERY == 0)  # noqa: B010


def record_inputs(path: Path) -> None:
    """Write all that the judge is told, a JSON object in a line."""
    file, note, miss = path.open("w", buffering=1), Judge.note, Judge.miss

    def write(seen: Seen, step: int, now: float, **more: float) -> None:
        told = {
            who: [*(float(f"{v:.3g}") for v in one.vitals), *one[1:]] for who, one in seen.items()
        }
        file.write(json.dumps({"step": step, "now": round(now, 2), **more, "seen": told}) + "\n")

    def noted(judge: Judge, seen: Seen, step: int, cycle: float, now: float) -> list[Verdict]:
        write(seen, step, now, cycle=round(cycle, 3))
        return note(judge, seen, step, cycle, now)

    def missed(judge: Judge, seen: Seen, step: int, now: float) -> list[Verdict]:
        write(seen, step, now)
        return miss(judge, seen, step, now)

    setattr(Judge, "note", noted)  # noqa: B010 - observed
    setattr(Judge, "miss", missed)  # noqa: B010


def run(fault: Mapping[str, float], history: Path, words: list[str]) -> None:
    """Train with a fault, and write what the judge of this worker is told to `history`."""
    Victim.fault = fault
    record_inputs(history)
    setattr(train, "Trainer", Victim)  # noqa: B010 - the program of a user, with a fault
    sys.exit(train.main(words))
