"""Several training processes: torchrun starts them, numbers them and lets them find each other."""

import logging
import os
import signal
import sys
import uuid

from torchtitan_diloco.launch.place import Place
from torchtitan_diloco.launch.stop import StopSignals, exit_code_of
from torchtitan_diloco.utils import available_cores

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def torchrun_arguments(
    place: Place, processes: int, wait_seconds: int, training_module: str, arguments: list[str]
) -> list[str]:
    """What torchrun is to do, in its own words."""
    if place.nodes == 1:
        # Port 0 is a free one, and the id is unique, so that two runs on one machine never meet.
        meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={uuid.uuid4()}"]
    else:
        meet = [
            f"--rdzv-backend={place.backend}",
            f"--rdzv-endpoint={place.endpoint}",
            f"--rdzv-id={place.run_id}",
        ]
        if place.backend == "static":
            meet.append(f"--node-rank={place.node_rank}")
    if place.stays_on_this_machine:
        meet.append(
            "--local-addr=127.0.0.1"
        )  # torchrun would look up the host's name, which may not resolve
    # torchrun replaces ${...} in arguments; $$ is a plain dollar to it.
    program = [word.replace("$", "$$") for word in (str(os.getpid()), training_module, *arguments)]
    return [
        f"--nnodes={place.nodes}",
        f"--nproc-per-node={processes}",
        *meet,
        f"--rdzv-conf=timeout={wait_seconds},join_timeout={wait_seconds},read_timeout={wait_seconds}",
        "--signals-to-handle=SIGQUIT",  # stop.py passes on the others
        f"--log-dir={os.devnull}",  # the processes write to this console, and leave nothing in the temporary folder
        "--module",
        "torchtitan_diloco.launch.rank",
        *program,
    ]


def settings_for_processes(place: Place, processes: int) -> dict[str, str]:
    """Environment variables the processes need, for those that the user has not set."""
    settings = {"OMP_NUM_THREADS": str(max(1, available_cores() // processes))}
    if place.stays_on_this_machine:
        settings["GLOO_SOCKET_IFNAME"] = LOOPBACK
    return settings


def run_processes(
    place: Place,
    processes: int,
    wait_seconds: int,
    training_module: str,
    arguments: list[str],
    stop: StopSignals,
) -> int:
    """Run them to their end; the exit code."""
    for key, value in settings_for_processes(place, processes).items():
        os.environ.setdefault(key, value)

    # Imported here: it takes seconds, which `--help` and a mistake in the config must not.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    _quiet_torchrun()
    try:
        words = torchrun_arguments(place, processes, wait_seconds, training_module, arguments)
        run(parse_args(words))
    except ChildFailedError as error:
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if stop.first and set(exit_codes.values()) <= {exit_code_of(stop.first), -stop.first}:
            return exit_code_of(stop.first)  # the signal reached ranks that were still starting
        print(describe_failure(exit_codes), file=sys.stderr)
        return exit_code_of_run(exit_codes)
    except (RuntimeError, ValueError, TimeoutError, OSError) as error:
        # The processes print their own errors; what reaches this point went wrong while the nodes were to meet.
        print(
            f"error: {describe_no_meeting(place, wait_seconds)} ({_first_line(error)})",
            file=sys.stderr,
        )
        return 1
    return 0


def describe_failure(exit_codes: dict[int, int]) -> str:
    """One line that says which ranks failed, and leaves out those that torchrun then ended."""
    failed = _failed_by_themselves(exit_codes)
    ranks = ", ".join(
        f"rank {rank} {_describe_exit(code)}" for rank, code in sorted(failed.items())
    )
    spoke = any(code > 0 for code in failed.values())
    return f"error: {ranks}" + ("; the message of the first to fail is above" if spoke else "")


def exit_code_of_run(exit_codes: dict[int, int]) -> int:
    first = next(iter(_failed_by_themselves(exit_codes).values()))
    return first if first > 0 else 128 - first


def _failed_by_themselves(exit_codes: dict[int, int]) -> dict[int, int]:
    ended_by_torchrun = (-signal.SIGTERM, 128 + signal.SIGTERM)
    return {
        rank: code for rank, code in exit_codes.items() if code not in ended_by_torchrun
    } or exit_codes


def _describe_exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (often by the system, when memory runs out)"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def describe_no_meeting(place: Place, wait_seconds: int) -> str:
    if place.nodes == 1:
        return "torchrun could not start the training processes"
    return (
        f"node {place.node_rank} of {place.nodes} did not meet the others at RDZV_ENDPOINT={place.endpoint} within "
        f"{wait_seconds} s; start all nodes, and check the address, that the port is free on the first node, and that "
        "no firewall closes it"
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _quiet_torchrun() -> None:
    """Its warnings repeat what is said here in one line. LOGLEVEL, torchrun's own variable, brings them back."""
    if "LOGLEVEL" in os.environ:
        return
    for name in (
        "torch.distributed.elastic",
        "torch.distributed.launcher",
        "torch.distributed.run",
    ):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
