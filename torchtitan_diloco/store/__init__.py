"""A store: objects under names, in a folder or in a bucket.

`open_store(location)` takes the path of a folder, a join file for the bucket of an S3 server
(join_file.py), or `s3://BUCKET/PATH`, `gs://BUCKET/PATH` or `az://CONTAINER/PATH` with the login of
the environment. All of them give the same guarantees, and any thread may call a store. Calls block.

Names
    `a/b-1/c.txt`: see names.py. A name with others below it, such as `a/b-1`, has no object.

Verbs
    create(name, content)   Store an object that does not exist. Return True if it holds this
                            content from now on, even if an earlier attempt stored it, and False if
                            it holds another one. Of several writers, exactly one gets True.
    replace(name, content)  Store an object, whether or not it exists. A reader gets one content or
                            the other. An abandoned replacement may still take effect later.
    get(name)               Return the complete content with its age, or None if there is none.
    list(prefix, after)     Return the sorted names that start with `prefix` and follow `after`,
                            with sizes, ages and tags, of all objects that exist during the call.
    delete(name)            Delete an object, if there is one.

Created and replaced objects are durable once the call returns, unless the caller does not ask for
it. A content has at most `MOST_BYTES`; `LargeObjects` splits larger ones into chunks, over several
connections. Readers poll: of a list, they read what has another size or tag than before. How often
follows the `kind` of the store.

Failures
    Each content is stored with its checksum, which is checked when it is read: DamagedObjectError.
    Temporary failures, such as a server that restarts, are retried for `patience` seconds, and
    logged; then AwayError is raised. `with_patience` gives a thread that must go on a shorter one.
    Other failures raise at once: FullError for a full disk or quota; RefusedError for all that
    another attempt would also meet, such as a wrong login, a missing bucket or, at first, a wrong
    clock. Each error is one line for users.

Nothing here depends on the meaning of the objects.
"""

from torchtitan_diloco.store.errors import (
    AwayError,
    ClosedError,
    DamagedObjectError,
    FullError,
    RefusedError,
    StoreError,
)
from torchtitan_diloco.store.large import LargeObjects
from torchtitan_diloco.store.location import open_store
from torchtitan_diloco.store.store import MOST_BYTES, Found, Kind, ListedObject, Store

__all__ = [
    "MOST_BYTES",
    "AwayError",
    "ClosedError",
    "DamagedObjectError",
    "Found",
    "FullError",
    "Kind",
    "LargeObjects",
    "ListedObject",
    "RefusedError",
    "Store",
    "StoreError",
    "open_store",
]
