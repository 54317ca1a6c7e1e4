"""Run a function in several processes that can use gloo, as if torchrun had started them.

Importing torch takes seconds, so a server imports it once and forks the processes. They are reused
by the next test, without process groups. If a test fails, hangs or lets a rank die, all are killed.
"""

import json
import multiprocessing as mp
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest.mock import patch

PATIENCE = 150
"""Seconds after which a function is considered to hang."""
DIED = "the process died"
FORKS = mp.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])


class ProcessPool:
    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._members: list[tuple[Any, Connection]] = []

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        *arguments: Any,
        dying: Collection[int] = (),
    ) -> list[Any]:
        """Run function(*arguments) on `size` ranks and return the results by rank.

        `function` must be importable by name. Ranks in `dying` end their process on purpose, and
        their result is DIED.
        """
        import torch.distributed as dist

        while len(self._members) < size:
            self._members.append(self._start_member())
        # The store is in this process, on a free port, so that no two runs can share it.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        pipes = [pipe for _, pipe in self._members[:size]]
        for rank, pipe in enumerate(pipes):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins the store as the others do
                "GLOO_SOCKET_IFNAME": "lo" if os.uname().sysname == "Linux" else "lo0",
            }
            pipe.send((function, arguments, environment))
        results = self._collect(pipes, time.monotonic() + self._patience, dying)
        if dying:
            self.close()
        return results

    def _collect(
        self, pipes: list[Connection], deadline: float, dying: Collection[int]
    ) -> list[Any]:
        """Return all results. Raise at the first failure, as other ranks may hang because of it."""
        results: list[Any] = [None] * len(pipes)
        pending = set(range(len(pipes)))
        failures: list[str] = []
        while pending and not failures:
            ready = wait(
                [pipes[rank] for rank in pending], timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                failures.append(f"ranks {sorted(pending)} did not finish in time")
            for rank in [rank for rank in pending if pipes[rank] in ready]:
                try:
                    failed, results[rank] = pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    failed = rank not in dying
                    results[rank] = DIED
                pending.discard(rank)
                if failed:
                    failures.append(f"--- rank {rank} ---\n{results[rank]}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    @staticmethod
    def _start_member() -> tuple[Any, Connection]:
        ours, theirs = mp.Pipe()
        process = FORKS.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def close(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.join()
        self._members = []


def _serve(pipe: Connection) -> None:
    """Run the tasks of one rank until the pipe is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    clean = dict(os.environ)
    joined = True
    while True:
        try:
            function, arguments, environment = pipe.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(clean | environment)
        if not joined:  # a failed join leaves a group counted, and counts of ranks must be equal
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
            dist.destroy_process_group()
        try:
            outcome = (False, function(*arguments))
        except BaseException:
            outcome = (True, traceback.format_exc())
        finally:
            joined = dist.is_initialized()
            if joined:
                dist.destroy_process_group()
        pipe.send(outcome)


@contextmanager
def counting_sent(sizes: list[int], *collectives: Callable[..., Any]) -> Iterator[None]:
    """Append the bytes of the tensor of each call of these functions of torch.distributed."""
    import torch
    import torch.distributed as dist

    def counted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            (tensor,) = (given for given in arguments if isinstance(given, torch.Tensor))
            sizes.append(tensor.nbytes)
            return collective(*arguments, **options)

        return count

    with ExitStack() as patches:
        for collective in collectives:
            replaced = patch.object(dist, collective.__name__, counted(collective))
            patches.enter_context(replaced)
        yield


INSTRUCTIONS = ("default", "avx2", "avx512")
"""Instruction sets of torch, without fused multiply-adds and with. A processor that lacks one uses
those that it has."""


def with_instructions(instructions: str, function: str, *arguments: str) -> Any:
    """Call a function in a process in which torch uses this instruction set."""
    module, _, name = function.rpartition(".")
    code = (
        f"import json, sys; from {module} import {name}; print(json.dumps({name}(*sys.argv[1:])))"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": instructions}
    output = subprocess.check_output(
        [sys.executable, "-c", code, *arguments], env=environment, text=True
    )
    return json.loads(output.splitlines()[-1])
