"""Errors of a store. Each is one line for users, which names the location and a remedy."""

from torchtitan_diloco.base.user import UserError


class StoreError(UserError):
    """The store cannot carry out a request."""


class AwayError(StoreError):
    """The store did not answer during the patience of a call. A later call may succeed."""


class FullError(StoreError):
    """The disk is full, or the quota of this login is used up."""


class RefusedError(StoreError):
    """Another attempt would also fail: the login, its permissions, the bucket, or a clock is
    wrong."""


class DamagedObjectError(StoreError):
    """The content of an object is not what was written."""


class ClosedError(StoreError):
    """The store was closed."""


class PassingError(Exception):
    """An attempt of a backend failed, and the next one may succeed. A Store repeats it."""
