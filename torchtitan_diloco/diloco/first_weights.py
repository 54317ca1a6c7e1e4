"""First weights: parameters and buffers that differ between workers are sent by worker 0.

Workers that start from one seed or one file hold equal weights, as do those that resume. They only
compare checksums, because the whole model may take an hour on the links between workers.
"""

import hashlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from torchtitan_diloco.base.formatting import counted, progress_options
from torchtitan_diloco.base.log import is_first_on_node, logger
from torchtitan_diloco.base.messages import gather_objects
from torchtitan_diloco.base.tensors import local_of

HASHED_BYTES = 2**24
"""Bytes of a tensor that are in host memory at once while its checksum is computed."""
SLOWEST_LINK = 125_000
"""Bytes per second of the slowest link that is supported: 1 Mbit/s."""
SHARE_OF_TIMEOUT = 0.1
"""Part of the timeout of a link that one message takes on the slowest link. The rest is for other
ranks of a worker, which share its link, and for workers that are not ready yet."""


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
    message_bytes = max(1, int(SHARE_OF_TIMEOUT * timeout_seconds * SLOWEST_LINK))
    options = progress_options("first weights of worker 0")
    with tqdm(total=total, disable=not is_first_on_node(), **options) as bar:
        for size in _broadcast(differing, group, message_bytes):
            bar.update(size)


def checksum(tensor: Tensor) -> int:
    """Return a hash of the bits of a tensor, which is the same on all devices."""
    digest = hashlib.blake2b(digest_size=8)
    for part in _as_bytes(tensor.contiguous()).split(HASHED_BYTES):
        digest.update(part.cpu().numpy().data)
    return int.from_bytes(digest.digest(), "little")


def _broadcast(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, message_bytes: int
) -> Iterator[int]:
    """Overwrite tensors with those of worker 0. Yield the size of each message that has passed."""
    for tensor in tensors:
        content = tensor.contiguous()
        for part in _as_bytes(content).split(message_bytes):
            message = part.cpu()  # the memory of the tensor itself, if that is on the host
            dist.broadcast(message, group_src=0, group=group)
            if message is not part and group.rank() != 0:
                part.copy_(message)
            yield message.numel()
        if content is not tensor and group.rank() != 0:
            tensor.copy_(content)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
