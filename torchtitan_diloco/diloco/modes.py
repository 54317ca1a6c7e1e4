"""How a shared copy changes the parameters of a worker."""

from enum import Enum


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
