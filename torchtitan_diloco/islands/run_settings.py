"""Settings of a run by their names for users, which are those of a configuration."""

import re
from dataclasses import replace
from typing import Any

from torchtitan_diloco.base.settings import nearest
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.islands.rules import changes
from torchtitan_diloco.islands.rules.changes import CHANGEABLE, Set
from torchtitan_diloco.islands.rules.settings import Settings

KEYS = {
    "diloco.sync_every": "sync_every",
    "diloco.overlap.delay": "delay",
    "diloco.overlap.mixing": "mixing",
    "diloco.overlap.mixing_end": "mixing_end",
    "diloco.outer_optimizer.lr": "outer_lr",
    "diloco.quantization.codec": "codec",
    "diloco.delta_norm_limit": "norm_limit",
    "total_tokens": "total_tokens",
    "islands.slots": "slots",
    "islands.grace_seconds": "grace",
    "islands.slot_seconds": "slot_seconds",
    "fastest": "fastest",
    "copies_every": "copies_every",
    "commit_seconds": "commit_seconds",
    "poll_seconds": "poll_seconds",
}
"""Names in the rules of the settings that can change during a run, by their names for users, which
are keys of a configuration where there is one."""
assert set(KEYS.values()) == CHANGEABLE


def setting_of(key: str) -> str:
    """Return the name in the rules of a setting, or raise a UserError if it cannot change."""
    if key not in KEYS:
        raise UserError(
            f"{key} cannot be changed during a run{nearest(key, KEYS)}; "
            f"these can: {', '.join(KEYS)}"
        )
    return KEYS[key]


def change_of(settings: Settings, key: str, value: str) -> Set:
    """Return the change of a setting of a run, or raise a UserError if it is not possible.

    The syncer decides: the run may have other settings by then.
    """
    change = Set(setting_of(key), "null" if value.lower() == "none" else value)
    try:
        changes.changed(settings, change)
    except ValueError as error:
        raise UserError(f"{key} = {value}: {reason_of(error, change)}") from error
    return change


def reason_of(error: ValueError, change: Set) -> str:
    """Return why a change of a setting is not possible, without the setting and its value."""
    reason = re.sub(rf"^{change.key} (= {re.escape(change.value)}|\d+): ", "", str(error))
    expected = _EXPECTED.match(reason)
    if expected is None:
        return reason
    return (
        f"give {_KINDS[expected['kind']]}{' or none' * bool(expected['null'])}{expected['bound']}"
    )


_EXPECTED = re.compile(
    r"Expected `(?P<kind>int|float)(?P<null> \| null)?`(?P<bound>( [<>]=? [0-9.e+-]+)?)"
)
"""What msgspec says of a value of another type, or out of bounds."""
_KINDS = {"int": "a whole number", "float": "a number"}


def of_diloco(config: DiLoCoConfig) -> dict[str, Any]:
    """Return those of these settings that an outer loop has, by their names in the rules."""
    return {name: _read(config, path) for path, name in _IN_DILOCO.items()}


def in_diloco(config: DiLoCoConfig, settings: Settings) -> DiLoCoConfig:
    """Return the settings of an outer loop with those of a run."""
    for path, name in _IN_DILOCO.items():
        config = _replaced(config, path, getattr(settings, name))
    return config


def overridden_by_run(config: DiLoCoConfig, total_tokens: int, settings: Settings) -> list[str]:
    """Describe where the settings with which an island was started differ from those of its run,
    which all islands use."""
    started_with = {**of_diloco(config), "total_tokens": total_tokens}
    return [
        f"the run has {key} = {getattr(settings, name)}, which this island uses instead of "
        f"{started_with[name]}: `islands change` changes it"
        for key, name in KEYS.items()
        if name in started_with and started_with[name] != getattr(settings, name)
    ]


_IN_DILOCO = {
    tuple(key.split(".")[1:]): name for key, name in KEYS.items() if key.startswith("diloco.")
}


def _read(section: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        section = getattr(section, name)
    return section


def _replaced(section: Any, path: tuple[str, ...], value: Any) -> Any:
    name, *inner = path
    if inner:
        value = _replaced(getattr(section, name), tuple(inner), value)
    return replace(section, **{name: value})
