"""Ranks that should hold the same facts: compared at start instead of trusted."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_diloco.distributed.world import World


@cache
def code_fingerprint() -> str:
    """Identifies the source of this package: two nodes with different checkouts must not train together."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def assert_agreement(world: World, facts: Mapping[str, str]) -> None:
    """Raises on every rank if some rank's facts differ from rank 0's, and says which rank and how."""
    if world.control is None:
        return
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, dict(facts), group=world.control)
    differences = find_differences(gathered, "rank")
    if differences:
        raise ValueError(
            "processes were started differently; give all of them the same:\n  "
            + "\n  ".join(differences)
        )


def find_differences(gathered: Sequence[Mapping[str, str]], member: str) -> list[str]:
    """What differs from the first member's facts, in words, the first eight of it."""
    differences = [
        f"{key}: {_shorten(gathered[0].get(key))} on {member} 0, {_shorten(theirs.get(key))} on {member} {number}"
        for number, theirs in enumerate(gathered)
        for key in sorted({*gathered[0], *theirs})
        if theirs.get(key) != gathered[0].get(key)
    ]
    more = [f"and {len(differences) - 8} more"] if len(differences) > 8 else []
    return differences[:8] + more


def broadcast_text(world: World, text: str) -> str:
    """Rank 0's text on every rank."""
    if world.control is None:
        return text
    box = [text]
    dist.broadcast_object_list(box, src=0, group=world.control)
    return box[0]


def gather_texts(world: World, text: str) -> list[str]:
    """Every rank's, on every rank."""
    found = [text]
    if world.control is not None:
        found = found * world.size
        dist.all_gather_object(found, text, group=world.control)
    return found


def _shorten(value: str | None) -> str:
    return "nothing" if value is None else value if len(value) <= 60 else value[:57] + "..."
