"""How many GPUs the training processes will see, found out without the seconds that importing torch takes."""

import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path


def count_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that torch will show to the training processes of this node."""
    if not torch_has_cuda():
        return 0
    return visible_gpus(installed_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))


def torch_has_cuda() -> bool:
    """False where the installed torch is built for the CPU only, which its version says."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def installed_gpus() -> int:
    """GPUs of this machine, as its driver lists them."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        # Containers have the devices but often not the tool.
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    # The parts a GPU is split into (MIG) follow it on indented lines.
    return sum(line.startswith("GPU ") for line in listing.splitlines())


def visible_gpus(installed: int, selection: str | None) -> int:
    """GPUs left by CUDA_VISIBLE_DEVICES, which ends at its first entry that names none (an unset one leaves all)."""
    if selection is None or not installed:
        return installed
    count = 0
    for entry in selection.split(","):
        name = entry.strip()
        by_index = name.isdecimal() and int(name) < installed
        by_identity = name.startswith(("GPU-", "MIG-"))
        if not (by_index or by_identity):
            break
        count += 1
    return count
