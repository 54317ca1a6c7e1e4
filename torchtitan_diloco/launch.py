"""Start a run: `python -m torchtitan_diloco.launch [--config NAME_OR_PATH] [--section.key value]`.

A run of one process trains in this process. Otherwise torchrun starts the processes. It runs in a
thread, so that the main thread can handle signals even while torchrun waits for other nodes.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import contextlib
import ctypes
import importlib
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from torchtitan_diloco.config import ConfigError, from_command_line
from torchtitan_diloco.utils import STOP_SIGNALS, available_cores

DEFAULT_PORT = 29500
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SAME_SIGNAL_SECONDS = 0.5
"""`timeout` and service managers signal a process and then its group: twice, but meant once."""
RUN_RANK = "from torchtitan_diloco import launch; launch.run_rank()"
PR_SET_PDEATHSIG = 1


class LaunchError(ValueError):
    """Mistake in the environment variables of a run. The message says how to correct it."""


def main(arguments: list[str], module: str = "torchtitan_diloco.train") -> int:
    """Run `module.main(arguments)` in every process of this machine. Return the exit code."""
    try:
        config = from_command_line(arguments)
        if config is None:  # --help or --print-config
            return 0
        node = read_node(os.environ)
        processes = local_processes(
            workers=config.diloco.workers,
            fsdp=config.parallel.fsdp,
            nodes=node.count,
            gpus=0 if config.run.device == "cpu" else count_gpus(),
            nproc=whole_number(os.environ, "NPROC"),
        )
        grace_seconds = whole_number(os.environ, "SHUTDOWN_SECONDS", minimum=0)
        threads = whole_number(os.environ, "OMP_NUM_THREADS")
    except BrokenPipeError:  # `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, LaunchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    if processes == node.count == 1:
        return _train_here(module, arguments)
    os.environ["OMP_NUM_THREADS"] = str(threads or max(1, available_cores() // processes))
    if node.is_local:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    run = _Run(120 if grace_seconds is None else grace_seconds)
    return run.wait(node, processes, config.distributed.init_timeout_seconds, [module, *arguments])


@dataclass(frozen=True)
class Node:
    """Place of this machine in the run. On one machine, port 0 takes a free port for each run."""

    count: int = 1
    rank: int = 0
    backend: str = "c10d"
    endpoint: str = "127.0.0.1:0"
    run_id: str = "torchtitan_diloco"

    @property
    def is_local(self) -> bool:
        """True if all nodes are on this machine."""
        return self.endpoint.startswith(("localhost:", "127.", "[::1]:"))


def read_node(environment: Mapping[str, str]) -> Node:
    """Read NNODES, NODE_RANK and the RDZV variables."""
    nodes = whole_number(environment, "NNODES")
    rank = whole_number(environment, "NODE_RANK", minimum=0)
    endpoint = environment.get("RDZV_ENDPOINT", "")
    backend = environment.get("RDZV_BACKEND") or "static"
    run_id = environment.get("RDZV_ID") or Node.run_id
    if nodes is None and (endpoint or rank):
        raise LaunchError(
            f"RDZV_ENDPOINT={endpoint} and NODE_RANK={rank or 0}, but NNODES is not set; "
            "set it to the number of nodes"
        )
    if rank is not None and rank >= (nodes or 1):
        raise LaunchError(
            f"NODE_RANK={rank} with NNODES={nodes}; nodes are numbered 0 to {(nodes or 1) - 1}"
        )
    if nodes is None or nodes == 1:
        return Node()
    if not endpoint or (rank is None and backend == "static"):
        raise LaunchError(
            f"NNODES={nodes} needs RDZV_ENDPOINT (now {endpoint!r}), host:port of the first node, "
            f"and NODE_RANK (now {rank}), this node's number, 0 to {nodes - 1}"
        )
    if ":" not in endpoint or endpoint.endswith("]"):
        endpoint = f"{endpoint}:{DEFAULT_PORT}"
    return Node(nodes, rank or 0, backend, endpoint, run_id)


def whole_number(environment: Mapping[str, str], key: str, minimum: int = 1) -> int | None:
    """Return a variable's value, or None if it is not set."""
    value = environment.get(key, "").strip()
    if value and (not value.isdecimal() or int(value) < minimum):
        raise LaunchError(
            f"{key}={value} must be a whole number of at least {minimum}: correct it, or unset it"
        )
    return int(value) if value else None


def local_processes(*, workers: int, fsdp: int, nodes: int, gpus: int, nproc: int | None) -> int:
    """Return the number of processes of each node. `nproc` is NPROC; `gpus` is 0 on the CPU."""
    per_node = nproc or gpus
    places = f"NPROC={nproc} x " if nproc else f"{gpus} GPUs x " if gpus else ""
    places += f"NNODES={nodes}"
    if fsdp or not per_node:
        each, rest = divmod(workers * max(fsdp, 1), nodes)
        if rest or (nproc and nproc != each) or (not nproc and 0 < gpus < each):
            raise LaunchError(
                f"diloco.workers={workers} x parallel.fsdp={fsdp or 1} = {workers * max(fsdp, 1)} "
                f"processes do not fit {places}; change one of these numbers, use "
                "--parallel.fsdp 0 to take what there is, or --run.device cpu to take no GPUs"
            )
        return each
    if per_node * nodes % workers:
        raise LaunchError(
            f"{places} = {per_node * nodes} processes cannot be divided among diloco.workers="
            f"{workers}; set --diloco.workers to a divisor of {per_node * nodes}, set NPROC "
            "(processes of each node), or use --run.device cpu"
        )
    return per_node


def count_gpus() -> int:
    """Return the number of GPUs that torch will see, without the seconds of importing torch."""
    if metadata.version("torch").endswith("+cpu"):
        return 0
    try:
        listing = subprocess.check_output(["nvidia-smi", "-L"], text=True, timeout=60)
        installed = sum(line.startswith("GPU ") for line in listing.splitlines())
    except (OSError, subprocess.SubprocessError):  # containers often lack nvidia-smi
        installed = len(list(Path("/dev").glob("nvidia[0-9]*")))
    selection = os.environ.get("CUDA_VISIBLE_DEVICES")
    if selection is None or not installed:
        return installed

    def is_known(name: str) -> bool:
        return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < installed)

    # CUDA ignores the first unknown entry and all that follow.
    names = [name.strip() for name in selection.split(",")]
    return len(list(itertools.takewhile(is_known, names)))


def _train_here(module: str, arguments: list[str]) -> int:
    """Train in this process. The trainer handles signals; a pipe notes them for the exit code."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    received: list[int] = []
    try:
        result: int = importlib.import_module(module).main(arguments)
        with contextlib.suppress(BlockingIOError):
            received = [number for number in os.read(read_end, 64) if number in STOP_SIGNALS]
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read_end)
        os.close(write_end)
    return 128 + received[0] if received else result


class _Run:
    """The training processes of this machine, under torchrun."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._exit_code = 1
        self._signals: list[tuple[float, signal.Signals]] = []
        """Time and number of each signal received."""
        self._signalled: set[int] = set()
        """Processes that the first signal was passed on to."""

    def wait(self, node: Node, processes: int, timeout: int, program: list[str]) -> int:
        """Run `program` in `processes` ranks to its end, and return the exit code."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._on_signal)
        finished = True
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            command = ["-u", "-c", RUN_RANK, str(os.getpid()), folder, *program]
            target, args = self._torchrun, (node, processes, timeout, command)
            torchrun = threading.Thread(target=target, args=args, daemon=True)
            torchrun.start()
            while torchrun.is_alive() and finished:
                torchrun.join(0.1)
                finished = not self._signals or self._pass_on(Path(folder))
        if not finished:
            os._exit(128 + self._signals[0][1])  # torchrun's thread may be deep inside torch
        return 128 + self._signals[0][1] if self._signals else self._exit_code

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.append((time.monotonic(), signal.Signals(number)))

    def _pass_on(self, folder: Path) -> bool:
        """Pass the first signal on to the ranks. Kill them and return False if it is too late."""
        ranks = {int(file.name) for file in folder.iterdir()}
        (first_at, first), (last_at, last) = self._signals[0], self._signals[-1]
        if not ranks:
            reason = f"stopped by {first.name}; no training was running"
        elif last_at - first_at > SAME_SIGNAL_SECONDS:
            reason = f"killed, as {last.name} came again"
        elif time.monotonic() - first_at > self._grace_seconds:
            reason = f"still training {self._grace_seconds:g} s after {first.name}; killed"
        else:
            if not self._signalled:
                _say(f"{first.name}: training stops after this step; a second signal kills it")
            _send(os.kill, ranks - self._signalled, first)
            self._signalled |= ranks
            return True
        _send(os.killpg, ranks, signal.SIGKILL)  # each leads a group: its data processes too
        _say(reason)
        return False

    def _torchrun(self, node: Node, processes: int, timeout: int, command: list[str]) -> None:
        # Imported here, because it takes seconds.
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        if "LOGLEVEL" not in os.environ:  # torchrun's log repeats what is printed below
            logger = logging.getLogger("torch.distributed.elastic")
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
        timeouts = dict.fromkeys(("timeout", "join_timeout", "read_timeout"), timeout)
        config = LaunchConfig(
            min_nodes=node.count,
            max_nodes=node.count,
            nproc_per_node=processes,
            run_id=node.run_id,
            rdzv_backend=node.backend,
            rdzv_endpoint=node.endpoint,
            rdzv_configs={"rank": node.rank, **timeouts},
            local_addr="127.0.0.1" if node.is_local else None,  # the host name may not resolve
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks write to this console
        )
        # torchrun replaces ${...} in arguments; $$ is a plain dollar.
        escaped = [argument.replace("$", "$$") for argument in command]
        try:
            elastic_launch(config, sys.executable)(*escaped)
            self._exit_code = 0
        except ChildFailedError as error:
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            self._exit_code, line = describe_failures(exit_codes)
            received = {signal.SIGTERM, *(number for _, number in self._signals)}
            stopped = {code for number in received for code in (-number, 128 + number)}
            if not self._signals or not stopped.issuperset(exit_codes.values()):
                _say(line)
        except (RuntimeError, ValueError, TimeoutError, OSError, RendezvousError) as error:
            reason = "torchrun could not start the processes"
            if node.count > 1:
                name = f"node {node.rank}" if node.backend == "static" else "this node"
                reason = (
                    f"{name} of {node.count} did not meet the others at RDZV_ENDPOINT="
                    f"{node.endpoint} within {timeout} s; start all nodes, and check the address, "
                    "that its port is free on the first node, and that no firewall closes it"
                )
            cause = error.__cause__ or error
            _say(f"error: {reason} ({next(iter(str(cause).splitlines()), type(cause).__name__)})")


def describe_failures(exit_codes: Mapping[int, int]) -> tuple[int, str]:
    """Return the exit code of the run, and one line about the ranks that failed by themselves.

    `exit_codes` are those of all failed ranks, in order. torchrun ends the others with SIGTERM.
    """
    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)
    failed = {rank: code for rank, code in exit_codes.items() if code not in ended} or exit_codes
    first = next(iter(failed.values()))
    parts = []
    for rank, code in sorted(failed.items()):
        if code == -signal.SIGKILL:
            ending = "was killed by SIGKILL (often by the system, when memory runs out)"
        elif code < 0:
            ending = f"was ended by {signal.Signals(-code).name}"
        else:
            ending = f"failed with exit code {code}"
        parts.append(f"rank {rank} {ending}")
    has_message = any(code > 0 for code in failed.values())
    advice = "; the message of the first to fail is above" if has_message else ""
    return first if first > 0 else 128 - first, f"error: {', '.join(parts)}{advice}"


def run_rank() -> None:
    """Run one training process, as torchrun starts it. It ends when the launcher does.

    A file in `folder`, named by the process id, tells the launcher where to send signals.
    """
    launcher, folder, module, *arguments = sys.argv[1:]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback before training handles it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it ended before prctl
        sys.exit(1)
    Path(folder, str(os.getpid())).touch()
    sys.exit(importlib.import_module(module).main(arguments))


def _send(kill: Callable[[int, int], None], ranks: set[int], number: signal.Signals) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            kill(pid, number)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone; training still has to be saved
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
