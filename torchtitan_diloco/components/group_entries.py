"""Entries of the groups of an optimizer that it changes itself, such as a count of its steps."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError

Plain = bool | int | float | str | None
PLAIN = (bool, int, float, str, type(None))
"""Types that JSON holds as they are."""
SET = ("params", "lr", "initial_lr")
"""Entries that others set: the parameters, and what the schedule of the learning rate changes."""
Entries = dict[str, Any]


@dataclass
class SavedEntries:
    """The entries that an optimizer had changed. Those that it had not follow the settings."""

    optimizer: str
    """Name of its class."""
    groups: list[dict[str, Plain]] = field(default_factory=list)
    """Changed entries of each group."""


class GroupEntries:
    """The state that an optimizer keeps in its groups, beside the tensors of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the entries of groups. `optimizer`: as it was built, before its first step."""
        self._optimizer = optimizer
        self._built = copy_entries(optimizer)

    def check(self) -> None:
        """Raise unless a checkpoint can hold what the optimizer has changed."""
        for entries in self._changed():
            for name, value in entries.items():
                if type(value) not in PLAIN:
                    raise UserError(
                        f"optimizer.name: {type(self._optimizer).__name__} changes {name} of its "
                        f"groups, which is of {type(value).__name__} and cannot be saved: keep it "
                        "as a tensor in state[parameter], or as a number"
                    )

    def _changed(self) -> list[Entries]:
        groups = zip(self._optimizer.param_groups, self._built, strict=True)
        return [changed_entries(group, built) for group, built in groups]

    def saved_state(self) -> SavedEntries:
        """Return the entries that have changed."""
        self.check()
        return SavedEntries(type(self._optimizer).__name__, self._changed())

    def load_state(self, saved: SavedEntries) -> None:
        """Take over the entries that had changed, if they are of such an optimizer."""
        groups = self._optimizer.param_groups
        if saved.optimizer != type(self._optimizer).__name__:
            return
        if len(saved.groups) != len(groups):
            logger.warning(
                f"{saved.optimizer} had {counted(len(saved.groups), 'group')} and has "
                f"{len(groups)}: what it had counted in them begins anew"
            )
            return
        for group, entries in zip(groups, saved.groups, strict=True):
            group.update(entries)


def copy_entries(optimizer: torch.optim.Optimizer) -> list[Entries]:
    """Return the entries of each group but those that others set, with copies of what an optimizer
    could change in place."""
    return [
        {name: _copy(value) for name, value in group.items() if name not in SET}
        for group in optimizer.param_groups
    ]


def changed_entries(group: Mapping[str, Any], before: Mapping[str, Any]) -> Entries:
    """Return the entries of a group that `copy_entries` has not returned, or with another value."""
    return {
        name: value
        for name, value in group.items()
        if name not in SET and not (name in before and _is_same(value, before[name]))
    }


def restore_entries(optimizer: torch.optim.Optimizer, before: list[Entries]) -> None:
    """Set the entries of each group to those that `copy_entries` has returned."""
    for group, entries in zip(optimizer.param_groups, before, strict=True):
        for name in changed_entries(group, entries):
            del group[name]
        for name, value in entries.items():
            group.setdefault(name, _copy(value))


def _copy(value: Any) -> Any:
    """Copy a tensor or a container. The copy of another object may not be equal to it."""
    return copy.deepcopy(value) if isinstance(value, Tensor | list | dict | set | tuple) else value


def _is_same(value: Any, before: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        return torch.equal(value, before)
    is_equal = type(value) is type(before) and value == before
    # The values of an array are compared one by one.
    return value is before or (isinstance(is_equal, bool) and is_equal)
