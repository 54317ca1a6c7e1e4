"""Parallelism inside a worker: activation checkpointing, compile and FSDP2, in this order."""

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from torchtitan_diloco.config.schema import ActivationCheckpoint, Compile, Parallel
from torchtitan_diloco.models.base import LanguageModel


def parallelize(
    model: LanguageModel,
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
    mode, every = activation_checkpoint.mode, activation_checkpoint.every
    reshard = parallel.reshard_after_forward
    for index, block in enumerate(model.blocks):
        if mode == "full" or (mode == "every_nth" and index % every == 0):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if compile.enable:
            # Equal blocks share one compilation. Compiling only `forward` keeps FSDP's hooks
            # outside, and the names of the parameters.
            block.forward = torch.compile(block.forward, fullgraph=True)
    if mesh is None:
        return
    reshard_blocks = {"always": True, "never": False, "auto": mesh.size(-1) > 1}[reshard]
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        # Hidden states already have the compute dtype, and rotary angles must stay fp32.
        cast_forward_inputs=False,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_blocks)
    # The root has the embedding, final norm and tied head. The backward pass needs them first.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def materialize(model: LanguageModel, device: torch.device, seed: int) -> None:
    """Move the model from the meta device to `device` and initialize it."""
    model.to_empty(device=device)
    model.init_weights(seed)
