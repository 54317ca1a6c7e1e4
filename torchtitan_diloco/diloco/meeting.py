"""How ranks meet, even after torchrun has restarted them, exchange values, and agree."""

import hashlib
import os
import secrets
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtitan_diloco.hardware import describe_machine
from torchtitan_diloco.log import UserError, logger

HIDDEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
POLL_SECONDS = 0.05
PACKAGE = Path(__file__).parent
Value = TypeVar("Value")


def store_of_job(timeout: timedelta) -> Store:
    """Return torchrun's store, which outlives the ranks."""
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    store.set_timeout(timeout)
    return store


def store_of_attempt(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return the store under a prefix that only the ranks of this attempt use. Collective.

    Otherwise, gloo would find the addresses of the previous attempt. Nodes may count their restarts
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
    rank, size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), default_pg_timeout
    store = store_of_attempt(store_of_job(timeout), rank, size, timeout)
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


# --- groups and models that cannot work -----------------------------------------------------------


def check_group(group: dist.ProcessGroup | None) -> None:
    try:
        if group is not None:
            dist.get_backend(group)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"group: {group!r} is not a group of torch.distributed that contains "
            "this rank. Start all workers in one job (torchrun's --nnodes), call "
            "dist.new_group(ranks) on all ranks, and pass its result; to join "
            "separate jobs, pass islands.IslandPeers(...)"
        ) from error


def check_model(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise an error if gradients would be averaged over workers; warn if buffers will differ."""
    if group is None or group.size() == 1:
        return
    workers = set(dist.get_process_group_ranks(group))
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            _check_ranks(workers, ranks, f'DistributedDataParallel "{name}"')
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            ranks = parameter.device_mesh.mesh.flatten().tolist()
            _check_ranks(workers, ranks, f"the mesh of {name}")
    statistics = [name for name, _ in model.named_buffers() if name.endswith("running_mean")]
    if statistics and group.rank() == 0:
        logger.warning(
            f"running statistics such as {statistics[0]} are not exchanged: each "
            "worker keeps its own, and global_state_dict() returns those of this "
            "worker. Use a norm without them (LayerNorm, GroupNorm), or average them "
            "with dist.all_reduce before you save or evaluate"
        )


def _check_ranks(workers: set[int], ranks: list[int], what: str) -> None:
    if len(workers.intersection(ranks)) > 1:
        raise UserError(
            f"{what} joins the ranks {ranks}, which belong to several workers "
            f"(the group between workers joins {sorted(workers)}): gradients would "
            "be averaged over workers in every step. Create it with the ranks of "
            "this worker only, or remove it if a worker has one rank"
        )


# --- small values ---------------------------------------------------------------------------------
#
# They are encoded as MessagePack. Unlike the pickles of `torch.distributed.all_gather_object`, it
# cannot run code when it is decoded.


def gather_objects(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """Return the values of all ranks on every rank. All values must have the same type."""
    if group is None:
        return [value]
    content = _encode(value)
    size = torch.tensor([content.numel()])
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    longest = int(torch.cat(sizes).max())
    padded = content.new_zeros(longest)
    padded[: content.numel()] = content
    contents = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(contents, padded, group=group)
    kind = type(value)
    return [_decode(one[: int(size)], kind) for one, size in zip(contents, sizes, strict=True)]


def broadcast_object(
    value: Value | None, kind: type[Value], group: dist.ProcessGroup | None
) -> Value:
    """Return the value of the group's first rank, of type `kind`."""
    content = _encode(value)
    if group is not None:
        size = torch.tensor([content.numel()])
        dist.broadcast(size, group_src=0, group=group)
        content = content.new_zeros(int(size)) if group.rank() else content
        dist.broadcast(content, group_src=0, group=group)
    return _decode(content, kind)


def _encode(value: object) -> Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)


def _decode(content: Tensor, kind: type[Value]) -> Value:
    return msgspec.msgpack.decode(content.numpy().tobytes(), type=kind)


# --- agreement ------------------------------------------------------------------------------------


class Started(msgspec.Struct):
    """How a rank was started."""

    facts: dict[str, str]
    results: dict[str, str]
    """Digests of what it computes, by operation."""
    machine: str


def agree(
    facts: Mapping[str, str],
    group: dist.ProcessGroup | None,
    member: str,
    *,
    results: Mapping[str, str] | None = None,
) -> None:
    """Raise on every rank of `group` if a fact, torch or this package's code differ from the first
    rank's. Callers add `code_facts` of the code that they compute with.

    Args:
        member: what the message calls a rank of the group, such as "worker".
        results: digests of what this rank computes, by operation.
    """
    mine = Started(
        {**facts, **code_facts(PACKAGE), "torch version": str(torch.__version__)},
        dict(results or {}),
        describe_machine(),
    )
    ranks = [*enumerate(gather_objects(mine, group))]
    if differences := find_differences({f"on {member} {n}": rank.facts for n, rank in ranks}):
        raise UserError(
            f"{member}s were started differently; start all of them with the same:\n  "
            + "\n  ".join(differences)
        )
    machines = {f"on {member} {n} ({rank.machine})": rank.results for n, rank in ranks}
    if differences := find_differences(machines):
        raise UserError(
            f"{member}s compute other bits, so their shared copies would differ; use machines that "
            "compute the same:\n  " + "\n  ".join(differences)
        )


def code_facts(*places: Path) -> dict[str, str]:
    """Return a fact for each folder or file of code that must be the same on all machines."""
    return {
        f"code of {place.name} (install the same commit on all machines)": code_fingerprint(place)
        for place in places
    }


@cache
def code_fingerprint(place: Path = PACKAGE) -> str:
    """Return a hash of a source file, or of all files in a folder. Default: this package."""
    digest = hashlib.sha256()
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        name = str(path.relative_to(place.parent))
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_differences(gathered: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Describe up to eight differences from the first facts. A key such as "on rank 0" says whose
    facts they are."""
    (first, reference), *others = gathered.items()
    differences = [
        f"{key}: {_shorten(reference.get(key))} {first}, {_shorten(theirs.get(key))} {where}"
        for where, theirs in others
        for key in sorted({*reference, *theirs})
        if theirs.get(key) != reference.get(key)
    ]
    more = [f"and {len(differences) - 8} more"] if len(differences) > 8 else []
    return differences[:8] + more


def _shorten(value: str | None) -> str:
    return "nothing" if value is None else value if len(value) <= 60 else value[:57] + "..."
