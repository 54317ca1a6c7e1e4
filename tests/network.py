"""Processes in network namespaces, forked from the server of `tests.processes`."""

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network import LOOPBACK, Network, NoNetworkError
from tests.processes import FORKS, PATIENCE

__all__ = ["PATIENCE", "enter", "network_of", "processes_in"]


@contextmanager
def network_of(workers: int, **rates: Any) -> Iterator[Network]:
    """Yield a network, or skip the test where this machine gives none."""
    network = Network(workers, **rates)
    try:
        network.__enter__()
    except NoNetworkError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield network
    finally:
        network.close()


@contextmanager
def processes_in(
    network: Network,
    logs: Sequence[Path],
    function: Callable[..., Any],
    *arguments: Any,
    loopback: bool = False,
) -> Iterator[list[BaseProcess]]:
    """Run a function as each worker of a network; `logs` receive what they print.

    With `loopback`, all are in the place of worker 0 and meet over its loopback interface.
    """
    found: list[BaseProcess] = []
    for worker, log in enumerate(logs):
        variables = network.rank_variables(worker) | {"WORLD_SIZE": str(len(logs))}
        if loopback:
            variables |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": LOOPBACK}
        holder = network.namespace(0 if loopback else worker).pid
        given = holder, variables, log, function, arguments
        found.append(FORKS.Process(target=_run, args=given, daemon=True))
    try:
        for process in found:
            process.start()
        yield found
    finally:
        for process in found:
            process.kill()
            process.join()


def enter(holder: int) -> None:
    """Move this process into the network of another one. It must not have threads yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts") if os.geteuid() == 0 else ("user", "net", "uts"):
        with open(f"/proc/{holder}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {kind}")


def _run(
    holder: int,
    variables: Mapping[str, str],
    log: Path,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    enter(holder)
    os.environ.update(variables)
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    function(*arguments)
