"""Read a run without taking part in it, and show its numbers."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.local import STORE
from torchtitan_diloco.islands.overview import STALE_SECONDS, View, overview
from torchtitan_diloco.islands.past import past_of
from torchtitan_diloco.islands.rules import presence
from torchtitan_diloco.islands.rules.commit import CallFailedError
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.history import Bin, decode_bin
from torchtitan_diloco.islands.rules.names import (
    ISLAND,
    RUN,
    history_name,
    incarnation_of,
    run_name,
)
from torchtitan_diloco.islands.rules.note import MOST_NOTE, Note, decode_note
from torchtitan_diloco.islands.runs import Decisions, Run
from torchtitan_diloco.islands.tables import render
from torchtitan_diloco.store import AwayError, DamagedObjectError, ListedObject, Store, open_store
from torchtitan_diloco.store.folder import is_store

REFRESH_SECONDS = 1.0
LONGEST_PAUSE = 0.1
LISTEN_SECONDS = STALE_SECONDS + 0.5
"""Seconds to wait for a new decision, unless the newest one has an age below `STALE_SECONDS`.
Without one, it is too old then, also if it seems to come from the future. A clock of this machine
that is behind by nearly all the time since it was written makes it seem new."""
COMMAND_PATIENCE = 5.0
"""Seconds for which a command repeats a call of the store that it needs."""
NEWEST_BINS = 12
"""Number of objects of the history to read, unless all are needed: at least an hour."""
MOST_JOINING = 64
"""Maximum number of islands without a slot whose notes are read."""
MOST_LISTED = 10_000
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


class Reader:
    """Reader of a run. Only one thread at a time may call this."""

    def __init__(self, run: Run, *, whole: bool) -> None:
        """Read nothing yet. `whole`: read the whole history later, and not only its end."""
        self.run = run
        self.decision: Decision | None = None
        self._decisions = Decisions(run)
        self._whole = whole
        self._age = math.inf
        """Seconds since the decision was written when it was read, by the clock of the store."""
        self._read_at = 0.0
        self._bins = dict[int, Bin | None]()
        """Objects of the history that were read. None: it is missing or damaged."""
        self._tags = dict[str, tuple[int, str]]()
        self._notes = dict[str, Note]()
        self._opened = dict[int, float]()
        """Time at which the round of a fragment was first seen open."""
        self._closed = set[int]()
        """Fragments whose round was seen closed."""
        self._away_since: float | None = None
        self._unreadable_because = ""
        """Why a decision could not be read that may be newer than `decision`."""

    def read(self) -> None:
        """Read what is new. Raise an AwayError if the store cannot be read."""
        try:
            self._read_decision()
            self._read_notes()
            self._read_history()
        except CallFailedError as error:
            self._note_away()
            raise AwayError(str(error)) from None
        except AwayError:
            self._note_away()
            raise
        self._away_since = None

    def listen(self) -> None:
        """Read for some seconds, if the newest decision may be old, or cannot be read."""
        end = time.monotonic() + LISTEN_SECONDS
        while time.monotonic() < end and not self._is_fresh():
            time.sleep(LONGEST_PAUSE)
            self.read()

    def view(self) -> View:
        now = time.monotonic()
        decision = self.decision
        away = None if self._away_since is None else now - self._away_since
        because = self._unreadable_because
        if decision is None:
            return View(away_seconds=away, unreadable_because=because)
        bins = [bin_ for _, bin_ in sorted(self._bins.items()) if bin_ is not None]
        return View(
            decision=decision,
            notes=dict(self._notes),
            past=past_of(decision, bins),
            still=self._still(now),
            opened={number: round(now - at, 1) for number, at in self._opened.items()},
            away_seconds=away,
            unreadable_because=because,
        )

    def overview(self) -> dict[str, Any]:
        return {"location": self.run.location} | overview(self.view())

    def _note_away(self) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()

    def _is_fresh(self) -> bool:
        """Return whether the newest decision seems to be new, or needs no syncer."""
        decision = self.decision
        if decision is None:
            return not self._unreadable_because
        return decision.ended or decision.stopped or 0 < self._age < STALE_SECONDS

    def _still(self, now: float) -> float:
        """Return the seconds since the newest decision was written."""
        return round(self._age + now - self._read_at, 1)

    # --- objects ----------------------------------------------------------------------------------

    def _read_decision(self) -> None:
        try:
            decision = self._decisions.next()
        except MalformedError as error:
            self._unreadable_because = str(error)
            return
        if decision is None:
            return
        self._unreadable_because = ""
        is_first = self.decision is None
        self.decision = decision
        self._read_at = time.monotonic()
        # Another clock may be wrong: a decision that was not there a moment before is new.
        self._age = self._stored_age(decision.number) if is_first else 0.01
        for number, shared in enumerate(decision.fragments):
            if not shared.is_open:
                self._closed.add(number)
                self._opened.pop(number, None)
            elif number in self._closed:
                self._opened.setdefault(number, time.monotonic())

    def _stored_age(self, number: int) -> float:
        """Return the age of a decision, by the clock of the store."""
        entries = self.run.brief.list(RUN, after=run_name(number - 1))
        return min((entry.age for entry in entries), default=0.0)

    def _read_notes(self) -> None:
        """Read the notes that have changed, of owners of slots and of islands that may join."""
        owners = set[str]() if self.decision is None else set(self.decision.owners())
        chosen = dict[str, ListedObject]()
        joining = 0
        for entry in sorted(self.run.brief.list(ISLAND, most=MOST_LISTED), key=_age):
            incarnation = incarnation_of(entry.name)
            if incarnation is None or entry.size > MOST_NOTE:
                continue
            if incarnation in owners:
                chosen[incarnation] = entry
            elif entry.age <= presence.SILENT and joining < MOST_JOINING:
                chosen[incarnation] = entry
                joining += 1
        for incarnation, entry in chosen.items():
            tag = entry.size, entry.tag
            if self._tags.get(incarnation) == tag:
                continue
            with suppress(DamagedObjectError, MalformedError):
                stored = self.run.brief.get(entry.name)
                if stored is not None:
                    self._notes[incarnation] = decode_note(stored.content)
            self._tags[incarnation] = tag
        for known in list(self._tags):
            if known not in chosen:
                del self._tags[known]
                self._notes.pop(known, None)

    def _read_history(self) -> None:
        if self.decision is None:
            return
        until = self.decision.history.number
        begin = 0 if self._whole else max(0, until - NEWEST_BINS)
        for number in range(begin, until):
            if number in self._bins:
                continue
            bin_: Bin | None = None
            with suppress(DamagedObjectError, MalformedError):
                stored = self.run.brief.get(history_name(number))
                bin_ = None if stored is None else decode_bin(stored.content)
            self._bins[number] = bin_


def _age(entry: ListedObject) -> float:
    return entry.age


@contextmanager
def open_reader(location: str, *, whole: bool = False) -> Iterator[Reader]:
    """Yield a reader that has read a run once. `whole`: read the whole history."""
    store = open_store(location, writes=None, patience=COMMAND_PATIENCE, quiet=True)
    run = Run(store, patience=COMMAND_PATIENCE)
    try:
        reader = Reader(run, whole=whole)
        reader.read()
        if reader.decision is None:
            check_location_of_run(store)
        reader.listen()
        yield reader
    finally:
        run.close()


def check_location_of_run(store: Store) -> None:
    """Raise a UserError if a location without decisions is a folder of other files. One that is
    empty, or has the marker of a store, may be that of a run that has not begun."""
    if not store.backend.has_other_files:
        return
    remedy = "give the islands.join of its islands"
    if is_store(inside := Path(store.location) / STORE):
        remedy = f"give {inside}"
    raise UserError(f"{store.location} is not the store of a run, and has other files: {remedy}")


def print_status(location: str, *, as_json: bool, repeat: bool) -> None:
    """Print the numbers of a run once, or refresh them on a terminal until Ctrl-C."""
    with open_reader(location) as reader:
        while True:
            numbers = reader.overview()
            clear = CLEAR * (repeat and sys.stdout.isatty())
            text = json.dumps(numbers) if as_json else render(numbers, "store")
            print(clear + text, flush=True)
            if not repeat:
                return
            time.sleep(REFRESH_SECONDS)
            with suppress(AwayError):  # the next output says so
                reader.read()
