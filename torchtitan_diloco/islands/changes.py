"""Requests of a person to a run: change a setting, or let an island leave.

Each is an object `change/TIME-NONCE`, which takes effect once a decision names it.
"""

import copy
import secrets
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_diloco.base.user import UserError, command_line
from torchtitan_diloco.islands.config import site_of
from torchtitan_diloco.islands.console import say
from torchtitan_diloco.islands.reader import COMMAND_PATIENCE, check_location_of_run
from torchtitan_diloco.islands.rules import changes as rules
from torchtitan_diloco.islands.rules.changes import Admit, Change, Evict, Leave
from torchtitan_diloco.islands.rules.commit import CallFailedError
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.names import CHANGE, ISLAND, incarnation_of, name_of
from torchtitan_diloco.islands.run_settings import change_of, reason_of, setting_of
from torchtitan_diloco.islands.runs import Decisions, Run, explain_unreadable
from torchtitan_diloco.store import RefusedError, open_store

SHORT = {"slots": "islands.slots"}
ADMIT = "admit"
"""In place of a key: admit an island that was evicted."""
ONLY_OWNER = (
    "only the owner of the run may change it, or ask islands to leave; use the owner's join file, "
    "or stop an island with Ctrl-C or SIGTERM where it runs: it sends its work and leaves"
)
CHANGE_SECONDS = 30.0
"""Seconds within which a syncer that runs has decided on a change."""
LEAVING_SECONDS = 60.0
"""Seconds within which an island that is asked to leave has given up its slot."""
LOOK_SECONDS = 0.1
"""Seconds between two looks for that."""


def change(location: str, key: str, value: str) -> None:
    """Change a setting of a run, and wait until a decision has it."""
    if key == ADMIT:
        admit(location, value)
        return
    known = SHORT.get(key, key)
    name = setting_of(known)
    with _open(location) as requests:
        decision = requests.decision
        before = getattr(decision.settings, name)
        wanted = change_of(decision.settings, known, value)
        try:
            after = requests.make(wanted).settings
        except MalformedError as error:
            raise UserError(f"{key} = {value}: {reason_of(error, wanted)}") from None
        say(f"the run continues with {known} = {getattr(after, name)} (before: {before})")
        if decision.ended:
            say("start its islands again, and its syncer, if that has ended with the run")


def admit(location: str, name: str) -> None:
    """Let an island that was evicted take a slot again."""
    with _open(location) as requests:
        barred = requests.decision.barred
        if name not in barred:
            raise UserError(
                f"{ADMIT} {name}: this island is not evicted; evicted are: "
                f"{', '.join(barred) or 'none'}"
            )
        requests.make(Admit(name))
        say(f"island {name} may take a slot again")


def leave(location: str, name: str) -> None:
    """Ask an island to leave, and wait until its slot is free."""
    with _open(location) as requests:
        if requests.decision.ended:
            raise UserError(f"island {name} cannot leave: run {requests.decision.run} has ended")
        asked = requests.owners(name)
        if not asked:
            raise requests.no_island(name, requests.owners())
        requests.make(Leave(name))
        say(f"asked {name} to leave: waiting until its parts are merged, and its slot is free")
        if not requests.wait_until_free(asked, LEAVING_SECONDS):
            raise UserError(
                f"{name} has not left within {LEAVING_SECONDS:g} s: if it is dead, another island "
                f"can take its slot, and `islands evict {name}` frees it now; otherwise, it may "
                "still be sending its work"
            )
    say(f"{name} has left")


def evict(location: str, name: str) -> None:
    """Take the slot of an island, and refuse its name until it is admitted."""
    with _open(location) as requests:
        known = requests.known_names()
        if name not in known:
            raise requests.no_island(name, known)
        owned = requests.owners(name)
        requests.make(Evict(name))
        is_free = requests.wait_until_free(owned, CHANGE_SECONDS)
    slot = "its slot is free" if is_free else "its slot is freed once its last part is decided"
    say(f"evicted {name}: {slot}; `islands change {ADMIT} {name}` lets it come back")


class Requests:
    """Makes changes of a run, and waits for them."""

    def __init__(self, run: Run, location: str) -> None:
        self._run = run
        self._location = location
        self._decisions = Decisions(run)
        self._moved_at = time.monotonic()
        """Time at which a decision was last new."""
        try:
            newest = self._decisions.next()
        except MalformedError as error:
            raise UserError(explain_unreadable(run.location, error)) from None
        if newest is None:
            check_location_of_run(run.store)
        if newest is None or not newest.is_founded:
            if site := site_of(location):
                raise UserError(f"{location}: the login of {site} may not do this: {ONLY_OWNER}")
            raise UserError(
                f"{run.location}: the run has not started: set this on the islands instead"
            )
        self.decision = newest

    def owners(self, name: str = "") -> set[str]:
        """Return the incarnations with a slot: all, or those of an island."""
        owners = self.decision.owners()
        return {incarnation for incarnation in owners if name in ("", name_of(incarnation))}

    def known_names(self) -> set[str]:
        """Return the names of islands with a slot, or a note."""
        entries = self._run.brief.list(ISLAND)
        written = {incarnation_of(entry.name) or "" for entry in entries}
        return set(map(name_of, self.owners() | written)) - {""}

    def no_island(self, name: str, known: set[str]) -> UserError:
        names = ", ".join(sorted(map(name_of, known))) or "none"
        return UserError(f"the run has no island {name!r}; it has: {names}")

    def make(self, wanted: Change) -> Decision:
        """Store a change, wait until a decision names it, and return that.

        Raise a MalformedError if it is not possible, and a UserError if this login may not make it,
        or there is no syncer.
        """
        object_name = f"{CHANGE}{time.time():.0f}-{secrets.token_hex(4)}"
        raw = rules.encode_change(wanted)
        rules.make(copy.deepcopy(self.decision), raw)
        try:
            self._run.brief.create(object_name, raw)
        except RefusedError as error:
            raise UserError(f"{error}: {ONLY_OWNER}") from None
        end = time.monotonic() + CHANGE_SECONDS
        while object_name not in self.decision.done:
            if time.monotonic() > end:
                raise self._late()
            self.look()
        if reason := self.decision.done[object_name]:
            raise MalformedError(reason)
        return self.decision

    def _late(self) -> UserError:
        """Return the error about a change that no decision has."""
        still = time.monotonic() - self._moved_at
        if still < CHANGE_SECONDS / 2:
            return UserError(
                f"no decision has the change after {CHANGE_SECONDS:g} s, although a syncer decides;"
                " it may be busy with others: look at `islands status`"
            )
        command = f"{command_line('islands')} sync {shlex.quote(self._location)}"
        return UserError(
            f"no syncer has decided within {CHANGE_SECONDS:g} s: start `{command}`. The change is "
            "stored, and is made then"
        )

    def wait_until_free(self, incarnations: set[str], seconds: float) -> bool:
        """Wait until these have no slot, and return whether that is so."""
        end = time.monotonic() + seconds
        while incarnations & self.owners() and not self.decision.ended:
            if time.monotonic() > end:
                return False
            self.look()
        return True

    def look(self) -> None:
        """Read the newest decision."""
        time.sleep(LOOK_SECONDS)
        try:
            decision = self._decisions.next()
        except (CallFailedError, MalformedError):
            return  # tried again until the time is over
        if decision is not None:
            self.decision = decision
            self._moved_at = time.monotonic()


@contextmanager
def _open(location: str) -> Iterator[Requests]:
    """Yield the requests to a run. The owner's login is not needed to read it."""
    run = Run(
        open_store(location, writes=None, patience=COMMAND_PATIENCE, quiet=True),
        patience=COMMAND_PATIENCE,
    )
    try:
        yield Requests(run, location)
    except MalformedError as error:
        raise UserError(str(error)) from None
    finally:
        run.close()
