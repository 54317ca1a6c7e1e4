"""What a store cannot do. Each error is one line for users, which names the place and a remedy."""

from torchtitan_diloco.log import UserError


class StoreError(UserError):
    """The store cannot do what it was asked to."""


class AwayError(StoreError):
    """The store did not answer during the patience of a call. A later call may succeed."""


class FullError(StoreError):
    """The disk is full, or the quota of this login is used up."""


class RefusedError(StoreError):
    """Another attempt would fail as well: the login, its rights, the bucket, a clock."""


class DamagedError(StoreError):
    """An object is not the one that was written."""


class ClosedError(StoreError):
    """The store was closed."""


class PassingError(Exception):
    """An attempt of a backend failed, and the next one may succeed. Only `attempts.py` sees it."""
