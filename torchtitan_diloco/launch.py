"""Start a run: `python -m torchtitan_diloco.launch [--config NAME_OR_PATH] [--section.key value]`.

The training processes are children of the launcher, several of them under torchrun. That runs in a
thread, so that the main thread can handle signals even while torchrun waits for other nodes.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import contextlib
import ctypes
import importlib
import ipaddress
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_diloco.config import Config, ConfigError, from_command_line
from torchtitan_diloco.placement import (
    LaunchError,
    Node,
    count_gpus,
    local_processes,
    read_node,
    whole_number,
)
from torchtitan_diloco.restarts import NotRestartedError, Restarts
from torchtitan_diloco.utils import (
    FOLDER_NOTE,
    STOP_SIGNALS,
    USER_ERROR,
    available_cores,
    raise_open_files_limit,
    run_and_exit,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SAME_SIGNAL_SECONDS = 0.5
"""`timeout` and service managers signal a process and then its group: twice, but meant once."""
RUN_RANK = "from torchtitan_diloco import launch; launch.run_rank()"
PR_SET_PDEATHSIG = 1


def main(arguments: list[str], module: str = "torchtitan_diloco.train") -> int:
    """Run `module.main(arguments)` in every process of this machine. Return the exit code."""
    try:
        config = from_command_line(arguments)
        if config is None:  # --help or --print-config
            return 0
        if config.islands.local:
            return run_local_islands(config, arguments)
        node = read_node(os.environ)
        processes = local_processes(
            workers=config.workers_of_job,
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
        return USER_ERROR

    raise_open_files_limit()
    if processes > 1 or node.count > 1:
        os.environ["OMP_NUM_THREADS"] = str(threads or max(1, available_cores() // processes))
        if node.is_local:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    run = _Run(node, processes, config, 120 if grace_seconds is None else grace_seconds)
    return run.wait(module, arguments)


def run_local_islands(config: Config, arguments: list[str]) -> int:
    """Start a server and islands on this machine, each as if it was started by hand."""
    from torchtitan_diloco.islands.local import run_islands

    count = config.islands.local
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // count)))
    folder = config.run.folder or f"outputs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    begin = config.islands.begin or count
    command = [sys.executable, "-m", "torchtitan_diloco.launch", *arguments]
    command += ["--islands.local", "0", "--islands.begin", str(begin)]
    return run_islands(command, count, Path(folder))


class _Run:
    """The training processes of this machine, started again after a crash."""

    def __init__(self, node: Node, processes: int, config: Config, grace_seconds: float) -> None:
        self._node, self._processes, self._config = node, processes, config
        self._grace_seconds = grace_seconds
        self._exit_code = 1
        self._signals: list[tuple[float, signal.Signals]] = []
        """Time and number of each signal received."""
        self._signalled: set[int] = set()
        """Processes that the first signal was passed on to."""

    def wait(self, module: str, arguments: list[str]) -> int:
        """Run `module.main(arguments)` in all ranks to its end, and return the exit code."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._on_signal)
        finished = True
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder)
            thread = threading.Thread(target=self._train, args=(module, arguments), daemon=True)
            thread.start()
            while thread.is_alive() and finished:
                thread.join(0.1)
                finished = not self._signals or self._pass_on()
        if not finished:
            os._exit(128 + self._signals[0][1])  # the thread may be deep inside torch
        return 128 + self._signals[0][1] if self._signals else self._exit_code

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.append((time.monotonic(), signal.Signals(number)))

    def _ranks(self) -> set[int]:
        """Return the process ids of the ranks of this machine."""
        return {int(file.name) for file in self._folder.iterdir() if file.name.isdecimal()}

    def _pass_on(self) -> bool:
        """Pass the first signal on to the ranks. Kill them and return False if it is too late."""
        ranks = self._ranks()
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

    def _train(self, module: str, arguments: list[str]) -> None:
        """Run the ranks, and again after each crash that `run.restarts` covers."""
        note = self._folder / "run"
        os.environ[FOLDER_NOTE] = str(note)
        limit, failures = self._config.run.restarts, dict[int, int]()
        restarts, resume = Restarts(limit, self._config.checkpoint, note), list[str]()
        while True:
            try:
                failures = self._run_ranks([module, *arguments, *resume])
            except LaunchError as error:
                _say(f"error: {error}")
                break
            if not failures:
                self._exit_code = 0
                break
            self._exit_code, reason, advice = describe_failures(failures)
            if self._signals:
                received = {signal.SIGTERM, *(number for _, number in self._signals)}
                stopped = {code for number in received for code in (-number, 128 + number)}
                if not stopped.issuperset(failures.values()):
                    _say(f"error: {reason}{advice}{restarts.last_saved()}")
                break
            if self._exit_code == USER_ERROR:  # a rank has said what is wrong
                break
            if not limit:
                _say(f"error: {reason}{advice}")
                break
            try:
                resume = restarts.after_crash(reason)
            except NotRestartedError as error:
                _say(f"error: {reason}{advice}; not started again, because {error}")
                break
            _say(f"error: {reason}{advice}\n{restarts.announcement()}")
            time.sleep(restarts.pause_seconds)
        if restarts.reasons:
            _say(restarts.summary())

    def _run_ranks(self, program: list[str]) -> dict[int, int]:
        """Run the ranks of this machine once. Return the exit codes of those that failed."""
        command = ["-u", "-c", RUN_RANK, str(os.getpid()), str(self._folder), *program]
        try:
            if self._processes > 1 or self._node.count > 1:
                return self._torchrun(command)
            code = subprocess.Popen([sys.executable, *command], start_new_session=True).wait()
            return {0: code} if code else {}
        finally:
            ranks = self._ranks()
            _send(os.killpg, ranks, signal.SIGKILL)  # data processes, which hold the run's lock
            for pid in ranks:
                (self._folder / str(pid)).unlink()

    def _torchrun(self, command: list[str]) -> dict[int, int]:
        # Imported here, because it takes seconds.
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        if "LOGLEVEL" not in os.environ:  # torchrun's log repeats what is printed below
            logger = logging.getLogger("torch.distributed.elastic")
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
        node, timeout = self._node, self._config.distributed.init_timeout_seconds
        # torchrun replaces ${...} in arguments; $$ is a plain dollar.
        escaped = [argument.replace("$", "$$") for argument in command]
        try:
            store = _open_store(node, timeout)
            config = LaunchConfig(
                min_nodes=node.count,
                max_nodes=node.count,
                nproc_per_node=self._processes,
                run_id=node.run_id,
                rdzv_backend="static",
                rdzv_endpoint=f"{node.endpoint.rpartition(':')[0]}:{store.port}",
                rdzv_configs={"rank": node.rank, "timeout": timeout},
                local_addr="127.0.0.1" if node.is_local else None,  # the host name may not resolve
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks write to this console
            )
            elastic_launch(config, sys.executable)(*escaped)
        except ChildFailedError as error:
            return {rank: failure.exitcode for rank, failure in error.failures.items()}
        except (RuntimeError, ValueError, TimeoutError, OSError, RendezvousError) as error:
            reason = "torchrun could not start the processes"
            if node.count > 1:
                reason = (
                    f"node {node.rank} of {node.count} did not meet the others at RDZV_ENDPOINT="
                    f"{node.endpoint} within {timeout} s; start all nodes, and check the address, "
                    "that its port is free on the first node, and that no firewall closes it"
                )
            cause = error.__cause__ or error
            text = next(iter(str(cause).splitlines()), type(cause).__name__)
            raise LaunchError(f"{reason} ({text})") from None
        return {}


def _open_store(node: Node, timeout: int) -> "TCPStore":
    """Open the store in which the nodes meet on the first node; connect to it on the others.

    torchrun would listen on all interfaces, but uses a store that this process has on the port.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if node.rank > 0:
        _say(f"node {node.rank} of {node.count}: waiting for the first node at {node.endpoint}")
        return _next_store(node, timeout)
    listener = node.listen()
    address, port = listener.getsockname()[:2]
    if ipaddress.ip_address(address).is_unspecified:
        _say(f"port {port} is open on all interfaces, as {node.host} is no address of this machine")
    return TCPStore(
        node.host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _next_store(node: Node, timeout: int) -> "TCPStore":
    """Connect to a store of the first node that this node has not been in.

    Each start has its own. A node that starts again may find the one before still open, because the
    others have not noticed yet that the run has crashed.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + timeout
    while True:
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        try:
            store = TCPStore(
                node.host, node.port, is_master=False, wait_for_workers=False, timeout=left
            )
            if store.add(f"node {node.rank}", 1) == 1:
                return store
            del store
        except RuntimeError:  # it may close at any time
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise TimeoutError("the first node still has the processes of an earlier start")
        time.sleep(1)


def describe_failures(exit_codes: Mapping[int, int]) -> tuple[int, str, str]:
    """Return the exit code of the run, which ranks failed by themselves and how, and advice.

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
    return first if first > 0 else 128 - first, ", ".join(parts), advice


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
    run_and_exit(importlib.import_module(module).main, arguments)


def _send(kill: Callable[[int, int], None], ranks: set[int], number: signal.Signals) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            kill(pid, number)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone; training still has to be saved
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
