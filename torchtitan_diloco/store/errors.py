"""Errors of a store. Each is one line for users, which names the location and a remedy."""

from torchtitan_diloco.base.user import UserError


class StoreError(UserError):
    """The store cannot carry out a request."""


class AwayError(StoreError):
    """The store did not answer during the patience of a call. A later call may succeed."""


class FullError(StoreError):
    """The disk is full, or the quota of this login is used up."""


class RefusedError(StoreError):
    """Another attempt would also fail: the login, its permissions or the bucket is wrong, or the
    clock of this machine has been from the start."""


class DamagedObjectError(StoreError):
    """The content of an object is not what was written."""


class ClosedError(StoreError):
    """The store was closed."""


class PassingError(Exception):
    """An attempt of a backend failed, and the next one may succeed. A Store repeats it."""

    def __init__(self, reason: str, remedy: str = "check that it can be reached from here") -> None:
        """Note a `remedy`: what to do if all attempts fail, or empty if the reason says it."""
        super().__init__(reason)
        self.remedy = remedy
