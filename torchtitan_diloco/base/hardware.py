"""The machine: GPUs, memory, cores, processes and files. Importing it does not import torch."""

import ctypes
import fcntl
import ipaddress
import math
import os
import platform
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.user import UserError

if TYPE_CHECKING:
    import torch

PR_SET_PDEATHSIG = 1
SIOCGIFADDR = 0x8915
GIB = 2**30
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interfaces of gloo, separated by commas."""
SHORT_OF_CORES = 0.3
"""A training thread that waits for a core for this share of its steps is short of cores."""
CGROUP = Path("/sys/fs/cgroup")
VMSTAT = Path("/proc/vmstat")
NEWEST_TORCH = "2.14.1"
"""Newest version of torch with which the tests were run. Newer versions are allowed."""
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
"""Dense bf16 FLOP/s from data sheets. A name precedes the names that it contains."""


def check_device(wanted: str) -> None:
    """Raise an error if `run.device` is "cuda" and there is no GPU."""
    if wanted != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            'run.device = "cuda", but torch sees no GPU here: use "auto" or "cpu", or check the '
            "driver"
        )


def release_of(version: str) -> str:
    """Return a version without its build, such as +cpu."""
    return version.partition("+")[0]


def untested_torch(version: str) -> str:
    """Return a note if this version of torch is newer than the newest tested one, else ""."""
    from torch.torch_version import TorchVersion

    if TorchVersion(release_of(version)) <= NEWEST_TORCH:
        return ""
    return (
        f"torch {version} is newer than {NEWEST_TORCH}, the newest version that "
        f"was tested: if something fails, try torch {NEWEST_TORCH}"
    )


def check_interfaces(setting: str, names: str) -> None:
    """Raise an error if this machine lacks one of the network interfaces of a setting."""
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in present:
            raise UserError(
                f"{setting}: {name} is not a network interface of this machine: "
                f"choose one of {', '.join(present)}, or remove the setting"
            )


def peak_flops(device: "torch.device") -> float | None:
    """Return the peak bf16 FLOP/s of a GPU, None if unknown."""
    import torch

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_BF16_FLOPS.items() if key in name), None)


def describe_machine() -> str:
    """Return the name of this machine, its instruction set, and its GPU if this process uses it."""
    import torch

    words = f"{socket.gethostname()}, {platform.machine()} with "
    words += torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_initialized():
        words += f", {torch.cuda.get_device_name()}"
    return words


def describe_device(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)}, {total / GIB:.0f} GiB"
    cores = available_cores()
    threads = torch.get_num_threads()
    return f"CPU, {counted(cores, 'core')}, {counted(threads, 'thread')} a process"


def peak_memory_bytes(device: "torch.device") -> int:
    """Return the peak allocated GPU memory, or the peak resident set size on the CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def available_memory_bytes() -> float:
    """Return the memory that is available to the machine or container, infinity if not known."""
    limits = [math.inf]
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(1024.0 * int(line.split()[1]))
    with suppress(OSError, ValueError):  # "max" is no limit
        limits.append(float((CGROUP / "memory.max").read_text()))
    return min(limits)


def memory_kills() -> int:
    """Return how many processes of the container, or of the machine, the system has killed because
    memory ran out. 0 if it does not count them. Only on Linux."""
    for path in (CGROUP / "memory.events", VMSTAT):
        with suppress(OSError):
            for line in path.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal when its parent ends. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_process(processes: int) -> int:
    """Return the threads of each of so many processes that divide the cores."""
    return max(1, available_cores() // processes)


def crowded(threads: int) -> str:
    """Return a warning if this machine has much more work than cores, or an empty string."""
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    text = f"load {load:.1f} on {cores} cores, {threads} threads a process: if other programs"
    text += " compute on the same cores, OMP_NUM_THREADS=1 can make all of them many times faster"
    return text if threads > 1 and load > 1.5 * cores else ""


def queued_seconds() -> float:
    """Return the seconds for which this thread was ready to run but had no core, or 0 if the kernel
    does not report them. Only on Linux."""
    with suppress(OSError, ValueError):
        _, queued, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
        return int(queued) / 1e9
    return 0.0


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is the loopback of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, such as 127.example.org
        return host == "localhost"


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one. Only on Linux."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the hard limit, because each connection needs one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # macOS has a lower limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes, *, is_secret: bool = False) -> None:
    """Write a file atomically, even if this process is killed.

    `is_secret`: only this user can read it.
    """
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("wb") as file:
        if is_secret:
            os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
