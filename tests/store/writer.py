"""A writer in a process of its own: `python -m tests.store.writer LOCATION VERB ...`.

It says "ready", and begins with a line from its parent.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from torchtitan_diloco.base.hardware import end_with_parent
from torchtitan_diloco.store import LargeObjects, Store, open_store


def race(store: Store, prefix: str, own: str, count: str) -> list[bool]:
    """Create objects that another process creates at the same time."""
    return [store.create(f"{prefix}{number}", own.encode()) for number in range(int(count))]


def upload(store: Store, name: str, megabytes: str) -> bool:
    """Store a large object, whose bytes another process can compute."""
    with LargeObjects(store, 4) as large:
        return large.create(name, payload(int(megabytes)))


def payload(megabytes: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") * 2**18 for number in range(megabytes))


VERBS: dict[str, Callable[..., Any]] = {"race": race, "upload": upload}


def main() -> None:
    end_with_parent()
    location, verb, *words = sys.argv[1:]
    store = open_store(location)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(VERBS[verb](store, *words)), flush=True)


if __name__ == "__main__":
    main()
