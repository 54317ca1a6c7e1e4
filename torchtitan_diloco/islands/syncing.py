"""The process that decides: it stands by, and then leads the run.

| thread | task |
|---|---|
| the one that calls `lead` | asks the rules what to do, each time something has happened |
| poll | reads the notes of the owners of slots |
| look | lists the notes of others, changes and foundings |
| commit | creates decisions; does nothing else, so nothing delays it |
| work, one per core | loads, merges and encodes, the jobs of a fragment in order |
| transfer | fetches and uploads, of each login and kind one at a time |
| delete | deletes what a decision has made superfluous |
| sweep | deletes garbage, once a minute |

All share the machine of the rules (islands/rules/syncer.py) under one lock, which is never held
during a call of the store or arithmetic. What belongs to one time of leading is in `Term`, and
results of an earlier one are dropped with it.
"""

import math
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.process import STOP_SIGNALS
from torchtitan_diloco.islands.config import check_may_decide
from torchtitan_diloco.islands.console import Say
from torchtitan_diloco.islands.heard import Heard
from torchtitan_diloco.islands.lanes import Lanes
from torchtitan_diloco.islands.rules.commit import (
    LOOKS_APART,
    CallFailedError,
    Outcome,
    StandBy,
    commit,
)
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.jobs import (
    Adopt,
    Commit,
    DeleteObjects,
    Fetch,
    Job,
    Load,
    MergeParts,
    Settle,
    Snapshot,
    Upload,
)
from torchtitan_diloco.islands.rules.names import (
    COPY,
    FOUND,
    ISLAND,
    OUTER,
    PART,
    RUN,
    VERSION,
    login_of,
)
from torchtitan_diloco.islands.rules.settings import RATES
from torchtitan_diloco.islands.rules.syncer import Syncer
from torchtitan_diloco.islands.runs import Run, explain_unreadable
from torchtitan_diloco.islands.scratch import (
    folder_of,
    lock_folder,
    lock_others,
    read_session,
    remove_files,
    write_session,
)
from torchtitan_diloco.islands.tasks import FragmentTasks, OverError, Result, TransferTasks
from torchtitan_diloco.islands.waiting import Waiting, awaited_by_syncer
from torchtitan_diloco.store import AwayError, FullError
from torchtitan_diloco.store.large import owner_of

TICK = 0.02
"""Minimum seconds between two ticks of the rules without an event."""
BUSY = 3.0
"""Minimum pause between them, as a multiple of the time of a tick."""
LISTING_SECONDS = 0.1
"""Minimum seconds between two lists of notes and changes."""
SWEEP_SECONDS = 60.0
SWEPT = (f"{VERSION}/", f"{COPY}/", f"{OUTER}/", PART, ISLAND, FOUND, RUN)
"""Prefixes of the names among which garbage is looked for."""
DAMAGE_SECONDS = 60.0
"""Seconds between two lines of a standby about a decision that stays damaged: nobody may lead."""
STOP_SECONDS = 15.0
"""Time after `stop` for publishing what is being merged. The store may be gone for good."""
IN_LOG = "the syncer"
"""Name of this process in lines about what it waits for."""
TRANSFERS = 8
"""Number of parts and objects that are fetched or uploaded at a time."""


class SyncerProcess:
    """A syncer. `run` returns when the run has ended, or after `stop`."""

    def __init__(
        self,
        run: Run,
        scratch: Path,
        *,
        threads: int = 1,
        stays: bool = False,
        say: Say = logger.info,
    ) -> None:
        """Read nothing before `run`.

        `scratch`: folder for this process alone, so a syncer that led with it has ended. `threads`:
        cores for arithmetic. `stays`: whether to go on after the end of the run, which a change of
        its length undoes.
        """
        self._run = run
        self._scratch = scratch
        self._threads = threads
        self._stays = stays
        self._say = say
        self._stopping = threading.Event()
        self._poll_seconds = RATES[run.store.kind].poll_seconds

    def stop(self) -> None:
        """Publish what is being merged, and end. Any thread may call this."""
        self._stopping.set()

    def run(self) -> bool:
        """Stand by and lead until the run has ended and all islands have read it, and return True,
        or return False after `stop`. Raise an error for users if that is impossible."""
        with ExitStack() as transfers:
            while not self._stopping.is_set():
                decision = self._stand_by()
                transfers.close()  # they read files that the next term writes
                if self._stopping.is_set():
                    break
                session = secrets.token_hex(8)
                write_session(self._scratch, session)
                term = Term(
                    self._run,
                    self._scratch,
                    decision,
                    session,
                    threads=self._threads,
                    stays=self._stays,
                    stopping=self._stopping,
                    say=self._say,
                )
                transfers.callback(term.close)
                if term.lead():
                    return not self._stopping.is_set()
                self._say("another syncer decides: standing by")
        return False

    def _stand_by(self) -> Decision | None:
        """Wait until no other syncer leads, and return the newest decision."""
        watch = StandBy(died=read_session(self._scratch))
        is_said = False
        damage = ""
        said_at = -math.inf
        while not self._stopping.is_set():
            try:
                if self._run.drive(watch.watch(time.monotonic())):
                    break
            except CallFailedError:
                pass  # the store says so
            except MalformedError as error:  # the next decision may be whole
                now = time.monotonic()
                if str(error) != damage:
                    damage = str(error)
                    said_at = now
                    self._say(f"{self._run.location}: {damage}; trying again")
                elif now - said_at >= DAMAGE_SECONDS:
                    said_at = now
                    self._say(explain_unreadable(self._run.location, error))
            if watch.newest is not None and not is_said:
                is_said = True
                self._say(f"standing by: run {watch.newest.run} may have another syncer")
            self._stopping.wait(max(0.1, watch.pause or LOOKS_APART * self._poll_seconds))
        return watch.newest


class Term:
    """A time in which this process leads. It ends when another syncer has decided."""

    def __init__(
        self,
        run: Run,
        scratch: Path,
        decision: Decision | None,
        session: str,
        *,
        threads: int,
        stays: bool,
        stopping: threading.Event,
        say: Say,
    ) -> None:
        self._run = run
        self._stays = stays
        self._stopping = stopping
        self._say = say
        self._session = session
        self.machine = Syncer(decision, self._session, time.monotonic(), time.time())
        self._lock = threading.Lock()
        self._happened = threading.Event()
        self._over = threading.Event()
        self._is_superseded = False
        self._stop_at: float | None = None
        self._error: BaseException | None = None
        self._commits = SimpleQueue[Commit | None]()
        self._work = Lanes("syncer-work", threads, self._fail)
        self._transfer = Lanes("syncer-transfer", TRANSFERS, self._fail)
        self._delete = Lanes("syncer-delete", 1, self._fail)  # also while uploads wait for room
        self._fragments = FragmentTasks(run, scratch, self._deliver, self._sleep)
        self._transfers = TransferTasks(
            run, self._fragments, self._deliver, self._sleep, self._supersede
        )
        self._heard = Heard(run, self._ask, self._deliver)
        self._waiting = Waiting(IN_LOG)
        self._waits_since = time.monotonic()

    # --- its life ---------------------------------------------------------------------------------

    def lead(self) -> bool:
        """Lead until the end. Return False if another syncer has decided meanwhile. Transfers may
        go on until `close`."""
        self._say(f"leads, in session {self._session}")
        threads = [
            threading.Thread(target=self._guard, args=(body,), name=f"syncer-{name}", daemon=True)
            for name, body in {
                "poll": self._poll,
                "look": self._look,
                "commit": self._commit,
                "sweep": self._sweep,
            }.items()
        ]
        for thread in threads:
            thread.start()
        try:
            while not self._over.is_set():
                self._tick()
        finally:
            self._over.set()
            self._commits.put(None)
            self._work.close()  # a later term reads the files that these tasks write
            self._transfer.stop()
            self._delete.stop()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        return not self._is_superseded

    def close(self) -> None:
        """Wait for the transfers that run when this term is over."""
        self._transfer.close()
        self._delete.close()

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End with the first error."""
        if not isinstance(error, OverError) and not self._over.is_set():
            self._error = error
            self._over.set()
            self._happened.set()

    def _supersede(self) -> None:
        self._is_superseded = True
        self._over.set()
        self._happened.set()

    def _sleep(self, seconds: float) -> None:
        """Sleep. Raise an OverError if this term is over."""
        if self._over.wait(seconds):
            raise OverError

    def _deliver(self, call: Callable[[Syncer], Result], /) -> Result:
        """Call a function with the machine, and return its result. Raise an OverError if this term
        is over."""
        with self._lock:
            if self._over.is_set():
                raise OverError
            result = call(self.machine)
        self._happened.set()
        return result

    def _ask(self, call: Callable[[Syncer], Result], /) -> Result:
        """Call a function that only reads the machine, and return its result."""
        with self._lock:
            return call(self.machine)

    # --- decide -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        began = time.monotonic()
        with self._lock:
            self.machine.is_stopping |= self._stopping.is_set() or self._is_done()
            jobs = self.machine.tick(began)
            needed = {
                (waiting_part.incarnation, waiting_part.part)
                for round_ in self.machine.rounds
                for waiting_part in (*round_.waiting.values(), *round_.merging)
            }
            news = self.machine.news.take()
            awaited = awaited_by_syncer(self.machine, self._run.location)
        if not awaited:
            self._waits_since = began
        self._waiting.say(self._waits_since, awaited)
        self._fragments.forget_parts(needed)
        for line in news:
            self._say(line)
        for job in jobs:
            self._begin(job)
        if self._stopping.is_set() and self._stop_at is None:
            self._stop_at = began + STOP_SECONDS
            self._say("is stopped: publishes what is merged, and ends")
        if self.machine.has_stopped:
            self._over.set()
            return
        if self._stop_at is not None and began > self._stop_at:
            self._say(
                f"ends without publishing what is being merged: {self._run.location} has "
                f"accepted no decision for {STOP_SECONDS:g} s. The next syncer merges it again"
            )
            self._over.set()
            self._run.close()  # transfers would go on trying
            return
        self._happened.wait(max(TICK, BUSY * (time.monotonic() - began)))
        self._happened.clear()

    def _is_done(self) -> bool:
        """Return whether the run has ended, and all islands have read it."""
        decision = self.machine.committed
        state = self.machine.state
        if self._stays or decision is None or state is None or not decision.ended:
            return False
        if not self._heard.has_read_changes or state.settings != decision.settings:
            return False  # it may be longer now
        return all(self.machine.presence.is_silent(owner) for owner in decision.owners())

    def _begin(self, job: Job) -> None:
        """Pass a job to the threads."""
        match job:
            case Commit():
                self._commits.put(job)
            case Load() | MergeParts() | Settle() | Snapshot():
                self._work.submit(job.fragment, partial(self._fragments.do, job))
            case Adopt():
                self._work.submit("found", partial(self._fragments.adopt, job))
            case Fetch():
                login = login_of(job.incarnation)
                self._transfer.submit((PART, login), partial(self._transfers.fetch, job))
            case Upload():
                lane = job.stored.kind, job.stored.fragment
                self._transfer.submit(lane, partial(self._transfers.upload, job))
            case DeleteObjects():
                self._delete.submit("delete", partial(self._transfers.do, job))
            case _:
                self._transfer.submit(type(job).__name__, partial(self._transfers.do, job))

    def _commit(self) -> None:
        while (job := self._commits.get()) is not None:
            outcome = self._run.drive(commit(job.number, job.content), self._sleep)
            if outcome is Outcome.SUPERSEDED:
                self._supersede()
                return
            self._deliver(Syncer.on_committed)

    # --- read -------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Read what those that train say. It must not take longer if others write thousands of
        notes, which takes seconds to list on some servers."""
        while True:
            with suppress(AwayError):  # the store says so
                self._heard.read_owners()
            self._sleep(self._poll_pause())

    def _look(self) -> None:
        """Look for new islands and changes, at most half of the time."""
        while True:
            began = time.monotonic()
            with suppress(AwayError):
                self._heard.look()
            self._sleep(max(LISTING_SECONDS, self._poll_pause(), time.monotonic() - began))

    def _poll_pause(self) -> float:
        """Return the seconds after which notes are read again."""

        def pause(machine: Syncer) -> float:
            if machine.state is None:
                return RATES[self._run.store.kind].poll_seconds
            return machine.state.settings.poll_seconds

        return self._ask(pause)

    # --- sweep ------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        while True:
            self._sleep(SWEEP_SECONDS)
            try:
                chunks = self._list_swept()
                with self._lock:
                    garbage = self.machine.garbage(sorted(chunks))
                for name in garbage:
                    self._delete_garbage(name, chunks[name])
                self._run.store.tidy()
            except AwayError:
                pass  # the store says so

    def _delete_garbage(self, name: str, chunks: Sequence[str]) -> None:
        try:
            self._run.large.delete(name, chunks)
        except FullError as error:  # some file systems need room for a deletion
            self._run.say_full(error)

    def _list_swept(self) -> dict[str, list[str]]:
        """Return the names of all objects among which garbage is looked for, with those of their
        chunks, including chunks of objects that no writer has completed."""
        chunks = dict[str, list[str]]()
        for prefix in SWEPT:
            for entry in self._run.store.list(prefix):
                of_object = chunks.setdefault(owner_of(entry.name), [])
                if owner_of(entry.name) != entry.name:
                    of_object.append(entry.name)
        return chunks


def sync(location: str, scratch: Path, *, threads: int, stays: bool, say: Say) -> int:
    """Run a syncer in this process until the run has ended, and return 0, or the number of the
    signal that has stopped it before."""
    check_may_decide(location)
    first = folder_of(scratch, location)
    folder = lock_folder(first)
    run = Run(Waiting(IN_LOG).open(location, writes=""))
    process = SyncerProcess(run, folder, threads=threads, stays=stays, say=say)
    stopped_by = 0

    def stop(number: int, _frame: object) -> None:
        """Stop in order, and at once for a second signal."""
        nonlocal stopped_by
        stopped_by = number
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        process.stop()

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    try:
        if not process.run():
            return stopped_by
        _finish(run, [folder, *lock_others(first)], say)
        return 0
    finally:
        run.close()


def _finish(run: Run, folders: Sequence[Path], say: Say) -> None:
    """Say that the run has ended, and delete its files unless they are newer than the objects.

    `folders`: of this syncer, and of those that have died.
    """
    say(f"the run in {run.location} has ended, and all islands have read it")
    try:
        decision = run.newest()
    except (AwayError, CallFailedError, MalformedError):
        return  # kept for a syncer that goes on with the run
    if decision is not None and all(
        shared.outer is not None and shared.outer.version == shared.version
        for shared in decision.fragments
    ):
        for folder in folders:
            try:
                remove_files(folder)
            except OSError as error:
                say(f"{folder}: {error.strerror}: nobody needs it any more, delete it")
