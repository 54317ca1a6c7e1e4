"""First weights: parameters and buffers that differ between workers are sent by worker 0.

Workers that start from one seed or one file hold equal weights, as do those that resume. They only
compare checksums, because the whole model may take an hour on the links between workers.
"""

import hashlib

import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_diloco.base.broadcasts import as_bytes, broadcast_tensors
from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.messages import gather_objects
from torchtitan_diloco.base.tensors import local_of

HASHED_BYTES = 2**24
"""Bytes of a tensor that are in host memory at once while its checksum is computed."""


def take_from_first_worker(
    model: nn.Module, group: dist.ProcessGroup | None, timeout_seconds: float
) -> None:
    """Make the parameters and buffers of all workers those of worker 0.

    Each rank compares its shards with those of its counterparts in `group`, and only what differs
    on any of them is sent. `timeout_seconds`: the time within which a message must arrive.
    """
    if group is None or group.size() == 1:
        return
    tensors = [local_of(tensor) for tensor in (*model.parameters(), *model.buffers())]
    first, *others = gather_objects([checksum(tensor) for tensor in tensors], group)
    workers = [worker for worker, theirs in enumerate(others, start=1) if theirs != first]
    differing = [
        tensor
        for tensor, expected, *given in zip(tensors, first, *others, strict=True)
        if given.count(expected) < len(given)
    ]
    if not differing:
        return
    total = sum(tensor.nbytes for tensor in differing)
    logger.info(
        f"worker 0 sends {len(differing)} of {counted(len(tensors), 'tensor')} of the model, "
        f"{total / 1e6:,.2f} MB a rank, because the first weights of worker "
        f"{', '.join(map(str, workers))} differ"
    )
    broadcast_tensors(
        differing,
        group,
        source=0,
        total=total,
        timeout_seconds=timeout_seconds,
        label="first weights of worker 0",
    )


def checksum(tensor: Tensor) -> int:
    """Return a hash of the bits of a tensor, which is the same on all devices."""
    digest = hashlib.blake2b(digest_size=8)
    for part in as_bytes(tensor.contiguous()).split(HASHED_BYTES):
        digest.update(part.cpu().numpy().data)
    return int.from_bytes(digest.digest(), "little")
