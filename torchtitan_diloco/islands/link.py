"""First rank of an island: threads around the rules of an island (islands/rules/island.py).

| thread | task |
|---|---|
| read | reads decisions |
| note | writes the note, each second and after changes |
| download | fetches versions and copies, and prepares the next P of a fragment on all ranks |
| upload | stores parts, and deletes those that are decided |

The training thread asks between two steps what to do (`decide`). All use the machine under the lock
of one condition, which is notified after each change. Three things need no lock: what never
changes, such as the incarnation; what only the reader changes, such as the position, which is of
the training thread; and a single reference or flag, such as the decision, which is replaced as a
whole.

The buffer `delta` of a fragment has two uses: the own delta, until it is encoded, and the next P,
until it is applied. `Claim` says which, for all ranks of the island (followers.py). A send that is
due wins: a download is then prepared again from its bytes.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from torch import Tensor

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.reports import STILL_SECONDS
from torchtitan_diloco.islands.followers import Claim, Prepared, SharedCopies
from torchtitan_diloco.islands.founding import store_copies
from torchtitan_diloco.islands.instructions import Instructions
from torchtitan_diloco.islands.payload import HEADER_BYTES, memory_of
from torchtitan_diloco.islands.rules.commit import CallFailedError
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.founding import encode_founding
from torchtitan_diloco.islands.rules.fragment import Apply
from torchtitan_diloco.islands.rules.island import Island
from torchtitan_diloco.islands.rules.names import (
    CHANGE,
    ISLAND,
    VERSION,
    Object,
    founding_name,
    part_name,
)
from torchtitan_diloco.islands.rules.note import NotedGauges, Part
from torchtitan_diloco.islands.rules.settings import NOTE_PAUSES, RATES
from torchtitan_diloco.islands.runs import Decisions, Run
from torchtitan_diloco.islands.spares import Spares
from torchtitan_diloco.islands.transfers import AGAIN_SECONDS, Transfers, Unread
from torchtitan_diloco.store import AwayError, DamagedObjectError, FullError, Kind, RefusedError

NOTE_SECONDS = 1.0
"""Seconds between two notes without a change."""
SHARE_OF_WAIT = 1 / 16
"""While training waits, decisions are read after this share of the time for which it has waited, if
that is less than `poll_seconds` and the store is no cloud."""
LEAST_POLL = 0.005
"""Minimum seconds after which they are read."""
LONGEST_WAIT = 0.1
"""Longest single wait of training, because a thread may have failed in the meantime."""
Result = TypeVar("Result")


class _ClosedError(Exception):
    """The island ends."""


class Link:
    def __init__(
        self,
        run: Run,
        machine: Island,
        copies: SharedCopies,
        checksums: Sequence[str],
    ) -> None:
        """Build the threads, which `start` starts. `checksums`: of the copies P."""
        self.run = run
        self.machine = machine
        self.gauges: Callable[[], NotedGauges] = NotedGauges
        """Returns values for users, for the next note."""
        self.transfers = Transfers(len(checksums))
        self.read_at = time.monotonic()
        """Time at which the store was last read."""
        self._copies = copies
        self._checksums = list(checksums)
        self._changed = threading.Condition()
        self._claims = [Claim.FREE] * len(self._checksums)
        self._sends = set[int]()
        """Fragments whose buffer a send waits for."""
        self._prepared = dict[int, Prepared]()
        self._spares = Spares(1)
        self._unread = Unread()
        self._is_note_due = threading.Event()
        self._is_part_new = threading.Event()
        """Whether a part is stored that is in no note yet."""
        self._waits_since: float | None = None
        """Time since when training waits, if it does."""
        self._garbage = list[str]()
        """Names of own objects to delete."""
        self._uploads = SimpleQueue[tuple[Part, Tensor | None]]()
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self._is_founding_stored = False
        self._are_copies_stored = False
        bodies = (self._read, self._write_notes, self._download, self._upload)
        self._threads = [
            threading.Thread(
                target=self._guard, args=(body,), name=f"island{body.__name__}", daemon=True
            )
            for body in bodies
        ]

    # --- its life ---------------------------------------------------------------------------------

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise the error of a thread."""
        if self._failure is not None:
            raise self._failure

    def close(self, *, deletes_note: bool) -> None:
        """End the threads. `deletes_note`: whether this island has left in order."""
        self._closed.set()
        self._is_note_due.set()
        self._is_part_new.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._copies.stop()
        if deletes_note:
            with suppress(AwayError, FullError):  # the syncer deletes it later
                self.run.brief.delete(ISLAND + self.machine.incarnation)
        self.run.close()

    def _guard(self, body: Callable[[], None]) -> None:
        """Run a thread, and keep its error for `check`."""
        try:
            body()
        except _ClosedError:
            pass
        except BaseException as error:
            if not self._closed.is_set():
                if isinstance(error, UserError) and self.run.location not in str(error):
                    error.add_note(f"islands.join leads to {self.run.location}")
                self._failure = error
                with self._changed:
                    self._changed.notify_all()

    def _sleep(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise _ClosedError

    def _notify(self) -> None:
        """Wake the other threads. Hold the lock."""
        self._is_note_due.set()
        self._changed.notify_all()

    def read(self, call: Callable[[Island], Result]) -> Result:
        """Call a function that only reads the machine, which other threads change, and return its
        result."""
        with self._changed:
            return call(self.machine)

    # --- training thread --------------------------------------------------------------------------

    def finish_step(
        self, samples: int, tokens: int, seconds: float, reset: Collection[int] = ()
    ) -> None:
        """Count a step, and the fragments that were reset after it or before."""
        with self._changed:
            self.machine.finish_step(samples, tokens, seconds)
            for fragment in reset:
                self.machine.on_reset(fragment)
            self._notify()

    def decide(self) -> Instructions:
        """Return what to do next, after waiting for it. Carry it out, and call this again.

        Return without anything to do if a step is next, if the island is over, and now and then
        while it waits, so that the caller can look for failures.
        """
        began = time.monotonic()
        is_new = True
        if self._waits_since is None:
            self._waits_since = began
        with self._changed:
            while True:
                self.check()
                now = time.monotonic()
                due = self.machine.boundary(now)
                for send in due.sends:
                    self._claim_for_send(send.part.fragment)
                self._say_news()
                instructions = Instructions.of(self.machine, due, self.away_seconds)
                can_go_on = instructions.may_train or instructions.ending
                if due.applies or due.sends or can_go_on:
                    self._waits_since = None
                    return instructions
                if now - began > STILL_SECONDS:
                    return instructions
                if is_new:
                    self._is_note_due.set()
                pause = LONGEST_WAIT
                if due.waits_until is not None:
                    pause = min(pause, due.waits_until - now)
                is_new = self._changed.wait(max(0.0, pause))

    def _claim_for_send(self, fragment: int) -> None:
        """Claim the buffer of a fragment for its delta. Hold the lock."""
        self._sends.add(fragment)
        while self._claims[fragment] is Claim.PREPARING:
            self.check()  # the download may have failed
            self._changed.wait(LONGEST_WAIT)
        self._sends.discard(fragment)
        assert fragment not in self._prepared, "a version is applied before the next send"
        self._claims[fragment] = Claim.SENDING

    def prepared(self, apply: Apply) -> Prepared | None:
        """Return the download to apply, if it is not the P that is there already."""
        if apply.source is None:
            return None
        prepared = self._prepared[apply.fragment]
        assert prepared.source == apply.source
        return prepared

    def on_applied(self, apply: Apply) -> None:
        """Compare the checksum of P after a copy was applied, and free the buffer."""
        fragment = apply.fragment
        with self._changed:
            if apply.source is not None:
                self._checksums[fragment] = self._prepared[fragment].checksum
                self._free(fragment)
            self.machine.on_checksum(fragment, apply.version, self._checksums[fragment])
            if self.machine.fragments[fragment].is_wrong:
                self._free(fragment)  # what was prepared has a wrong base
            self._notify()

    def _free(self, fragment: int) -> None:
        self._prepared.pop(fragment, None)
        self._claims[fragment] = Claim.FREE

    def leave(self) -> None:
        with self._changed:
            self.machine.leave()
            self._notify()

    def enter_phase(self, position: int) -> None:
        with self._changed:
            self.machine.enter_phase(position)
            self._notify()

    # --- background thread ------------------------------------------------------------------------

    def store(self, part: Part, payload: Tensor | None) -> None:
        """Upload an encoded part, or declare that it is not finite (None)."""
        with self._changed:
            self._free(part.fragment)
            self._notify()
        self._uploads.put((part, payload))

    # --- own threads ------------------------------------------------------------------------------

    def _say_news(self) -> None:
        for line in self.machine.news.take():
            logger.info(f"island {self.machine.incarnation.partition('/')[0]}: {line}")

    def _read(self) -> None:
        decisions = Decisions(self.run)
        seconds = RATES[self.run.store.kind].poll_seconds
        while True:
            before = self.machine.decision
            try:
                changes = self._list_changes(before)
                decision = decisions.next()
            except (AwayError, CallFailedError):
                self._sleep(seconds)  # the store says so
                continue
            except MalformedError as error:
                logger.warning(f"{self.run.location}: {error}; trying again")
                self._sleep(STILL_SECONDS)
                continue
            self.read_at = time.monotonic()
            newest = decision or before
            with self._changed:
                self.machine.may_go_on = newest is not None and not newest.done.keys() >= changes
                if decision is not None:
                    seconds = decision.settings.poll_seconds
                    self.machine.on_decision(decision, time.monotonic())
                    self._notify()
                elif decisions.is_empty:
                    self.machine.on_empty()
            self._sleep(self._poll_pause(seconds))

    def _list_changes(self, decision: Decision | None) -> set[str]:
        """Return the changes that are stored, if the run may have ended before this island has a
        slot. List them before the next decision is read: they are deleted after it is made."""
        if self.machine.slot is not None or not (decision is None or decision.ended):
            return set()
        return {entry.name for entry in self.run.brief.list(CHANGE)}

    def _poll_pause(self, seconds: float) -> float:
        """Return the seconds until decisions are read again. Their costs matter less, and their
        delay more, if training has waited for a short time."""
        since = self._waits_since
        if since is None or self.run.store.kind is Kind.CLOUD:
            return seconds
        return min(seconds, max(LEAST_POLL, SHARE_OF_WAIT * (time.monotonic() - since)))

    def _write_notes(self) -> None:
        kind = self.run.store.kind
        pause = NOTE_PAUSES[kind]
        name = ISLAND + self.machine.incarnation
        while True:
            self._is_note_due.wait(NOTE_SECONDS)
            self._sleep(0.0)  # no note is written once it is closed
            self._is_note_due.clear()
            self._is_part_new.clear()
            with self._changed:
                content = self.machine.note(self.gauges())
            try:
                self.run.brief.replace(name, content, durable=False)
            except (AwayError, FullError) as error:
                if isinstance(error, FullError):
                    self.run.say_full(error)
                self._is_note_due.set()
                self._sleep(AGAIN_SECONDS)
            if kind is Kind.CLOUD:
                self._sleep(pause)
            else:
                self._is_part_new.wait(pause)
                self._sleep(0.0)

    def _download(self) -> None:
        while True:
            with self._changed:
                stored = self._next_download()
                if stored is None:
                    self._changed.wait(LONGEST_WAIT)
                    if self._closed.is_set():
                        return
                    continue
            memory = self._spares.take(HEADER_BYTES + 4 * self._copies.values(stored.fragment))
            began = time.monotonic()
            try:
                content = self.run.large.get(stored.name, into=memory)
            except (AwayError, DamagedObjectError) as error:
                is_lost = self._unread.note(stored, began) and self.away_seconds < STILL_SECONDS
                is_lost |= isinstance(error, DamagedObjectError)
                until = ", until there is a newer copy" if is_lost else ""
                logger.warning(f"{error}; trying again{until}")
                self._sleep(AGAIN_SECONDS)
                if not is_lost:
                    continue
                content = None
            if content is None:  # not visible yet, or old: look at the next decision
                # The memory is not used again: after an error, a chunk may be under way.
                with self._changed:
                    self.machine.on_missing(stored)
                self._sleep(LONGEST_WAIT)
                continue
            if stored.kind == VERSION:  # others are larger, and not part of a cycle
                self.transfers.add_download(stored.fragment, time.monotonic() - began)
            self._prepare(stored, content)
            self._spares.give(memory)

    def _next_download(self) -> Object | None:
        """Return what to download next. Hold the lock."""
        firsts = dict[int, Object]()
        for stored in self.machine.wanted():
            if self._claims[stored.fragment] is not Claim.PREPARED:
                firsts.setdefault(stored.fragment, stored)
        return self._unread.choose(firsts.values())

    def _prepare(self, stored: Object, content: memoryview) -> None:
        """Write the next P of a fragment to its buffer on all ranks, unless it is no longer
        wanted."""
        while True:
            with self._changed:
                while self._is_needed_by_send(stored.fragment):
                    self._changed.wait(LONGEST_WAIT)
                    if self._closed.is_set():
                        raise _ClosedError
                if not self._is_next(stored):
                    return
                self._claims[stored.fragment] = Claim.PREPARING
            checksum = self._copies.prepare(
                stored.fragment, content, lambda: stored.fragment in self._sends
            )
            with self._changed:
                self._free(stored.fragment)
                self._changed.notify_all()
                if checksum is None or stored.fragment in self._sends:
                    continue
                if not self._is_next(stored):
                    return
                self._claims[stored.fragment] = Claim.PREPARED
                now = time.perf_counter()
                self._prepared[stored.fragment] = Prepared(stored, now, len(content), checksum)
                self.machine.on_held(stored, time.monotonic())
                self._notify()
            return

    def _is_next(self, stored: Object) -> bool:
        """Return whether an object is the next one of its fragment: it changes the P that is there.
        After a copy that is wanted first, it would change another one."""
        objects = self.machine.wanted()
        of_fragment = (wanted for wanted in objects if wanted.fragment == stored.fragment)
        return stored == next(of_fragment, None)

    def _is_needed_by_send(self, fragment: int) -> bool:
        return self._claims[fragment] is Claim.SENDING or fragment in self._sends

    def _upload(self) -> None:
        while True:
            if self.machine.may_found or self.machine.is_founder:
                self._found()
            self._collect_garbage()
            try:
                part, payload = self._uploads.get(timeout=LONGEST_WAIT)
            except Empty:
                self._sleep(0.0)
                continue
            size = 0
            if payload is not None:
                name = part_name(self.machine.incarnation, part.fragment, part.number)
                content = memory_of(payload)
                size = len(content)
                # After a power cut, the syncer may refuse it, and its work is sent again.
                create = partial(self.run.large.create, name, content, durable=False)
                with self.transfers.upload(part.fragment, size):
                    while not self._try(create):
                        self._sleep(AGAIN_SECONDS)
            with self._changed:
                now = time.monotonic()
                self.machine.on_stored(part, size, now, is_finite=payload is not None)
                self._notify()
            self._is_part_new.set()

    def _found(self) -> None:
        """Store the founding, and the copies once this island is the founder."""
        founding = self.machine.founds
        assert founding is not None
        if not self._is_founding_stored:
            name = founding_name(self.machine.incarnation)
            content = encode_founding(founding)
            try:
                self._is_founding_stored = self._try(lambda: self.run.store.create(name, content))
            except RefusedError:  # its login may join the run of others only
                with self._changed:
                    self.machine.founds = None
                    self.machine.may_found = False
                return
        if self.machine.is_founder and not self._are_copies_stored:
            self._are_copies_stored = self._try(
                lambda: store_copies(self.run, self.machine.incarnation, self._copies)
            )

    def _collect_garbage(self) -> None:
        with self._changed:
            if self.machine.fragments:
                self._garbage += self.machine.take_garbage()
        with suppress(AwayError, FullError):  # tried again; a full quota may refuse deletions
            while self._garbage:
                self.run.large.delete(self._garbage[0])
                del self._garbage[0]

    def _try(self, call: Callable[[], bool]) -> bool:
        """Return whether a call has succeeded. It is to be repeated otherwise."""
        try:
            assert call(), "another process writes the objects of this one"
        except AwayError as error:
            logger.warning(f"{error}; trying again")
            return False
        except FullError as error:
            self.run.say_full(error)
            return False
        return True

    @property
    def away_seconds(self) -> float:
        """Seconds since the store was last read."""
        return max(0.0, time.monotonic() - self.read_at)

    @property
    def stuck_seconds(self) -> float:
        """Seconds for which an upload has made no progress, although the store is there, or 0."""
        large = self.run.large
        stuck = self.transfers.stuck_seconds(large.stored_at, large.in_flight_bytes)
        return stuck if self.away_seconds < STILL_SECONDS else 0.0
