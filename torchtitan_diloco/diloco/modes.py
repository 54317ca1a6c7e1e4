"""How a shared copy changes the parameters of a worker."""

from enum import Enum

from torchtitan_diloco.diloco.flags import DROPPED, WENT_WRONG


class Mode(Enum):
    """Effect of a shared copy P on the local parameters theta."""

    MIX = "mix"
    """theta = share theta + (1 - share) P: the copy contains this worker's delta."""
    ADD = "add"
    """theta += P - P before: it does not."""
    TAKE = "take"
    """theta = P."""
    TAKE_BACK = "take back"
    """theta += P - P before + sent delta, where P has changed: the copy replaces what this worker
    has sent, and the rest stays."""
    RESET = "reset"
    """theta = P, and the inner optimizer state is dropped, because theta was unusable."""


def mode_after(
    flags: int, *, participants: int, mixing: float, is_sparse: bool
) -> tuple[Mode, float]:
    """Return how a worker applies the copy after an exchange, and its share for `MIX`.

    Args:
        flags: of its delta.
        participants: number of workers whose deltas are in the mean.
        mixing: usual share.
        is_sparse: whether the worker has sent only a part of its delta.
    """
    if flags & WENT_WRONG:
        return Mode.RESET, 0.0
    # The copy contains nothing of a worker that was dropped, and nothing new without participants.
    share = 1.0 if flags & DROPPED or not participants else mixing
    return Mode.TAKE_BACK if is_sparse and share < 1 else Mode.MIX, share
