"""What a syncer hears: notes of islands, foundings and changes, which it passes to the rules."""

import time
from functools import partial

from torchtitan_diloco.islands.rules.changes import MOST_CHANGE
from torchtitan_diloco.islands.rules.founding import MOST_FOUNDING
from torchtitan_diloco.islands.rules.names import (
    CHANGE,
    FOUND,
    ISLAND,
    founding_name,
    incarnation_of,
)
from torchtitan_diloco.islands.rules.note import MOST_NOTE
from torchtitan_diloco.islands.rules.syncer import Syncer
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.islands.tasks import Deliver
from torchtitan_diloco.store import AwayError, DamagedObjectError

MOST_LISTED = 500
"""Maximum number of notes, foundings or changes that are listed."""


class Heard:
    """Reads what others have written. Two threads use it: one calls `read_owners`, and another one
    `look`, which takes seconds on some servers if a login has written thousands of notes."""

    def __init__(self, run: Run, ask: Deliver, deliver: Deliver) -> None:
        """Read nothing yet. `ask`: calls a function that changes nothing in the machine."""
        self._run = run
        self._ask = ask
        self._deliver = deliver
        self._of_owners = dict[str, bytes]()
        """The latest notes of the owners of slots."""
        self._turn = 0
        """Number of times the owners were read."""
        self._listed_up_to = ""
        """Name up to which the last look has listed notes, if there were too many."""
        self._tags = dict[str, tuple[int, str]]()
        """Size and tag of the notes of others, as they were read."""
        self._foundings = set[str]()
        """Names of the foundings that were read."""
        self.has_read_changes = False

    def read_owners(self) -> None:
        """Read the notes of the owners of slots, which train. Raise an AwayError if one cannot be
        read, after those that were read are passed on."""
        owners = self._ask(_owners)
        if not owners:
            return
        self._turn += 1  # so that one note that cannot be read does not hide the same others
        first = self._turn % len(owners)
        notes = dict[str, bytes]()
        failure: AwayError | None = None
        try:
            for incarnation in owners[first:] + owners[:first]:
                raw = self._read(ISLAND + incarnation, MOST_NOTE)
                if raw is not None:
                    notes[incarnation] = raw
        except AwayError as error:
            failure = error
        before = self._of_owners

        def pass_notes(machine: Syncer) -> None:
            if failure is None:
                machine.on_poll(time.monotonic())
            for incarnation, raw in notes.items():
                if raw != before.get(incarnation):
                    machine.on_note(incarnation, raw)

        self._deliver(pass_notes)  # at once: a round does not wait for islands that are unheard
        self._of_owners = {**before, **notes} if failure else notes
        if failure is not None:
            raise failure

    def look(self) -> None:
        """Read changes, and the notes of other islands that have changed. Read foundings until
        there is a run."""
        self._read_changes()
        self._read_others()
        if not self._ask(_is_founded):
            self._read_foundings()
        if not self._ask(_owners):  # otherwise, `read_owners` counts the time
            self._deliver(partial(Syncer.on_poll, now=time.monotonic()))

    def _read_others(self) -> None:
        entries = self._run.brief.list(ISLAND, self._listed_up_to, most=MOST_LISTED)
        newest = sorted(entries, key=lambda entry: entry.age)
        listed = {entry.name: (entry.size, entry.tag) for entry in newest}
        chosen = self._ask(lambda machine: machine.choose_notes(listed))
        if len(entries) == MOST_LISTED or self._listed_up_to:
            # Such as a million of one login: the next look lists others, and all that are known
            # are read now.
            members = self._ask(lambda machine: list(machine.presence.members))
            chosen += [ISLAND + member for member in members]
        is_end = len(entries) < MOST_LISTED
        self._listed_up_to = "" if is_end else max(entry.name for entry in entries)
        owners = set(self._ask(_owners))
        self._tags = {name: tag for name, tag in self._tags.items() if name in listed}
        for name in dict.fromkeys(chosen):
            incarnation = incarnation_of(name)
            size, tag = listed.get(name, (0, ""))
            is_read = name in listed and self._tags.get(name) == (size, tag)
            if incarnation is None or incarnation in owners or size > MOST_NOTE or is_read:
                continue
            raw = self._read(name, MOST_NOTE)
            self._tags[name] = size, tag
            if raw is not None:
                self._deliver(partial(Syncer.on_note, incarnation=incarnation, raw=raw))

    def _read_foundings(self) -> None:
        for entry in self._run.brief.list(FOUND, most=MOST_LISTED):
            incarnation = incarnation_of(entry.name)
            is_new = entry.name not in self._foundings and entry.size <= MOST_FOUNDING
            if incarnation is None or entry.name != founding_name(incarnation) or not is_new:
                continue
            raw = self._read(entry.name, MOST_FOUNDING)
            if raw is not None:
                self._deliver(partial(Syncer.on_founding, incarnation=incarnation, raw=raw))
                self._foundings.add(entry.name)

    def _read_changes(self) -> None:
        names = [entry.name for entry in self._run.brief.list(CHANGE, most=MOST_LISTED)]
        for name in self._deliver(lambda machine: machine.choose_changes(names)):
            raw = self._read(name, MOST_CHANGE)
            if raw is not None:
                self._deliver(partial(Syncer.on_change, name=name, raw=raw))
        self.has_read_changes = True

    def _read(self, name: str, most: int) -> bytes | None:
        """Return the content of a small object of others, or None if it is gone, damaged, or larger
        than `most` bytes."""
        try:
            stored = self._run.brief.get(name, most=most)
        except DamagedObjectError:
            return None
        return None if stored is None else stored.content


def _owners(machine: Syncer) -> list[str]:
    return [] if machine.state is None else machine.state.owners()


def _is_founded(machine: Syncer) -> bool:
    return machine.state is not None and machine.state.is_founded
