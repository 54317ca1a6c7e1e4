"""How the processes of torchrun meet, even after it has restarted them."""

import hashlib
import os
import secrets
import time
from collections.abc import Iterable
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from torchtitan_diloco.base.user import UserError

HIDDEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
POLL_SECONDS = 0.05
TOKEN = "torchtitan_diloco/token/{}"
"""Key of a rank's token, which is different in each attempt, or of the mistake that ended it."""


class Mistake(msgspec.Struct):
    """A mistake of the user that ended a rank."""

    rank: int
    text: str
    exit_code: int


def leave_mistake(store: Store, mistake: Mistake) -> None:
    """Tell the other ranks why this one ends: those that wait for it, and those that lose it.

    The next attempt of the rank replaces it by a token.
    """
    store.set(TOKEN.format(mistake.rank), msgspec.json.encode(mistake).decode())


def mistake_among(tokens: Iterable[bytes]) -> Mistake | None:
    """Return the mistake of the first rank that has left one in place of its token."""
    mistakes = (token for token in tokens if token.startswith(b"{"))
    return next((msgspec.json.decode(token, type=Mistake) for token in mistakes), None)


class MistakeElsewhereError(UserError):
    """A mistake of the user that ended another rank, and so the run."""

    def __init__(self, mistake: Mistake) -> None:
        super().__init__(f"{mistake.text} (on rank {mistake.rank})")
        self.exit_code = mistake.exit_code


def store_of_job(timeout: timedelta) -> Store:
    """Return torchrun's store, which outlives the ranks."""
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    store.set_timeout(timeout)
    return store


def store_of_attempt(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return the store under a prefix that only the ranks of this attempt use. Collective.

    Otherwise, gloo would find the addresses of the previous attempt. Nodes may count their restarts
    differently (TORCHELASTIC_RESTART_COUNT), so ranks agree on a prefix: each writes a new token,
    and waits until all have read the same ones. Raise a MistakeElsewhereError if a rank has left a
    mistake in place of its token.
    """
    tokens = [TOKEN.format(number) for number in range(size)]
    read = [f"torchtitan_diloco/read/{number}" for number in range(size)]
    store.set(tokens[rank], secrets.token_hex(8))
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        known = store.multi_get(tokens)
        if mistake := mistake_among(known):
            raise MistakeElsewhereError(mistake)
        prefix = hashlib.sha256(b"".join(known)).hexdigest()
        store.set(read[rank], prefix)
        if set(store.multi_get(read)) == {prefix.encode()}:
            return PrefixStore(prefix, store)
        time.sleep(POLL_SECONDS)
    raise RuntimeError("ranks of an earlier attempt did not restart")


def join_workers() -> dist.ProcessGroup:
    """Connect the processes of torchrun, each of which is a worker, and return their group.

    This hides the other processes and their GPUs from a framework, which would otherwise average
    gradients over all of them. Call it before CUDA is used.
    """
    if "LOCAL_RANK" not in os.environ:
        raise UserError("join_workers() needs the environment of torchrun: start it with torchrun")
    if torch.cuda.is_initialized():
        raise UserError("join_workers() picks this process's GPU: call it before CUDA is used")
    local = int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count()
    if 0 < gpus <= local:
        raise UserError(
            f"there is no GPU for local rank {local} among {gpus} GPUs: start one process per GPU"
        )
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    timeout = default_pg_timeout
    store = store_of_attempt(store_of_job(timeout), rank=rank, size=size, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if gpus:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = chosen.split(",") if chosen else list(map(str, range(gpus)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[local]
    for name in list(os.environ):
        if name in HIDDEN or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    group = dist.group.WORLD
    assert group is not None
    return group
