"""Makes a single-device decoder a parallel one, in one fixed order: checkpointing -> compile -> FSDP2 -> weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from torchtitan_diloco.config.schema import ActivationCheckpoint, Compile, Parallel
from torchtitan_diloco.models.chinchilla.model import Decoder


def parallelize(
    model: Decoder,
    mesh: DeviceMesh | None,
    *,
    parallel: Parallel,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    compute_dtype: torch.dtype,
) -> None:
    """Changes `model` (on the meta device) in place. `mesh` is what FSDP2 shards over: 1-d (fsdp), or 2-d
    (worker, fsdp) for data parallelism over workers; None for a single process."""
    if activation_checkpoint.mode != "none":
        apply_activation_checkpoint(model, activation_checkpoint)
    if compile.enable:
        apply_compile(model)
    if mesh is not None:
        apply_fsdp(model, mesh, parallel, compute_dtype)


def apply_activation_checkpoint(model: Decoder, config: ActivationCheckpoint) -> None:
    every = 1 if config.mode == "full" else config.every
    for index, block in enumerate(model.blocks):
        if index % every == 0:
            _replace_forward(block, partial(checkpoint, block.forward, use_reentrant=False))


def apply_compile(model: Decoder) -> None:
    """Block by block: the blocks are alike, so one compilation serves them all. Only `forward` is compiled, so that
    FSDP's hooks stay outside and parameters keep their names."""
    for block in model.blocks:
        _replace_forward(block, torch.compile(block.forward, fullgraph=True))


def _replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward


def apply_fsdp(
    model: Decoder, mesh: DeviceMesh, parallel: Parallel, compute_dtype: torch.dtype
) -> None:
    several_ranks = mesh.size(-1) > 1
    reshard = {"always": True, "never": False, "auto": several_ranks}[
        parallel.reshard_after_forward
    ]
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        # The hidden states leave the embedding in the compute dtype already, and the rotary angles must stay fp32.
        cast_forward_inputs=False,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # The root holds embedding, final norm and tied head, which the backward pass needs first: never freed in between.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def materialize(model: Decoder, device: torch.device, seed: int) -> None:
    """Meta -> device, with the same initial weights whatever the number of processes."""
    model.to_empty(device=device)
    model.init_weights(seed, write=_write_shard)


def _write_shard(parameter: Tensor, value: Tensor) -> None:
    """Each rank has made the same full value and keeps its own part of it: nothing is sent."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(value)
