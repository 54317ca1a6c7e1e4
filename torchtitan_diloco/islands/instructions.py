"""What an island does between two steps: decided on its first rank, and carried out by all."""

import time
from typing import TypeVar

import msgspec
import torch.distributed as dist

from torchtitan_diloco.base.messages import TransferError, broadcast_object
from torchtitan_diloco.base.user import FENCED, PeersLostError, UserError, cause_of
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.islands.rules.decision import ENDS, ORDERS
from torchtitan_diloco.islands.rules.fragment import Boundary
from torchtitan_diloco.islands.rules.island import REJOIN, Island
from torchtitan_diloco.islands.rules.settings import Settings

Value = TypeVar("Value")


class IslandFencedError(UserError):
    """Another island, or another process of this one, has taken its slot."""

    exit_code = FENCED


class Instructions(msgspec.Struct, array_like=True):
    """What is due at a boundary, and what the island knows of the run then.

    Ranks know nothing else of the run, so that all of them do the same after the same step.
    """

    due: Boundary
    settings: Settings | None = None
    """Settings of the run, once it is founded."""
    participants: int = 0
    """Number of islands that are ready."""
    has_begun: bool = False
    """Whether this island has a slot and all copies, and the run has begun."""
    is_leaving: bool = False
    entered: list[int] = []
    """Positions at which the stream of this island has entered phases of the data."""
    ending: str = ""
    """Why this incarnation of the island is over, or empty while it is not."""
    away_seconds: float = 0.0
    """Seconds since the store was last read."""
    undecided_seconds: float = 0.0
    """Seconds since the latest decision was read. A syncer decides each second."""

    @classmethod
    def of(cls, machine: Island, due: Boundary, away_seconds: float) -> "Instructions":
        decision = machine.decision
        has_settings = decision is not None and bool(decision.fragments)
        return cls(
            due,
            settings=machine.settings if has_settings else None,
            participants=0 if decision is None else len(decision.ready),
            has_begun=machine.is_training,
            is_leaving=machine.is_leaving,
            entered=list(machine.entered),
            ending=machine.ending,
            away_seconds=away_seconds,
            undecided_seconds=max(0.0, time.monotonic() - machine.heard_at),
        )

    @property
    def may_train(self) -> bool:
        return self.due.is_training and self.due.waits_until is None

    def raise_if_over(self, name: str) -> None:
        """Raise an error if another process has the place of this island."""
        if self.ending in ENDS:
            raise IslandFencedError(f"island {name} ends: {ORDERS[self.ending]}")
        if self.ending == REJOIN:
            raise PeersLostError(
                f"island {name} was silent for long, or nothing of it was merged for long, and "
                "another one has its slot: start it again, from its latest checkpoint, to get the "
                "newest shared copy and a slot"
            )


def share(value: Value | None, kind: type[Value], group: dist.ProcessGroup | None) -> Value:
    """Return the value of the first rank on all ranks: on the first one, the object itself.

    Raise a WorkerLostError if a rank is lost.
    """
    if group is None:
        assert value is not None
        return value
    try:
        copy = broadcast_object(value, kind, group)
    except TransferError as error:
        raise rank_lost(error) from error
    return copy if value is None else value


def rank_lost(error: TransferError) -> WorkerLostError:
    """Return the error of an island that has lost one of its ranks."""
    return WorkerLostError([0], f"one of its ranks: {cause_of(error)}")
