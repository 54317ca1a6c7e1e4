"""The numbers a run follows from its configuration, and the derivation of them that is printed at start."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan_diloco import __version__
from torchtitan_diloco.config.schema import Model, Training
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.planner.memory import INNER_BYTES
from torchtitan_diloco.utils import GIB, describe_device, logger


@dataclass(frozen=True)
class RunPlan:
    parameters: int
    embedding_parameters: int
    accumulation: int
    """Micro-batches of one rank in one step."""
    tokens_per_step: int
    """Of all workers together."""
    total_steps: int
    start_step: int = 0
    """Where this process took up the run."""
    start_tokens: int = 0

    def tokens_at(self, step: int) -> int:
        """Of all workers together, the steps before a restart with another batch size included."""
        return self.start_tokens + (step - self.start_step) * self.tokens_per_step


def plan_run(
    training: Training,
    world: World,
    parameters: int,
    embedding_parameters: int,
    *,
    start_step: int = 0,
    start_tokens: int = 0,
) -> RunPlan:
    share = world.size * training.batch_size
    sequences = training.global_batch_size or share
    if sequences % share:
        raise ValueError(
            f"training.global_batch_size = {sequences} is not a multiple of {world.size} processes x "
            f"training.batch_size = {training.batch_size}: the nearest that fit are "
            f"{sequences // share * share or share} and {(sequences // share + 1) * share}"
        )
    tokens_per_step = sequences * training.sequence_length
    tokens = training.tokens or training.tokens_per_parameter * parameters
    total_steps = training.steps or start_step + math.ceil(
        (tokens - start_tokens) / tokens_per_step
    )
    accumulation = sequences // share
    return RunPlan(
        parameters,
        embedding_parameters,
        accumulation,
        tokens_per_step,
        total_steps,
        start_step,
        start_tokens,
    )


def vocabulary_rows(model: Model, tokenizer_vocabulary: int) -> int:
    """Rows of the embedding: what the config says, else the tokenizer's vocabulary filled up to a multiple of 64, which
    matrix units like."""
    if model.vocab_size is None:
        return -(-tokenizer_vocabulary // 64) * 64
    if model.vocab_size < tokenizer_vocabulary:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is below the tokenizer's vocabulary of {tokenizer_vocabulary}: "
            "raise it, or leave it out to take the tokenizer's"
        )
    return model.vocab_size


def log_plan(
    plan: RunPlan, training: Training, world: World, model_line: str, data_line: str, folder: Path
) -> None:
    """How the numbers of the run come about, one line each."""
    per_rank = INNER_BYTES * plan.parameters / world.ranks_per_worker
    total_tokens = plan.tokens_at(plan.total_steps)
    lines = {
        "version": f"torchtitan_diloco {__version__}, torch {torch.__version__}",
        "device": describe_device(world.device),
        "processes": f"{world.workers} workers x {world.ranks_per_worker} ranks = {world.size}",
        "model": f"{model_line}: {plan.parameters:,} parameters, {plan.embedding_parameters:,} of them embedding",
        "data": data_line,
        "step": f"{world.workers} workers x {world.ranks_per_worker} ranks x {plan.accumulation} micro-batches x "
        f"{training.batch_size} sequences x {training.sequence_length:,} tokens = {plan.tokens_per_step:,} tokens",
        "run": f"{plan.total_steps:,} steps {_step_line(plan)} = {total_tokens:,} tokens = "
        f"{total_tokens / plan.parameters:.1f} a parameter",
        "memory": f"{plan.parameters:,} parameters x {INNER_BYTES} bytes / {world.ranks_per_worker} ranks = "
        f"{per_rank / GIB:.2f} GiB a rank for parameters, gradients and optimizer; activations come on top",
        "folder": str(folder),
    }
    for name, text in lines.items():
        logger.info(f"{name:<10} {text}")


def _step_line(plan: RunPlan) -> str:
    if not plan.start_step:
        return f"x {plan.tokens_per_step:,} tokens"
    return f"({plan.start_tokens:,} tokens up to step {plan.start_step:,}, then {plan.tokens_per_step:,} a step)"
