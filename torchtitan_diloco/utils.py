"""Small tools: logging, hardware, durations, fingerprints. Importing them does not import torch."""

import ctypes
import gc
import hashlib
import json
import logging
import math
import os
import re
import resource
import shlex
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("torchtitan_diloco")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run after the current step."""
USER_ERROR = 2
"""Exit code for a mistake in the configuration or the data."""
WORKER_LOST = 3
"""Exit code if another worker died or did not answer in time."""
SAME_SIGNAL_SECONDS = 0.5
"""Service managers signal a process and then its group. Both signals count as one."""
LOCAL_ISLANDS = "TORCHTITAN_DILOCO_LOCAL_ISLANDS"
"""Environment variable: the folder of a run of `islands.local`, whose islands are below it."""
STARTED_BY = "TORCHTITAN_DILOCO_STARTED_BY"
"""Environment variable: the program that the user started, run_train.sh or torchtitan-diloco."""
PR_SET_PDEATHSIG = 1
REPOSITORY = Path(__file__).parents[1]
GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")
PAGE_CACHE = ("active_file", "inactive_file")
"""Reclaimable memory of a container."""
IGNORE_INDEX = -100
"""Target of a position that the loss ignores."""
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
"""Dense bf16 FLOP/s from data sheets. A name comes before those it contains."""


class UserError(ValueError):
    """A mistake of the user. The message has the value, its key and the remedy, and needs no
    traceback. Any other ValueError, such as one of torch, is a bug."""


def run_and_exit(main: Callable[[list[str]], int], arguments: list[str]) -> NoReturn:
    """Call `main` and exit with its code. Skip all clean-up after a failure.

    Clean-up would wait for other ranks, and tell them that this one ended normally. Without it, the
    rank that fails first is the first to exit, and its exit code is that of the run.
    """
    try:
        code = main(arguments)
    except Exception:
        traceback.print_exc()
        code = 1
    if code == 0:
        sys.exit()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def start_logging() -> None:
    """Log to stdout on the first rank of each node, and warnings to stderr on the other ranks."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    handler = logging.StreamHandler(sys.stdout if first else sys.stderr)
    handler.setFormatter(_RankFormatter())
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if first else logging.WARNING)


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if record.levelno < logging.WARNING:
            return message
        rank = f"[rank {os.environ['RANK']}] " if os.environ.get("RANK") else ""
        return f"{rank}{record.levelname.lower()}: {message}"


def peak_flops(device: "torch.device") -> float | None:
    """Return the peak bf16 FLOP/s of a GPU, None if unknown."""
    import torch

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_BF16_FLOPS.items() if key in name), None)


def describe_device(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)}, {total / GIB:.0f} GiB"
    return f"CPU, {available_cores()} cores, {torch.get_num_threads()} threads a process"


def peak_memory_bytes(device: "torch.device") -> int:
    """Return the peak allocated GPU memory, or the peak resident set size on the CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def free_memory_bytes(device: "torch.device") -> float:
    """Return the free memory of a GPU, or what is available to the machine or container.

    The latter is infinity if it is not known.
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [math.inf]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [1024.0 * int(one.split()[1]) for one in lines if one.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # "max" is no limit
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        cached = [int(one.split()[1]) for one in lines if one.startswith(PAGE_CACHE)]
        found.append(float(limit - used + sum(cached)))
    return min(found)


def local_ranks() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal when its parent ends. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the hard limit, as every connection needs one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # macOS has a lower limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def clock(seconds: float) -> str:
    """Format as `2d 3:04:05`."""
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02d}:{rest:02d}"


def brief(seconds: float) -> str:
    """Format as `1.23 s` or `45.6 ms`."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:.1f} ms"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(3, *map(len, column)) for column in zip(columns, *rows, strict=True)]
    rows = [columns, ["-" * width for width in widths], *rows]
    lines = [map(str.ljust, row, widths) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def all_reduce_bytes(parameters: float, workers: int) -> float:
    """Return the bytes that one worker sends in a ring all-reduce of all gradients in bf16."""
    return 2 * (workers - 1) / workers * 2 * parameters


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    checkout = (REPOSITORY / "pyproject.toml").exists()
    package = f"-e '{REPOSITORY}[{extra}]'" if checkout else f"'torchtitan_diloco[{extra}]'"
    return f"{sys.executable} -m pip install {package}"


def command_line(name: str) -> str:
    """Return how to start a command, such as `train` or `report`, as this process was started."""
    program, own = os.environ.get(STARTED_BY), f"-m torchtitan_diloco {name}"
    if program and Path(program).name == "run_train.sh":
        if name == "train":
            return _relative(program)
        program = installed("torchtitan-diloco")
        if not Path(program).exists():  # a Python of the user, without this package
            return f"PYTHONPATH={shlex.quote(str(REPOSITORY))} {_relative(sys.executable)} {own}"
    if program:
        return f"{_relative(program)} {name}"
    if name == "train" and "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun
        nodes = os.environ["GROUP_WORLD_SIZE"]
        meeting = f"--rdzv-backend c10d --rdzv-endpoint {os.environ['MASTER_ADDR']}:29500"
        where = "--standalone" if nodes == "1" else f"--nnodes {nodes} {meeting}"
        own = f"{where} --nproc-per-node {local_ranks()} -m torchtitan_diloco.train"
        return f"{_relative(sys.executable)} -m torch.distributed.run {own}"
    return f"{_relative(sys.executable)} {own}"


def installed(program: str) -> str:
    """Return where pip puts a program for this Python."""
    return str(Path(sysconfig.get_path("scripts"), program))


def _relative(program: str) -> str:
    """Return the path of a program, relative to the current folder if it is inside."""
    if Path(program).is_relative_to(Path.cwd()):
        program = str(Path(program).relative_to(Path.cwd()))
        program = program if "/" in program else f"./{program}"
    return shlex.quote(program)


class GarbageControl:
    """Run Python's garbage collector at the same steps on every rank."""

    def __init__(self, every: int) -> None:
        self._every = every
        if every:
            gc.disable()
            gc.collect()

    def after_step(self, step: int) -> None:
        if self._every and step % self._every == 0:
            gc.collect(1)

    def close(self) -> None:
        if self._every:
            gc.enable()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, even if this process is killed."""
    aside = aside_path(path)
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def aside_path(path: Path) -> Path:
    """Return the temporary name under which a file is written."""
    return path.with_name(f".{path.name}.partial")


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a JSON Lines file, and the number of unreadable lines.

    A last line that is still being written is skipped.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.split("\n") if line.strip()]
    found, unreadable = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            unreadable += number < len(lines) or text.endswith("\n")
    return found, unreadable


def number(value: object) -> float:
    """Convert a value of a JSON record to a float, NaN if it is not a number."""
    if isinstance(value, str) and value in ("inf", "-inf"):  # JSON has no such numbers
        return float(value)
    return float(value) if isinstance(value, int | float) else math.nan


GLOO_LOCATION = re.compile(r"^\[[^]]*:\d+\]\s*")


def cause_of(error: Exception) -> str:
    """Return the first line of an error, without gloo's source location."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    text, found = GLOO_LOCATION.subn("", line)
    return text.partition(". ")[0] if found else line


@cache
def code_fingerprint() -> str:
    """Return a hash of the source of this package, which must be the same on all nodes."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
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
