"""Start a run: `torchtitan-diloco train [--config NAME_OR_PATH] [--section.key value]`.

torchrun's agent starts the training processes of this machine, and starts them again after a crash.
This file only chooses its arguments.
"""

import fcntl
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.hardware import (
    GLOO_INTERFACE,
    available_cores,
    end_with_parent,
    threads_of_process,
)
from torchtitan_diloco.base.process import STACKS_SIGNAL, STOP_SIGNALS, run_and_exit, say
from torchtitan_diloco.base.user import USER_ERROR, WORKER_LOST, UserError, cause_of
from torchtitan_diloco.config import Config, from_command_line, to_toml
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.launching.nodes import (
    Nodes,
    check_endpoint,
    explain_no_meeting,
    read_nodes,
    read_whole_number,
    wait_for_first_node,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

    from torchtitan_diloco.islands.beside import SyncerBeside

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SHUTDOWN_SECONDS = 120
"""From a signal until all ranks are killed: enough for some steps and a save."""
LAUNCHER = "TORCHTITAN_DILOCO_LAUNCHER"
"""Environment variable: process id of the launcher."""
STORE_SECONDS = 3.0
"""Seconds for which a node stays after a mistake, so that ranks of others read it in the store."""
MESSAGES = "TORCHTITAN_DILOCO_MESSAGES"
"""Environment variable: temporary folder with messages of the ranks to the launcher."""
EXIT_CODE = "exit-code"
"""Message: the exit code with which the run ends on this node."""
RANK_MESSAGE = "rank-{}"
"""Message of each local rank: its process id."""
PRINT_CONFIG = "--print-config"
NO_RUN_ID = "none"
"""torchrun's default for several nodes."""
NUMBERS = {"NPROC": 1, "OMP_NUM_THREADS": 1, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": 0}
"""Environment variables that are whole numbers, and their minimum."""


def main(arguments: list[str], module: str = "torchtitan_diloco.train") -> int:
    """Run `module` with `arguments` in every process of this machine and return the exit code."""
    _choose_log_level()
    try:
        if PRINT_CONFIG in arguments:
            print_config(from_command_line([word for word in arguments if word != PRINT_CONFIG]))
            return 0
        config = from_command_line(arguments)
        signal.signal(STACKS_SIGNAL, _pass_to_ranks)
        nodes = read_nodes(os.environ)
        for key, minimum in NUMBERS.items():
            read_whole_number(os.environ, key, minimum)
        if nodes.total > 1:
            check_endpoint(nodes)
        from torchtitan_diloco.launching.preflight import check_inputs

        check_inputs(config)
        if config.islands.local:
            return run_local_islands(config, arguments)
        launch, arguments = configure_torchrun(config, nodes, arguments)
    except UserError as error:
        return _fail(str(error), USER_ERROR)

    patience = config.distributed.init_timeout_seconds
    try:
        with (
            folder_of_messages() as messages,
            _syncer_beside(config, nodes) as syncer,
        ):
            os.environ[MESSAGES] = str(messages)
            if nodes.total > 1:
                wait_for_first_node(nodes, patience, say)
            code = _run_ranks(launch, ["-u", "-m", module, *arguments], messages)
            if syncer is not None:
                syncer.outlast(code)
            return code
    except UserError as error:
        return _fail(str(error), USER_ERROR)
    except (RuntimeError, OSError) as error:
        if nodes.total == 1:
            return _fail(f"the processes could not be started: {cause_of(error)}", code=1)
        return _fail(explain_no_meeting(nodes, patience, error), code=1)


@contextmanager
def folder_of_messages() -> Iterator[Path]:
    """Make a temporary folder, locked so that systemd does not clean it up during a long run."""
    with tempfile.TemporaryDirectory(prefix="torchtitan-diloco-") as folder:
        opened = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # its file system has no locks
                fcntl.flock(opened, fcntl.LOCK_SH)
            yield Path(folder)
        finally:
            os.close(opened)


def _choose_log_level() -> None:
    """Make LOGLEVEL the name of a level, ERROR by default: torch reads it when it is imported."""
    name = os.environ.get("LOGLEVEL", "").strip().upper()
    level = name if name in logging.getLevelNamesMapping() else "ERROR"
    os.environ["LOGLEVEL"] = level
    logging.getLogger("torch.distributed.elastic").setLevel(level)


def _syncer_beside(config: Config, nodes: Nodes) -> AbstractContextManager["SyncerBeside | None"]:
    """Return the syncer of `islands.sync`, which the first node of a job runs."""
    if not config.islands.sync or nodes.rank:
        return nullcontext()
    from torchtitan_diloco.islands.beside import SyncerBeside

    return SyncerBeside(config.islands.join, say)


def _run_ranks(launch: "LaunchConfig", command: list[str], messages: Path) -> int:
    """Run the ranks of this node until they end, and return the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    try:
        elastic_launch(launch, sys.executable)(*command)
    except ChildFailedError as error:
        code, text = describe_failures(error.failures)
        return _fail(text, code)
    except SignalException as error:
        message = messages / EXIT_CODE
        if not message.exists():
            return 128 + error.sigval
        if launch.max_nodes > 1:  # `error` keeps the agent of the first node, which has the store
            with suppress(SignalException):
                time.sleep(STORE_SECONDS)
        return int(message.read_text())
    return 0


def print_config(config: Config) -> None:
    """Print the settings, and on stderr the warnings of the run. Raise if it could not start."""
    from torchtitan_diloco.launching.preflight import check_inputs, early_warnings

    print(to_toml(config), end="", flush=True)
    nodes = read_whole_number(os.environ, "NNODES") or 1
    for warning in early_warnings(config):
        say(f"warning: {warning}")
    _warn_if_crowded(config, wanted_processes(config, nodes))
    check_inputs(config)
    if not config.islands.local:
        _check_processes(config, nodes)


def run_local_islands(config: Config, arguments: list[str]) -> int:
    """Start a syncer and islands on this machine, each as if by hand."""
    from torchtitan_diloco.islands.local import run_islands

    count = config.islands.local
    _share_cores(count)
    _warn_if_crowded(config, wanted_processes(config, nodes=1))
    command = [sys.executable, "-m", "torchtitan_diloco", "train", *arguments]
    command += ["--islands.local", "0", "--islands.begin", str(config.islands.begin or count)]
    return run_islands(command, count, Path(folder_of_run(config)))


def new_run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def folder_of_run(config: Config) -> str:
    """Return `run.folder`. If it is not set, torchrun's id of the run names the folder: it is the
    same on all ranks and nodes, and after restarts, which resume from the folder."""
    if config.run.folder:
        return config.run.folder
    is_rank = "RANK" in os.environ
    run_id = os.environ.get("TORCHELASTIC_RUN_ID") if is_rank else new_run_id()
    if run_id in (None, "", NO_RUN_ID):
        raise UserError(
            "run.folder is not set, and the run has no id that names a folder on all its nodes: "
            "give --run.folder FOLDER, or start torchrun with --rdzv-id ID"
        )
    return f"outputs/{config.run.name}-{run_id}"


def _share_cores(processes: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_process(processes)))


# --- torchrun's arguments -------------------------------------------------------------------------


def processes_of_node(config: Config, nodes: int) -> int:
    """Return the training processes of this node, one of `nodes`, if the settings allow them."""
    from torchtitan_diloco.components.run_plan import accumulation
    from torchtitan_diloco.distributed.world import split_world

    processes = wanted_processes(config, nodes)
    split_world(processes * nodes, config.workers_of_job, config.parallel.fsdp)
    accumulation(config.training, processes * nodes)
    return processes


def _check_processes(config: Config, nodes: int) -> None:
    """Raise if the processes do not fit the settings. If their number follows from the GPUs of this
    machine, the nodes may have others: then only warn, unless no number of processes fits."""
    from torchtitan_diloco.components.run_plan import accumulation

    is_given = bool(os.environ.get("NPROC", "").strip() or config.parallel.fsdp)
    if is_given or config.run.device == "cpu":
        processes_of_node(config, nodes)
        return
    accumulation(config.training, config.workers_of_job)  # as processes are a multiple of workers
    try:
        processes_of_node(config, nodes)
    except UserError as error:
        count = counted(wanted_processes(config, nodes), "process", "processes")
        say(f"warning: with {count} on each node, as on this machine, no run starts: {error}")


def wanted_processes(config: Config, nodes: int) -> int:
    """Return the training processes that are asked for on this node, one of `nodes`."""
    ranks_per_worker = max(1, config.parallel.fsdp)
    if config.islands.local:
        return config.islands.local * ranks_per_worker
    gpus = _gpus(config)
    wanted = config.workers_of_job * ranks_per_worker
    by_settings = gpus if gpus and not config.parallel.fsdp else -(-wanted // nodes)
    return read_whole_number(os.environ, "NPROC") or by_settings


def _gpus(config: Config) -> int:
    import torch

    return 0 if config.run.device == "cpu" else torch.cuda.device_count()


def _warn_if_crowded(config: Config, processes: int) -> None:
    """Warn of more processes than this machine has GPUs, or cores if it has no GPU."""
    gpus = _gpus(config)
    if processes <= (gpus or available_cores()):
        return
    workers = "islands.local" if config.islands.local else "diloco.workers"
    given = f"{workers} = {flat_settings(config)[workers]}"
    if config.parallel.fsdp > 1:
        given = f"{given} x parallel.fsdp = {config.parallel.fsdp}"
    if nproc := os.environ.get("NPROC"):
        given = f"NPROC={nproc}"
    devices = counted(gpus, "GPU") if gpus else counted(available_cores(), "core")
    say(
        f"warning: {given}: this machine would start {processes} processes and has {devices}, "
        "which they share: start fewer, or use more machines"
    )


def configure_torchrun(
    config: Config, nodes: Nodes, arguments: list[str]
) -> tuple["LaunchConfig", list[str]]:
    """Return torchrun's configuration and the arguments of the ranks."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    count = nodes.total
    is_local = nodes.is_local
    processes = processes_of_node(config, count)
    rendezvous: dict[str, Any] = {"timeout": config.distributed.init_timeout_seconds}
    if count > 1:
        rendezvous["rank"] = nodes.rank
    os.environ[LAUNCHER] = str(os.getpid())
    # FSDP2, NCCL and the outer loop have more streams than the 8 queues of a GPU's default.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    processes_here = processes * count if is_local else processes
    _warn_if_crowded(config, processes_here)
    if processes_here > 1:
        _share_cores(processes_here)
    if is_local and (processes > 1 or count > 1):
        os.environ.setdefault(GLOO_INTERFACE, LOOPBACK)
    # A variable, as LaunchConfig has it only from torch 2.12 on. Before, 30 s are fixed.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    handled = [
        number.name
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # as under nohup
    ]
    launch = LaunchConfig(
        min_nodes=count,
        max_nodes=count,
        nproc_per_node=processes,
        run_id=new_run_id() if count == 1 else NO_RUN_ID,
        rdzv_backend="c10d" if count == 1 else "static",
        rdzv_endpoint=nodes.endpoint,
        rdzv_configs=rendezvous,
        local_addr="localhost" if is_local else None,
        max_restarts=config.run.restarts,
        signals_to_handle=",".join(handled),
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    return launch, [word.replace("$", "$$") for word in arguments]  # torch expands ${local_rank}


# --- ends -----------------------------------------------------------------------------------------


def follow_launcher() -> None:
    """End this rank when torchrun's agent ends, on Linux, and let the launcher reach it."""
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # until training starts, which has a file for them
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
        if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
            sys.exit(1)  # it has ended already
        _leave_message(RANK_MESSAGE.format(os.environ["LOCAL_RANK"]), os.getpid())


def end_run(code: int) -> None:
    """End the run on this node with an exit code. Otherwise, torchrun's agent would start it again
    or, after code 0, take it for finished. Without our launcher, torchrun chooses the code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _leave_message(EXIT_CODE, code)
        os.kill(os.getppid(), signal.SIGTERM)


def _leave_message(name: str, number: int) -> None:
    if folder := os.environ.get(MESSAGES):
        with suppress(OSError):  # a full disk, or the launcher has ended: it does without
            if os.environ.get(LAUNCHER) == str(os.getppid()):
                Path(folder).mkdir(mode=0o700, exist_ok=True)  # somebody has cleaned up
            Path(folder, name).write_text(str(number))


def _pass_to_ranks(number: int, _frame: object) -> None:
    """Send a signal to the ranks of this node, if they have started."""
    if folder := os.environ.get(MESSAGES):
        for message in Path(folder).glob(RANK_MESSAGE.format("*")):
            with suppress(OSError, ValueError):  # it has ended, or is writing its message
                os.kill(int(message.read_text()), number)


def describe_failures(failures: "Mapping[int, ProcessFailure]") -> tuple[int, str]:
    """Return the exit code of the run, and which rank failed and how: the first that was neither
    asked to stop nor lost another one, if there is one.
    """
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    consequences = (WORKER_LOST, -signal.SIGTERM)
    causes = {rank: code for rank, code in codes.items() if code not in consequences}
    rank, code = next(iter((causes or codes).items()))
    if code > 0:
        return code, f"rank {rank} failed with exit code {code}"
    hint = ""
    if code == -signal.SIGKILL:
        hint = " (often by the system, when memory runs out: lower training.batch_size)"
    return 128 - code, f"rank {rank} was ended by {signal.Signals(-code).name}{hint}"


def _fail(text: str, code: int) -> int:
    say(f"error: {text}")
    return code


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
