"""Facts about the hardware a process runs on."""

import resource
import sys

import torch

from torchtitan_diloco.tools.cores import available_cores

GIB = 2**30

# Dense bf16 matrix throughput from the vendors' data sheets, in FLOP/s. A longer name stands before one it contains.
PEAK_BF16_FLOPS = {
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # one of its two dies, which is one device to torch
}


def peak_flops(device: torch.device) -> float | None:
    """The device's bf16 peak, or None where it is not known: utilisation is then not shown, never guessed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_BF16_FLOPS.items() if key in name), None)


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)}, {total / GIB:.0f} GiB"
    return f"CPU, {available_cores()} cores, {torch.get_num_threads()} threads a process"


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: by tensors on a GPU, by the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
