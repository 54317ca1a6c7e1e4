"""Broadcasts of large tensors, in messages that each pass a slow link before its timeout."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from torchtitan_diloco.base.formatting import progress_options
from torchtitan_diloco.base.log import is_first_on_node
from torchtitan_diloco.base.messages import transfers

SLOWEST_LINK = 125_000
"""Bytes per second of the slowest link that is supported: 1 Mbit/s."""
SHARE_OF_TIMEOUT = 0.1
"""Part of the timeout of a link that one message takes on the slowest link. The rest is for other
ranks of a worker, which share its link, and for workers that are not ready yet."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def broadcast_tensors(
    tensors: Iterable[Tensor],
    group: dist.ProcessGroup,
    *,
    source: int,
    total: int,
    timeout_seconds: float,
    label: str,
    device: torch.device | None = None,
) -> None:
    """Overwrite the tensors of all ranks with those of rank `source` of the group.

    Args:
        total: bytes of all tensors.
        timeout_seconds: the time within which a message must arrive.
        label: what the progress bar says.
        device: where the group sends from. None: the host.
    """
    message_bytes = max(1, int(SHARE_OF_TIMEOUT * timeout_seconds * SLOWEST_LINK))
    receives = group.rank() != source
    options = progress_options(label)
    with tqdm(total=total, disable=not is_first_on_node(), **options) as bar:
        for tensor in tensors:
            content = tensor.contiguous()
            for part in as_bytes(content).split(message_bytes):
                message = part.to(device or "cpu")  # the tensor itself, if it is there already
                with transfers():
                    dist.broadcast(message, group_src=source, group=group)
                if message is not part and receives:
                    part.copy_(message)
                bar.update(message.numel())
            if content is not tensor and receives:
                tensor.copy_(content)
