"""Parallelism inside a worker: activation checkpointing, compile and FSDP2, in this order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config.schema import ActivationCheckpoint, Compile, Parallel
from torchtitan_diloco.models.interface import blocks_of, init_weights

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.linear.default}
"""A product with a matrix of parameters, as autograd or a compiler sees it."""
ATTENTION = ("scaled_dot_product", "flex_attention")
"""Parts of the names of attention, whichever kernel torch chooses."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def compute_dtype(choice: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products. Parameters and optimizer state stay fp32."""
    if choice == "auto":
        choice = "bfloat16" if device.type == "cuda" else "float32"
    if choice == "bfloat16" and device.type != "cuda":
        raise UserError('parallel.compute_dtype = "bfloat16" needs a GPU: use "auto" or "float32"')
    return DTYPES[choice]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None,
    *,
    parallel: Parallel,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    compute_dtype: torch.dtype,
) -> None:
    """Apply parallelism to `model` in place, on the meta device.

    `mesh`: 1-d (fsdp), or 2-d (worker, fsdp) for data parallelism over workers; None for a single
    process.
    """
    reshard = parallel.reshard_after_forward
    for index, block in enumerate(blocks_of(model)):
        block.forward = checkpointed(block.forward, index, activation_checkpoint)
        if compile.enable:
            # Equal blocks share one compilation. Compiling only `forward` keeps FSDP's hooks
            # outside, and the names of the parameters.
            block.forward = torch.compile(block.forward, fullgraph=True)
    if mesh is None:
        return
    reshard_blocks = {"always": True, "never": False, "auto": mesh.size(-1) > 1}[reshard]
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=DTYPES[parallel.reduce_dtype],
        # Hidden states already have the compute dtype, and rotary angles must stay fp32.
        cast_forward_inputs=False,
    )
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_blocks)
    # The root has the embedding, final norm and tied head. The backward pass needs them first.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def checkpointed(
    forward: Callable[..., Any], index: int, config: ActivationCheckpoint
) -> Callable[..., Any]:
    """Return the forward pass of a block, which forgets some of its activations."""
    if config.mode == "full" or (config.mode == "every_nth" and index % config.every == 0):
        return partial(checkpoint, forward, use_reentrant=False)
    if config.mode == "selective":
        contexts = partial(selective_contexts, config.every)
        return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
    return forward


def selective_contexts(every: int) -> Any:
    """Return the contexts of a forward pass and of its recomputation, as `checkpoint` wants them.

    Attention and matrix products take almost all of the time, and element-wise operations almost
    all of the memory.
    """
    # Products so far, in the forward pass and in the recomputation. Both count alike, so both
    # decide alike for each product.
    products = {False: 0, True: 0}

    def policy(
        context: SelectiveCheckpointContext, operation: Any, *_: Any, **__: Any
    ) -> CheckpointPolicy:
        if any(name in str(operation) for name in ATTENTION):
            return CheckpointPolicy.MUST_SAVE
        if operation in PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % every:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def materialize(model: nn.Module, device: torch.device, seed: int) -> None:
    """Move the model from the meta device to `device` and initialize it."""
    model.to_empty(device=device)
    init_weights(model, seed)
