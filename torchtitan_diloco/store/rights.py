"""Write permissions of a login: its own parts and notes, and for an owner also the changes and the
first decision of the run. All logins may read everything."""

import re

LOGIN = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}"
_NOTE = re.compile(rf"island/(?P<login>{LOGIN})-[A-Za-z0-9]+")
OWNERS = ("change/", "found/")


def may_create(name: str, login: str, *, owner: bool) -> bool:
    """Return whether a login may create and delete an object."""
    if name.startswith(parts_of(login)) or may_replace(name, login):
        return True
    return owner and name.startswith(OWNERS)


def may_replace(name: str, login: str) -> bool:
    """Return whether a login may replace an object, which is only allowed for notes.

    A note is named after the whole login: what follows the last "-" is of one start of an island.
    """
    note = _NOTE.fullmatch(name)
    return note is not None and note["login"] == login


def parts_of(login: str) -> str:
    return f"part/{login}/"


def prefixes_of(login: str) -> list[str]:
    """Return the prefixes of all objects of a login that is not an owner."""
    return [parts_of(login), f"island/{login}-"]
