"""A store: objects under names, in a folder, behind an https server, or in a bucket.

`open_store(location)` takes the path of a folder, a join file or `https://` for a folder that
`server.py` gives, `s3://BUCKET/PATH`, `gs://BUCKET/PATH` or `az://CONTAINER/PATH`. All of
them keep the same promises, and any thread may call a store. Calls wait.

Names
    `a/b-1/c.txt`: see names.py. A name that has others below it, such as `a/b-1`, has no object.

Verbs
    create(name, content)   Store an object that does not exist. Return True if it holds this
                            content from now on, also if an earlier attempt had stored it, and False
                            if it holds another one. Of several writers, exactly one gets True.
    replace(name, content)  Store an object, whether or not it exists. A reader gets one content or
                            the other. A replacement that was given up may still land later.
    get(name)               Return the content, whole, with its age, or None if there is none.
    list(prefix, after)     Return names that begin with `prefix` and come after `after`, sorted,
                            with sizes and ages. It has each object that was there all the time.
    delete(name)            Delete an object, if there is one.
    wait(prefix, mark, s)   Return when something below a prefix may have changed since a mark.

What is created or replaced is durable once the call returns. A content has at most `MOST_BYTES`;
`LargeObjects` cuts larger ones into chunks, over several connections.

Failures
    Each content is stored with its checksum, and each that is read is checked: DamagedError.
    Whatever may pass, such as a server that restarts, is tried again for `patience` seconds, and
    the log says so; then AwayError. Other failures raise at once: FullError, a full disk or quota;
    RefusedError, all that another attempt would meet as well, such as a wrong password, a bucket
    that does not exist, or a clock that is wrong. Each error is one line for users.

Nothing here knows what the objects mean, except for the rights of the server (logins.py).
"""

from torchtitan_diloco.store.errors import (
    AwayError,
    ClosedError,
    DamagedError,
    FullError,
    RefusedError,
    StoreError,
)
from torchtitan_diloco.store.large import LargeObjects
from torchtitan_diloco.store.location import open_store
from torchtitan_diloco.store.store import MOST_BYTES, Entry, Found, Store

__all__ = [
    "MOST_BYTES",
    "AwayError",
    "ClosedError",
    "DamagedError",
    "Entry",
    "Found",
    "FullError",
    "LargeObjects",
    "RefusedError",
    "Store",
    "StoreError",
    "open_store",
]
