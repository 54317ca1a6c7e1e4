"""What matrices are multiplied in. Parameters, gradients and optimizer stay fp32."""

from contextlib import AbstractContextManager, nullcontext

import torch


def compute_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """`wanted`: `parallel.compute_dtype`."""
    if wanted == "auto":
        wanted = "bfloat16" if device.type == "cuda" else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[wanted]


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """For a process without FSDP2, which casts by itself."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
