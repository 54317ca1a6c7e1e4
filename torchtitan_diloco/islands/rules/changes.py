"""Changes that a person may make during a run."""

import math
from collections.abc import Iterable
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from torchtitan_diloco.base.untrusted import decode_json
from torchtitan_diloco.diloco.formats import island_formats
from torchtitan_diloco.islands.rules.decision import BARRED, LEAVE, Decision
from torchtitan_diloco.islands.rules.fields import MalformedError, Name
from torchtitan_diloco.islands.rules.names import NAME_PATTERN, name_of
from torchtitan_diloco.islands.rules.settings import Settings

MOST_CHANGE = 4096
"""Maximum number of bytes of a change."""
MOST_DONE = 64
"""Maximum number of changes in a decision. More of them wait."""
SETTLED_SECONDS = 10.0
"""Time listened after which a change that is no longer listed is forgotten. Lists may be late."""
IslandName = Annotated[str, Meta(pattern=rf"^{NAME_PATTERN}\Z")]


class _Change(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    pass


class Set(_Change, frozen=True):
    """Change a setting of the run."""

    key: Name
    value: Name


class Leave(_Change, frozen=True):
    """Ask an island to send its work and leave."""

    name: IslandName


class Evict(_Change, frozen=True):
    """Take the slot of an island, and refuse its name until it is admitted."""

    name: IslandName


class Admit(_Change, frozen=True):
    name: IslandName


Change: TypeAlias = Set | Leave | Evict | Admit
CHANGEABLE = {
    "sync_every",
    "delay",
    "mixing",
    "mixing_end",
    "outer_lr",
    "codec",
    "total_tokens",
    "slots",
    "grace",
    "slot_seconds",
    "fastest",
    "norm_limit",
    "copies_every",
    "commit_seconds",
    "poll_seconds",
}


def encode_change(change: Change) -> bytes:
    return msgspec.json.encode(change)


def decode_change(raw: bytes) -> Change:
    if len(raw) > MOST_CHANGE:
        raise MalformedError(f"a change has {len(raw)} bytes, which is more than {MOST_CHANGE}")
    try:
        change: Change = decode_json(raw, Change)
    except ValueError as error:
        raise MalformedError(f"a change is malformed: {error}") from error
    return change


def changed(settings: Settings, change: Set) -> Settings:
    """Return the settings after a change. Raise a MalformedError if it is not possible."""
    if change.key not in CHANGEABLE:
        raise MalformedError(f"{change.key} cannot be changed during a run")
    if change.key == "codec" and change.value not in island_formats():
        raise MalformedError(f"codec = {change.value}: give one of {', '.join(island_formats())}")
    fields = msgspec.to_builtins(settings) | {change.key: _number(change.value)}
    try:
        after = msgspec.convert(fields, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise MalformedError(f"{change.key} = {change.value}: {error}") from error
    if after.delay >= after.sync_every:
        raise MalformedError(f"delay {after.delay} must be smaller than {after.sync_every}")
    if after.slots < settings.slots:
        raise MalformedError(
            f"the run has {settings.slots} slots, which cannot be removed: give a larger number"
        )
    return after


def keep_begun_phases(state: Decision, after: Settings) -> Settings:
    """Return settings with which the phases that have begun start at the same tokens as before.

    Otherwise, a longer run would have fewer phases: nobody could say where its stream has entered
    the others, and parts that end after that are not judged.
    """
    before = state.settings
    begun = state.phases
    scale = before.total_tokens / after.total_tokens
    # Rounded down, so that no phase begins again.
    same = [max(0.0, math.nextafter(share * scale, -1.0)) for share in before.phases[:begun]]
    return msgspec.structs.replace(after, phases=(*same, *before.phases[begun:]))


def _number(value: str) -> Any:
    """Return whole numbers as such, also if they are written as 1e9."""
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() else value


def make(state: Decision, raw: bytes) -> Change:
    """Apply the change that a person requests, and return it. Raise a MalformedError if it is not
    possible."""
    change = decode_change(raw)
    match change:
        case Set():
            after = changed(state.settings, change)
            merged = max(shared.clock for shared in state.fragments)
            if after.total_tokens < min(merged, state.settings.total_tokens):
                raise MalformedError(
                    f"total_tokens {after.total_tokens}: the run has merged {merged}, give at "
                    "least that"
                )
            if after.total_tokens != state.settings.total_tokens:
                after = keep_begun_phases(state, after)
            if after.sync_every != state.settings.sync_every:
                for shared in state.fragments:
                    shared.norms = []  # parts have another usual norm from now on
            state.settings = after
        case Leave():
            state.told |= dict.fromkeys(_owners(state, change.name), LEAVE)
        case Evict():
            state.told |= dict.fromkeys(_owners(state, change.name), BARRED)
            state.barred = sorted({*state.barred, change.name})
        case Admit():
            state.barred = [name for name in state.barred if name != change.name]
    return change


class Changes:
    """Makes each change once, however often it is listed, also if its syncer is killed in between.

    A change is deleted once a decision that names it as done counts, and that name is kept until
    the change is no longer listed.
    """

    def __init__(self) -> None:
        self._listed = dict[str, float]()  # time at which those that are done were last listed

    def choose(self, state: Decision, names: Iterable[str], listened: float) -> list[str]:
        """Return which of all listed changes to make now."""
        new = list[str]()
        for name in names:
            if name in state.done:
                self._listed[name] = listened
            elif len(state.done) + len(new) < MOST_DONE:
                new.append(name)
        for name in list(state.done):
            if listened - self._listed.setdefault(name, listened) > SETTLED_SECONDS:
                del state.done[name], self._listed[name]
        return new

    def make(self, state: Decision, name: str, raw: bytes) -> Change | str | None:
        """Make a change. Return why it is refused, or None if it is done or has to wait."""
        if name in state.done or len(state.done) >= MOST_DONE:
            return None
        try:
            change = make(state, raw)
        except MalformedError as error:
            state.done[name] = str(error)[:200]
            return state.done[name]
        state.done[name] = ""
        return change


def describe(change: Change) -> str:
    """Describe a change in a few words."""
    match change:
        case Set():
            return f"{change.key} = {change.value}"
        case _:
            return f"{type(change).__name__.lower()} {change.name}"


def _owners(state: Decision, name: str) -> list[str]:
    return [owner for owner in state.owners() if name_of(owner) == name]
