"""Ranks that should hold the same facts: compared at start instead of trusted."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.utils import find_differences


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
