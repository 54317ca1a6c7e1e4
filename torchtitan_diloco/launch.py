"""Start a run: `torchtitan-diloco train [--config NAME_OR_PATH] [--section.key value]`.

The training processes are children of the launcher, with the environment variables of torchrun. The
launchers of several nodes meet in a store on the first one, through which ranks find each other.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: no traceback

import contextlib
import importlib
import ipaddress
import math
import os
import socket
import subprocess
import sys
import tempfile
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
    KILL_SECONDS,
    SAME_SIGNAL_SECONDS,
    SHUTDOWN_SECONDS,
    STOP_SIGNALS,
    USER_ERROR,
    WORKER_LOST,
    available_cores,
    cause_of,
    end_with_parent,
    raise_open_files_limit,
    run_and_exit,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
RUN_RANK = "from torchtitan_diloco import launch; launch.run_rank()"
POLL_SECONDS, TELL_SECONDS = 0.05, 30.0
LAST_NODE_SECONDS = 10.0
"""From the end of the first node's ranks until its store closes, while other nodes train."""


class StoppedError(Exception):
    """A signal has ended the run. The message says how."""


def main(arguments: list[str], module: str = "torchtitan_diloco.train") -> int:
    """Run `module.main(arguments)` in every process of this machine and return the exit code."""
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
        shutdown = whole_number(os.environ, "SHUTDOWN_SECONDS", minimum=0)
        threads = whole_number(os.environ, "OMP_NUM_THREADS")
    except BrokenPipeError:  # `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, LaunchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR

    raise_open_files_limit()
    # FSDP2, NCCL and the outer loop have more streams than the 8 queues of a GPU's default.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if processes > 1:  # else the ranks count those on this machine
        os.environ["OMP_NUM_THREADS"] = str(threads or max(1, available_cores() // processes))
    if node.is_local and (processes > 1 or node.count > 1):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    run = _Run(node, processes, config, SHUTDOWN_SECONDS if shutdown is None else shutdown)
    return run.wait(module, arguments)


def run_local_islands(config: Config, arguments: list[str]) -> int:
    """Start a server and islands on this machine, each as if by hand."""
    from torchtitan_diloco.islands.local import run_islands

    count = config.islands.local
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // count)))
    folder = config.run.folder or f"outputs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    begin = config.islands.begin or count
    command = [sys.executable, "-m", "torchtitan_diloco.launch", *arguments]
    command += ["--islands.local", "0", "--islands.begin", str(begin)]
    try:
        return run_islands(command, count, Path(folder))
    except ValueError as error:  # such as a package that is missing
        _say(f"error: {error}")
        return USER_ERROR


class _Run:
    """The training processes of this machine, started again after a crash."""

    def __init__(self, node: Node, processes: int, config: Config, shutdown_seconds: float) -> None:
        self._node, self._processes, self._config = node, processes, config
        self._shutdown_seconds = shutdown_seconds
        self._signals: list[tuple[float, signal.Signals]] = []  # received, and when

    def wait(self, module: str, arguments: list[str]) -> int:
        """Run `module.main(arguments)` in all ranks and return the exit code."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._on_signal)
        code = 1
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                code = self._train([module, *arguments], Path(folder, "run"))
            except (StoppedError, LaunchError) as error:
                _say(f"{'' if isinstance(error, StoppedError) else 'error: '}{error}")
        return 128 + self._signals[0][1] if self._signals else code

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.append((time.monotonic(), signal.Signals(number)))

    def _train(self, program: list[str], note: Path) -> int:
        """Run the ranks, again after each crash that `run.restarts` covers."""
        os.environ[FOLDER_NOTE] = str(note)
        limit = self._config.run.restarts
        restarts, resume = Restarts(limit, self._config.checkpoint, note), list[str]()
        while failures := self._run_ranks([*program, *resume]):
            code, reason = describe_failures(failures)
            if self._signals:
                if not {-signal.SIGTERM, 128 + signal.SIGTERM}.issuperset(failures.values()):
                    latest = restarts.latest_checkpoint()
                    saved = f"the latest checkpoint is {latest}" if latest else ""
                    _say(f"error: {reason}; {saved or 'no checkpoint was saved'}")
                break
            if code == USER_ERROR:  # a rank has said what is wrong
                break
            if not limit:
                _say(f"error: {reason}")
                break
            try:
                resume = restarts.after_crash(reason)
            except NotRestartedError as error:
                _say(f"error: {reason}; not started again, because {error}")
                break
            _say(f"error: {reason}\n{restarts.announcement}")
            self._wait(lambda: "the pause", restarts.pause_seconds)
        if restarts.summary:
            _say(restarts.summary)
        return code if failures else 0

    def _run_ranks(self, program: list[str]) -> dict[int, int]:
        """Run the ranks of this machine once. Return the exit codes of those that failed."""
        store, environment, node = None, dict(os.environ), self._node
        if self._processes > 1 or node.count > 1:
            store = self._meet()
            environment |= {
                "WORLD_SIZE": str(node.count * self._processes),
                "MASTER_ADDR": node.host,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 connects to it as the others do
            }
        environment["LOCAL_WORLD_SIZE"] = str(self._processes)
        _say(f"starting {self._processes} processes" if self._processes > 1 else "starting")
        command = [sys.executable, "-u", "-c", RUN_RANK, str(os.getpid()), *program]
        ranks: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for local in range(self._processes):
                rank = node.rank * self._processes + local
                if store is not None:
                    environment |= {"RANK": str(rank), "LOCAL_RANK": str(local)}
                ranks[rank] = subprocess.Popen(command, env=environment, start_new_session=True)
            failures = self._wait_for_ranks(ranks)
        finally:
            for process in ranks.values():  # and the data processes, which hold the run's lock
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if store is not None and not failures and not self._signals:
            with contextlib.suppress(RuntimeError):  # the first node has ended
                self._wait_for_nodes(store, "ended", LAST_NODE_SECONDS)
        return failures

    def _wait_for_ranks(self, ranks: Mapping[int, "subprocess.Popen[bytes]"]) -> dict[int, int]:
        """Return the exit codes of the ranks that failed, in order, once all have ended.

        After a failure, ask the others to stop and give them some time.
        """
        running, failures, failed_at = dict(ranks), dict[int, int](), math.inf
        asked: set[int] = set()
        while running:
            time.sleep(POLL_SECONDS)
            for rank, process in list(running.items()):
                if process.poll() is not None:
                    del running[rank]
                    if process.returncode:
                        failures[rank] = process.returncode
                        failed_at = min(failed_at, time.monotonic())
            if self._signals:
                self._check_signals(announce=not asked)
            if self._signals or failures:
                for rank in running.keys() - asked:
                    running[rank].terminate()
                asked |= running.keys()
            if time.monotonic() - failed_at > KILL_SECONDS:
                break
        return failures

    def _check_signals(self, *, announce: bool) -> None:
        """Raise if it is time to kill the ranks, which were asked to stop."""
        (first_at, first), (last_at, last) = self._signals[0], self._signals[-1]
        if last_at - first_at > SAME_SIGNAL_SECONDS:
            raise StoppedError(f"killed, as {last.name} came again")
        if time.monotonic() - first_at > self._shutdown_seconds:
            seconds = f"{self._shutdown_seconds:g} s"
            raise StoppedError(f"still training {seconds} after {first.name}; killed")
        if announce:
            _say(f"{first.name}: training stops after this step; a second signal kills it")

    def _wait(self, missing: Callable[[], str], seconds: float, *, announce: bool = False) -> str:
        """Wait, while nothing trains, until nothing is missing. Return what still is at the end."""
        node, started = self._node, time.monotonic()
        told = started
        while found := missing():
            if self._signals:
                name = self._signals[0][1].name
                raise StoppedError(f"stopped by {name}; no training was running")
            if announce and time.monotonic() >= told:
                since = f", since {told - started:.0f} s" if told > started else ""
                _say(f"node {node.rank} of {node.count}: waiting for {found}{since}")
                told += TELL_SECONDS
            if time.monotonic() > started + seconds:
                break
            time.sleep(POLL_SECONDS)
        return found

    # --- several nodes ----------------------------------------------------------------------------

    def _meet(self) -> "TCPStore":
        """Return the store through which ranks find each other, once all nodes are connected."""
        node, timeout = self._node, self._config.distributed.init_timeout_seconds
        store: TCPStore | None = None

        def first_node() -> str:
            nonlocal store
            store, reason = connect(node)
            return f"the first node at {node.endpoint} ({reason})" if reason else ""

        deadline = time.monotonic() + timeout
        try:
            if node.rank == 0:
                store = open_store(node)
            else:
                missing = self._wait(first_node, timeout, announce=True)
            if store is not None:
                left = deadline - time.monotonic()
                missing = self._wait_for_nodes(store, "come", left, announce=True)
                if not missing:
                    return store
            reason = f"no answer from {missing}"
        except (RuntimeError, OSError) as error:
            reason = cause_of(error)
        raise LaunchError(
            f"node {node.rank} of {node.count} did not meet the others at "
            f"RDZV_ENDPOINT={node.endpoint} within {timeout} s; "
            "start all nodes, and check the address, that its port is free on the first node, and "
            f"that no firewall closes it ({reason})"
        )

    def _wait_for_nodes(
        self, store: "TCPStore", what: str, seconds: float, *, announce: bool = False
    ) -> str:
        """Tell the other nodes that this one is here, and return which did not come in time."""
        node = self._node
        keys = {f"node {rank}": f"{node.run_id}/{what} {rank}" for rank in range(node.count)}
        store.set(keys[f"node {node.rank}"], "")

        def missing() -> str:
            if store.check(list(keys.values())):
                return ""
            names = [name for name, key in keys.items() if not store.check([key])]
            return f"{', '.join(names)} at {node.endpoint}"

        return self._wait(missing, seconds, announce=announce)


def open_store(node: Node) -> "TCPStore":
    """Open the store of the first node, on one address: torch's default is all interfaces."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = node.listen()
    address, port = listener.getsockname()[:2]
    if ipaddress.ip_address(address).is_unspecified:
        _say(f"port {port} is open on all interfaces, as {node.host} is no address of this machine")
    return TCPStore(
        node.host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def connect(node: Node) -> "tuple[TCPStore | None, str]":
    """Return the first node's store, in which this node has not been, or why there is none.

    Each start has its own. A node that starts again may find the one before still open, because the
    others have not noticed the crash yet.
    """
    place = node.host, node.port
    try:  # TCPStore would print a page for each failure
        socket.create_connection(place, timeout=1.0).close()
    except OSError as error:
        return None, error.strerror or str(error)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with contextlib.suppress(RuntimeError):  # it may close at any time
        patience = timedelta(seconds=10)
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=patience)
        if store.add(f"{node.run_id}/node {node.rank}", 1) == 1:
            return store, ""
    return None, "the start before this one has not ended there"


def describe_failures(exit_codes: Mapping[int, int]) -> tuple[int, str]:
    """Return the exit code of the run, and which ranks failed and how.

    Leave out ranks that were asked to stop or lost another one, unless there are no others.
    """
    consequences = (-signal.SIGTERM, 128 + signal.SIGTERM, WORKER_LOST)
    causes = {rank: code for rank, code in exit_codes.items() if code not in consequences}
    causes = causes or dict(exit_codes)
    parts = []
    for rank, code in causes.items():
        if code == -signal.SIGKILL:
            ending = "was killed by SIGKILL (often by the system, when memory runs out)"
        elif code < 0:
            ending = f"was ended by {signal.Signals(-code).name}"
        else:
            ending = f"failed with exit code {code}"
        parts.append(f"rank {rank} {ending}")
    first = next(iter(causes.values()))
    return first if first > 0 else 128 - first, ", ".join(parts)


def run_rank() -> None:
    """Run one training process. On Linux, it ends when the launcher does."""
    launcher, module, *arguments = sys.argv[1:]
    end_with_parent()
    if os.getppid() != int(launcher):  # it ended before prctl
        sys.exit(1)
    run_and_exit(importlib.import_module(module).main, arguments)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone; training still has to be saved
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
