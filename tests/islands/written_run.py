"""A run in a folder, written by the rules of the syncer in virtual time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.islands.rules.desk import A, B, Desk, founded
from torchtitan_diloco.islands.reader import Reader
from torchtitan_diloco.islands.rules.decision import Decision, encode_decision
from torchtitan_diloco.islands.rules.history import encode_bin
from torchtitan_diloco.islands.rules.names import ISLAND, history_name, run_name
from torchtitan_diloco.islands.rules.note import NotedGauges, NotedVitals
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.store import open_store

STEPS = 10
"""Steps of a cycle."""


class WrittenRun(Desk):
    """Two islands, a and b, whose syncer has done what they have asked for."""

    def __init__(self, state: Decision | None = None, *, wall: float = 0.0, **changed: Any) -> None:
        super().__init__(state or founded(**{"total_tokens": 10**6, **changed}), wall)
        self.steps = dict[str, int]()
        self.trained = dict[str, int]()

    def train(
        self,
        incarnation: str,
        *,
        sends: bool = True,
        steps: int = STEPS,
        loss: float | None = 2.5,
        validated: tuple[int, float] | None = None,
        vitals: NotedVitals | None = None,
        **fields: Any,
    ) -> None:
        """Let an island train for a cycle, and send its part unless one waits."""
        slot = self.state.slot_of(incarnation)
        assert slot is not None
        step = self.steps.get(incarnation, 0) + steps
        self.steps[incarnation] = step
        self.trained[incarnation] = self.trained.get(incarnation, 0) + steps
        gauges = NotedGauges(
            vitals=vitals or NotedVitals(compute=0.1),
            loss=loss,
            validated=validated,
            tokens_per_second=10.0,
            waited=0.25,
            round_trip=0.01,
            upload_rate=1e6,
            says=fields.pop("says", 0),
            site="oslo",
            process="4711 on node-1",
        )
        parts = [self.part(slot, samples=steps)] if sends else []
        self.note(
            incarnation,
            *parts,
            step=step,
            tokens=self.trained[incarnation],
            position=step,
            gauges=msgspec.Raw(msgspec.json.encode(gauges)),
            **fields,
        )

    def rounds(self, count: int, *incarnations: str, seconds: float = 1.0, **fields: Any) -> None:
        """Let islands train for some cycles, whose parts are merged."""
        for _ in range(count):
            for one in incarnations or (A, B):
                self.train(one, **fields)
            self.pass_time(seconds)

    def write(self, location: Path) -> None:
        """Write the newest decision, the notes and the history into a store."""
        store = open_store(location)
        try:
            store.create(run_name(self.state.number), encode_decision(self.state))
            for incarnation, content in self.notes.items():
                store.replace(ISLAND + incarnation, content)
            for number, one in enumerate(self.history):
                store.create(history_name(number), encode_bin(one))
        finally:
            store.close()


def damage(location: Path, number: int) -> Path:
    """Alter a stored decision, and return its file."""
    path = location / run_name(number)
    path.write_bytes(b"?" + path.read_bytes()[1:])
    return path


@contextmanager
def reading(folder: Path, *, whole: bool = True) -> Iterator[Reader]:
    """Yield a reader of the run in a folder."""
    run = Run(open_store(folder, writes=None))
    try:
        reader = Reader(run, whole=whole)
        reader.read()
        yield reader
    finally:
        run.close()
