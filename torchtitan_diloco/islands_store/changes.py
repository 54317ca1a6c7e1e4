"""Changes that a person may make during a run."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from torchtitan_diloco.islands_store.decision import (
    BARRED,
    LEAVE,
    DamagedError,
    Decision,
    Name,
    Settings,
)
from torchtitan_diloco.islands_store.names import LOGIN_PATTERN, login_of

MOST_CHANGE = 4096
"""Maximum number of bytes of a change."""
Login = Annotated[str, Meta(pattern=rf"^{LOGIN_PATTERN}\Z")]


class _Change(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    pass


class Set(_Change, frozen=True):
    """Change a setting of the run."""

    key: Name
    value: Name


class Leave(_Change, frozen=True):
    """Ask an island to send its work and leave."""

    login: Login


class Evict(_Change, frozen=True):
    """Take the slot of an island, and refuse its login until it is admitted."""

    login: Login


class Admit(_Change, frozen=True):
    login: Login


Change: TypeAlias = Set | Leave | Evict | Admit
_CHANGEABLE = {
    "sync_every",
    "delay",
    "mixing",
    "outer_lr",
    "codec",
    "total_tokens",
    "slots",
    "grace",
    "slot_seconds",
    "fastest",
}


def decode_change(raw: bytes) -> Change:
    if len(raw) > MOST_CHANGE:
        raise DamagedError(f"a change has {len(raw)} bytes, which is more than {MOST_CHANGE}")
    try:
        return msgspec.json.decode(raw, type=Set | Leave | Evict | Admit)
    except msgspec.DecodeError as error:
        raise DamagedError(f"a change is malformed: {error}") from error


def changed(settings: Settings, change: Set) -> Settings:
    """Return the settings after a change. Raise a DamagedError if it is not possible."""
    if change.key not in _CHANGEABLE:
        raise DamagedError(f"{change.key} cannot be changed during a run")
    fields = msgspec.to_builtins(settings) | {change.key: change.value}
    try:
        after = msgspec.convert(fields, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise DamagedError(f"{change.key} = {change.value}: {error}") from error
    if after.delay >= after.sync_every:
        raise DamagedError(f"delay {after.delay} must be smaller than {after.sync_every}")
    if after.slots < settings.slots:
        raise DamagedError(
            f"the run has {settings.slots} slots, which cannot be removed: give a larger number"
        )
    return after


def make(state: Decision, raw: bytes) -> None:
    """Apply the change that a person requests. Raise a DamagedError if it is not possible."""
    change = decode_change(raw)
    match change:
        case Set():
            state.settings = changed(state.settings, change)
        case Leave():
            state.told |= dict.fromkeys(_owners(state, change.login), LEAVE)
        case Evict():
            state.told |= dict.fromkeys(_owners(state, change.login), BARRED)
            state.barred = sorted({*state.barred, change.login})
        case Admit():
            state.barred = [login for login in state.barred if login != change.login]


def _owners(state: Decision, login: str) -> list[str]:
    return [owner for owner in state.owners() if login_of(owner) == login]
