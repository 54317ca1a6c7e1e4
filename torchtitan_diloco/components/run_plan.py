"""Decisions that follow from the configuration: numbers of a run, and actions after a step."""

import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from torchtitan_diloco import __version__
from torchtitan_diloco.base.formatting import counted, few_digits
from torchtitan_diloco.base.hardware import (
    GIB,
    available_memory_bytes,
    describe_device,
    untested_torch,
)
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import LOCAL_ISLANDS, UserError
from torchtitan_diloco.components.optimizer import describe_inner
from torchtitan_diloco.components.traffic import RunTraffic, traffic_rows
from torchtitan_diloco.config.checks import run_warnings
from torchtitan_diloco.config.parts import OptimizerEntry
from torchtitan_diloco.config.schema import Config, Training
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.outer_state import state_bytes
from torchtitan_diloco.diloco.state_dict import saved_bytes
from torchtitan_diloco.distributed.collectives import on_all_ranks
from torchtitan_diloco.distributed.world import World

MANY_EPOCHS = 4
"""Times that text can be repeated before it helps much less than new text (arXiv 2305.16264)."""
ROUNDING = 1e-6
"""Part of a step that a place in the schedules may lack, as it is no exact number."""
PARAMETER_BYTES = 4
GRADIENT_BYTES = 4


class Counted(NamedTuple):
    """Steps and tokens of a run up to its checkpoint, from which its plan continues."""

    steps: int = 0
    tokens: int = 0
    schedule_tokens: float = 0.0
    ended_beginning: int = 0
    """Last step of `diloco.beginning`, if it was over."""


@dataclass(frozen=True)
class RunPlan:
    parameters: int
    embedding_parameters: int
    accumulation: int
    """Micro-batches of one rank in one step."""
    tokens_per_step: int
    """Tokens of all workers together."""
    total_steps: int
    schedule_steps: int = 0
    """Length of the schedules, in their steps. It is `total_steps` unless they follow tokens."""
    schedule_tokens: float = 0.0
    """Tokens of a step of the schedules, which follow them. 0: schedules follow the steps."""
    start_step: int = 0
    """Step that this process resumed from."""
    start_tokens: int = 0
    ended_beginning: int = 0
    """Last step of a beginning that was over at `start_step`."""
    ranks: int = 1
    """Ranks of all workers, also on other islands."""
    inner_bytes: float = 16
    """Average bytes of a parameter, its gradient and its state in the optimizer."""
    reduce_dtype: str = "float32"
    """Type of the gradients that data parallelism averages, as in `parallel.reduce_dtype`."""
    activation_bytes: int = 0
    """Estimate of what a rank keeps of a micro-batch for the backward pass. 0: not known."""

    def tokens_at(self, step: int) -> int:
        """Return the tokens of all workers, also of earlier starts with other batches."""
        return self.start_tokens + (step - self.start_step) * self.tokens_per_step

    def scheduled_step(self, step: int) -> float:
        """Return the place of a step in schedules of `schedule_steps` steps."""
        if not self.schedule_tokens:
            return step
        if step < self.start_step:  # steps had these tokens before the first change
            return min(step, self.start_tokens / self.schedule_tokens)
        return min(self.tokens_at(step) / self.schedule_tokens, self.schedule_steps)

    def step_at(self, place: float) -> int:
        """Return the last step that has at most this place in the schedules.

        The steps before this start may have had several sizes. A beginning ends where it has ended.
        """
        if not self.schedule_tokens:
            return int(place)
        tokens = place * self.schedule_tokens - self.start_tokens
        if tokens < 0:
            return self.ended_beginning or min(int(place), self.start_step)
        return self.start_step + math.floor(tokens / self.tokens_per_step + ROUNDING)


def plan_run(
    training: Training,
    ranks: int,
    parameters: int,
    embedding_parameters: int,
    *,
    optimizer: OptimizerEntry,
    before: Counted | None = None,
    reduce_dtype: str = "float32",
    activation_bytes: int = 0,
) -> RunPlan:
    """Compute the numbers of a run.

    If the run is measured in tokens, and earlier steps had others, its schedules follow the tokens,
    in steps of the size that steps had before the first change: so none of them jumps.

    `before`: what the run has counted up to this start.
    """
    micro_batches = accumulation(training, ranks)
    tokens_per_step = micro_batches * ranks * training.batch_size * training.sequence_length
    before = before or Counted()
    start_step = before.steps
    start_tokens = before.tokens
    schedule_tokens = before.schedule_tokens
    tokens = training.tokens or training.tokens_per_parameter * parameters
    steps_left = max(0, math.ceil((tokens - start_tokens) / tokens_per_step))
    total_steps = training.steps or start_step + steps_left
    schedule_steps = total_steps
    if training.steps:
        schedule_tokens = 0.0
    elif schedule_tokens or start_tokens != start_step * tokens_per_step:
        schedule_tokens = schedule_tokens or start_tokens / start_step
        schedule_steps = math.ceil(tokens / schedule_tokens)
    if total_steps < start_step:
        raise UserError(
            f"the run has {total_steps} steps by [training], and its checkpoint is of step "
            f"{start_step}: make the run longer, or choose another run.folder"
        )
    block_share = 1 - embedding_parameters / parameters
    return RunPlan(
        parameters=parameters,
        embedding_parameters=embedding_parameters,
        accumulation=micro_batches,
        tokens_per_step=tokens_per_step,
        total_steps=total_steps,
        schedule_steps=schedule_steps,
        schedule_tokens=schedule_tokens,
        start_step=start_step,
        start_tokens=start_tokens,
        ended_beginning=before.ended_beginning,
        ranks=ranks,
        inner_bytes=PARAMETER_BYTES + GRADIENT_BYTES + optimizer.mean_state_bytes(block_share),
        reduce_dtype=reduce_dtype,
        activation_bytes=activation_bytes,
    )


def accumulation(training: Training, ranks: int) -> int:
    """Return the micro-batches of one rank in one step."""
    share = ranks * training.batch_size
    sequences = training.global_batch_size or share
    if sequences % share:
        raise UserError(
            f"training.global_batch_size = {sequences} is not a multiple of {ranks} processes x "
            f"training.batch_size = {training.batch_size}: {(sequences // share + 1) * share} is"
        )
    return sequences // share


class AfterStep(NamedTuple):
    """What is known after a training step, the same on every rank."""

    step: int
    finished: bool = False
    """All tokens of the run have been trained."""
    paused: bool = False
    """`training.stop_after` was reached before."""
    asked_to_stop: bool = False
    """Somebody who sent a signal is waiting, or a machine is taken away."""
    asked_to_save: bool = False

    @property
    def stops(self) -> bool:
        return self.finished or self.paused or self.asked_to_stop

    def is_multiple_of(self, steps: int) -> bool:
        """Return whether something that is done every so many steps is due. 0: never."""
        return steps > 0 and self.step % steps == 0

    def is_measured(self, every: int) -> bool:
        """Return whether to measure the shared parameters, which is done every so many steps and
        after the last one. Whoever asked to stop is waiting. 0: never."""
        if self.finished:
            return every > 0
        return self.is_multiple_of(every) and not self.asked_to_stop


def log_plan(
    plan: RunPlan,
    config: Config,
    world: World,
    model: str,
    data: str,
    epochs: Mapping[str, float],
    traffic: RunTraffic,
) -> None:
    """Log how the numbers of the run are derived, one line each, and warnings. Raise if it does not
    fit into memory. `epochs`: times that the run reads each corpus."""
    training = config.training
    ranks = world.ranks_per_worker
    start = plan.start_step
    workers = plan.ranks // ranks
    ranks_here = f", of which {counted(world.size, 'rank')} here" if plan.ranks > world.size else ""
    gib = plan.inner_bytes * plan.parameters / ranks / GIB
    activations = "without activations"
    if plan.activation_bytes:
        activations = f"and about {plan.activation_bytes / GIB:.2f} GiB for activations"
    total_tokens = plan.tokens_at(plan.total_steps)
    tokens_of_step = f"{plan.tokens_per_step:,}"
    steps = f"x {tokens_of_step} tokens"
    if start:
        steps = f"({plan.start_tokens:,} tokens up to step {start:,}, then {tokens_of_step} a step)"
    lines = {
        "version": f"torchtitan_diloco {__version__}, torch {torch.__version__}, "
        f"{describe_device(world.device)}",
        "model": f"{model}: {plan.parameters:,} parameters, {plan.embedding_parameters:,} of "
        "them embedding",
        "data": data,
        "step": f"{counted(workers, 'worker')} x {counted(ranks, 'rank')} x "
        f"{counted(plan.accumulation, 'micro-batch', 'micro-batches')} x "
        f"{counted(training.batch_size, 'sequence')} x "
        f"{counted(training.sequence_length, 'token')} = {tokens_of_step} tokens{ranks_here}",
        "run": f"{counted(plan.total_steps, 'step')} {steps} = {total_tokens:,} tokens = "
        f"{few_digits(total_tokens / plan.parameters, 1)} per parameter, {epochs_text(epochs)}",
        "inner": describe_inner(
            config.optimizer, config.lr_schedule, plan.total_steps, plan.schedule_steps
        ),
        "memory": f"{plan.parameters:,} parameters x {plan.inner_bytes:.3g} bytes / "
        f"{counted(ranks, 'rank')} = {gib:.2f} GiB a rank for parameters, gradients and "
        f"optimizer, {activations}",
        # How long a step takes is not known yet.
        **traffic_rows(traffic.parties(1.0), config.price, condition=" at steps of 1 s"),
    }
    for name, text in lines.items():
        logger.info(f"{name:<10} {text}")
    check_memory(plan, world, config)
    if world.is_first:
        warnings = [
            untested_torch(str(torch.__version__)),
            *run_warnings(config, plan.total_steps, plan.start_step),
            *_repetition(plan, config, epochs),
        ]
        for warning in filter(None, warnings):
            logger.warning(warning)


def epochs_text(epochs: Mapping[str, float]) -> str:
    """Say how often each corpus is read."""
    if len(epochs) == 1:
        return f"{few_digits(next(iter(epochs.values())), 2)} epochs"
    return ", ".join(f"{name}: {few_digits(count, 2)} epochs" for name, count in epochs.items())


def _repetition(plan: RunPlan, config: Config, epochs: Mapping[str, float]) -> Iterator[str]:
    """Yield a warning if the run reads corpora more often than helps it."""
    repeated = {name: count for name, count in epochs.items() if count > MANY_EPOCHS}
    if not repeated:
        return
    read = []
    for name, count in repeated.items():
        named = f'data.corpus = "{name}"' if name == config.data.corpus else f'"{name}"'
        read.append(f"{named} {count:,.1f} times")
    remedy = "use larger corpora, or smaller weights"
    if len(epochs) == 1:
        steps = max(1, math.floor(plan.total_steps * MANY_EPOCHS / max(repeated.values())))
        remedy = f"use a larger corpus, or a shorter run (--training.steps {steps})"
    yield (
        f"the run reads all of {', '.join(read)}. After {MANY_EPOCHS} epochs, repeated text helps "
        f"much less than new text: {remedy}"
    )


def check_memory(plan: RunPlan, world: World, config: Config) -> None:
    """Raise if what the ranks on this machine need does not fit into its memory: the system would
    kill them. A GPU raises an error itself."""
    if world.device.type == "cpu":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        state = state_on_host(
            plan,
            config.diloco,
            workers=ranks / world.ranks_per_worker,
            saves=config.checkpoint.is_used,
        )

        def check() -> None:
            check_host_memory(plan, state)
            check_host_activations(plan, state, config, ranks=ranks)

        on_all_ranks(world.control, check)


def state_on_host(
    plan: RunPlan, diloco: DiLoCoConfig, *, workers: float = 1.0, saves: bool = True
) -> dict[str, float]:
    """Return the bytes that so many workers hold in the memory of this machine, by what they are.

    `saves`: whether the run saves checkpoints, for which it copies its state.
    """
    has_outer_loop = diloco.method != "none"
    bytes_per_parameter = {"parameters, gradients and optimizer": workers * plan.inner_bytes}
    if has_outer_loop:
        bytes_per_parameter["outer state"] = workers * state_bytes(diloco)
    if saves:
        saving = workers if has_outer_loop else min(workers, 1.0)  # else only worker 0 saves
        copied = plan.inner_bytes - GRADIENT_BYTES + has_outer_loop * saved_bytes(diloco)
        bytes_per_parameter["copies of a save"] = saving * copied
    return {name: bytes_each * plan.parameters for name, bytes_each in bytes_per_parameter.items()}


def check_host_memory(plan: RunPlan, state: Mapping[str, float]) -> None:
    """Raise if this machine has no room for the `state_on_host` of its workers."""
    needed = sum(state.values())
    if needed <= (available := available_memory_bytes()):
        return
    parts = [f"{size / GIB:.1f} {name}" for name, size in state.items()]
    raise UserError(
        f"{plan.parameters:,} parameters need {needed / GIB:.1f} GiB on this machine "
        f"({' + '.join(parts)}; activations come on top), and {available / GIB:.1f} GiB are "
        "available: use more machines per worker, or a smaller model (--config 35m, or --config "
        "debug to try)"
    )


def check_host_activations(
    plan: RunPlan, state: Mapping[str, float], config: Config, *, ranks: int
) -> None:
    """Raise if the activations of so many ranks do not fit into the memory of this machine, and
    warn if they do not fit beside the `state_on_host` of its workers."""
    batch_size = config.training.batch_size
    needed = ranks * plan.activation_bytes
    available = available_memory_bytes()
    bytes_left = available - sum(state.values())
    if needed <= bytes_left:
        return
    fitting = math.floor(batch_size * max(0.0, bytes_left) / needed)
    remedy = f"lower it to {fitting}" if fitting else "lower training.sequence_length and it"
    problem = (
        f"training.batch_size = {batch_size}: the activations of {counted(ranks, 'rank')} need "
        f"about {needed / GIB:.1f} GiB on this machine, of which {available / GIB:.1f} GiB are "
        f'available: {remedy}, or set activation_checkpoint.mode = "full"'
    )
    if needed > available and not config.compile.enable:  # which makes them smaller
        raise UserError(problem)
    logger.warning(problem)


def log_early_end(config: Config, folder: Path, step: int, describe: Callable[[str], str]) -> None:
    """Log where a run stopped before its last step, and how to resume it.

    `describe`: says where, with the reason that it is given.
    """
    folder = Path(os.environ.get(LOCAL_ISLANDS, folder))
    stop_after = config.training.stop_after
    is_paused = 0 < stop_after <= step
    if is_paused:
        reason = f"training.stop_after = {stop_after}"
        command = "with a later one or none, the same command"
    else:
        reason = "a signal"
        command = "the same command"
    is_saved = is_paused or config.checkpoint.at_end
    option = f"--run.folder {shlex.quote(str(folder))}"
    hint = f"; {command} with {option} resumes it" if is_saved else ""
    logger.info(f"{describe(reason)}{hint}")
