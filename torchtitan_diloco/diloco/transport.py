"""Which backend of a process group carries the tensors of a device."""

import torch.distributed as dist


def transports(group: dist.ProcessGroup | None) -> dict[str, str]:
    """By type of device. A group that was made without a backend named has several, and `get_backend` then knows none."""
    if group is None:
        return {}
    pairs = (part.partition(":") for part in str(dist.get_backend_config(group)).split(","))
    return {device: backend for device, _, backend in pairs}
