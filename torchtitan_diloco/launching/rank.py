"""A training process: its settings, its connections, its trainer, and its exit code."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch

from torchtitan_diloco.base.hardware import GLOO_INTERFACE, raise_open_files_limit
from torchtitan_diloco.base.log import logger, start_logging
from torchtitan_diloco.base.messages import TransferError, gather_objects
from torchtitan_diloco.base.process import say
from torchtitan_diloco.base.user import (
    WORKER_LOST,
    PeersLostError,
    UserError,
    cause_of,
    command_line,
)
from torchtitan_diloco.config import Config, ConfigError, from_command_line
from torchtitan_diloco.config.schema import Run
from torchtitan_diloco.distributed.collectives import RanksLostError, naming_lost_ranks
from torchtitan_diloco.distributed.job import Job
from torchtitan_diloco.distributed.world import World, join_world, leave_world
from torchtitan_diloco.launching.launch import LAUNCHER, end_run, folder_of_run
from torchtitan_diloco.launching.preflight import check_inputs
from torchtitan_diloco.trainer import Trainer

MOST_STARTS = 2
"""Consecutive starts without a completed step after which a run is not started again."""
MEMORY_RAN_OUT = "out of memory: the system has killed a process of this machine"


def train(arguments: list[str]) -> int:
    """Train with the settings of a command line, and return the exit code."""
    try:
        config = from_command_line(arguments)
    except ConfigError as error:
        return _report(error)
    raise_open_files_limit()
    start_logging()
    set_determinism(config.run)
    job = Job(None)
    try:
        with connecting(config):
            job = Job.of_torchrun(timedelta(seconds=config.distributed.init_timeout_seconds))
        return _train(config, job)
    except UserError as error:
        return _report(error, job)
    except (MemoryError, RuntimeError) as error:
        if mistake := job.mistake_of_others():  # which is why this rank has lost another one
            return _report(mistake, job)
        if is_out_of_memory(error):
            text = f"out of memory ({cause_of(error)}): {memory_remedy(config)}"
            return _report(UserError(text), job)
        if not isinstance(error, PeersLostError):
            raise
        cause = f"{MEMORY_RAN_OUT}: {memory_remedy(config)}; " if job.memory_has_run_out() else ""
        _print_error(error, cause)
        return WORKER_LOST


def _train(config: Config, job: Job) -> int:
    """Train with these settings, and return the exit code."""
    _log_restart(config, job)
    check_inputs(config)  # the launcher has done so, but not torchrun
    if config.islands.local:
        raise UserError(
            f"islands.local = {config.islands.local}: a process of torchrun starts no islands: run "
            f"`{command_line('train')}` with the same settings instead"
        )
    if config.islands.sync and LAUNCHER not in os.environ:
        raise UserError(
            "islands.sync = true: torchrun starts no syncer: remove this setting, and run "
            f"`{command_line('islands')} sync {config.islands.join}`"
        )
    config = replace(config, run=replace(config.run, folder=folder_of_run(config)))
    world = join(config)
    job.begin()
    with naming_lost_ranks(world, "at the start"):
        trainer = Trainer(config, world, note_step=job.complete_step)
    trainer.run()
    # All ranks close their files before a launcher ends them, and learn here of a signal that came
    # after their last question. One that has left has nothing more to write.
    stops = [trainer.knows_of_stop]
    with suppress(TransferError):
        stops = gather_objects(trainer.knows_of_stop, world.control)
    leave_world(world)
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    if trainer.got_signal or not any(stops) or not is_first_here:
        return 0
    # The agents of nodes that got a signal do not come to torch's barrier at the end, where this
    # one would wait for them. Code 143 has the run started again on all nodes.
    code = 0 if trainer.has_ended else 128 + signal.SIGTERM
    end_run(code)
    return code


def _log_restart(config: Config, job: Job) -> None:
    """Log that the run was started again. Raise if the last starts have completed no step."""
    if not (restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))):
        return
    cause = f"; {MEMORY_RAN_OUT}: {memory_remedy(config)}" if job.memory_had_run_out else ""
    if job.starts_without_step >= MOST_STARTS:
        raise UserError(
            f"{MOST_STARTS} starts in a row ended before their first step, so the run is not "
            f"started again: correct what the first error above names{cause}"
        )
    limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
    logger.warning(f"started again after a crash: restart {restarts} of {limit}{cause}")


def memory_remedy(config: Config) -> str:
    return (
        f"lower training.batch_size = {config.training.batch_size}, training.sequence_length = "
        f"{config.training.sequence_length} or the size of the model, or use more ranks per worker"
    )


def join(config: Config) -> World:
    """Connect to the other processes of the run."""
    with connecting(config):
        return join_world(
            config.distributed,
            config.diloco.link,
            device=config.run.device,
            workers=config.workers_of_job,
            fsdp=config.parallel.fsdp,
            outer_loop=config.diloco.method != "none",
        )


@contextmanager
def connecting(config: Config) -> Iterator[None]:
    """Convert a failure of the body, which connects to other processes, into one that names the
    network interface."""
    started = time.monotonic()
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):  # for example, a GPU that is in use
        raise
    except RuntimeError as error:
        key = "diloco.link.interface"
        interface = config.diloco.link.interface
        if not interface and (interface := os.environ.get(GLOO_INTERFACE, "")):
            key = GLOO_INTERFACE
        interface = interface or "default"
        raise RanksLostError(
            f"could not connect to all other processes over the {interface} interface "
            f"(failed after {time.monotonic() - started:.0f} s, distributed.init_timeout_seconds = "
            f"{config.distributed.init_timeout_seconds}): if no other console has an earlier "
            f"error, set {key} to one that leads to the other nodes, and open its "
            f"ports (docs/troubleshooting.md) ({cause_of(error)})"
        ) from error


def set_determinism(run: Run) -> None:
    torch.manual_seed(run.seed)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _report(error: UserError, job: Job | None = None) -> int:
    """Print a mistake of the user, end the run, and return the exit code.

    If all ranks have the same error, the first rank of each machine prints it, and the launcher
    ends the others. A rank that is still alive after ten seconds has an error of its own.
    """
    if job is not None:
        job.leave_mistake(error)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    _print_error(error)
    end_run(error.exit_code)
    return error.exit_code


def is_out_of_memory(error: Exception) -> bool:
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or "can't allocate memory" in str(error)  # torch has no type for it on the CPU


def _print_error(error: Exception, cause: str = "") -> None:
    rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    text = "; ".join([str(error), *getattr(error, "__notes__", [])])
    say(f"{rank}error: {cause}{text}")
