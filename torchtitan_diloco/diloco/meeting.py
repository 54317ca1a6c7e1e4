"""Where the ranks that torchrun has started meet, also after it has started them again."""

import hashlib
import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

POLL_SECONDS = 0.05


def store_of_job(timeout: timedelta) -> Store:
    """Return torchrun's store, which outlives the ranks."""
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    store.set_timeout(timeout)
    return store


def store_of_attempt(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return the store under a prefix that only the ranks of this attempt have. Collective.

    Otherwise gloo would find the addresses of the attempt before. Nodes may count their restarts
    differently (TORCHELASTIC_RESTART_COUNT), so ranks agree on a prefix: each writes a new token,
    and waits until all have read the same ones.
    """
    kinds = "torchtitan_diloco/token", "torchtitan_diloco/read"
    tokens, read = ([f"{kind}/{one}" for one in range(size)] for kind in kinds)
    store.set(tokens[rank], secrets.token_hex(8))
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        prefix = hashlib.sha256(b"".join(store.multi_get(tokens))).hexdigest()
        store.set(read[rank], prefix)
        if set(store.multi_get(read)) == {prefix.encode()}:
            return PrefixStore(prefix, store)
        time.sleep(POLL_SECONDS)
    raise RuntimeError("ranks of an earlier attempt did not start again")
