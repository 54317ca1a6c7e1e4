"""What training asks of a model, which is an `nn.Module` for a single device.

`forward(tokens, head=F.linear)` returns `head(hidden, output_matrix)` of tokens [batch, length], by
default the logits. `blocks` is an `nn.ModuleList` of equal modules: the units of sharding,
activation checkpointing, compilation and fragments. A model has no buffers: it is built on the meta
device, and `forward` computes what else it needs. The following members are optional; without them,
the functions below have a default:

    initial_std(name, parameter)    standard deviation of the initial values of a matrix
    flops_per_token(length)         FLOPs of a forward and backward pass
    extra_repr()                    dimensions, for the log
    end_of_document                 token after which attention begins anew; None: it never does
    new_cache(lengths, new_tokens)  what `forward(tokens, head, cache)` remembers of the tokens that
                                    it has read, such as a `KeyValueCache`
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_diloco.base.user import UserError

Head = Callable[[Tensor, Tensor], Any]
"""Called with the last hidden states [batch, length, width] and the output matrix [vocabulary,
width]."""
STD = 0.02
"""Default of `initial_std`."""


def check_model(model: nn.Module) -> None:
    """Raise a UserError if a model cannot be sharded and initialized."""
    name = type(model).__name__
    if not isinstance(getattr(model, "blocks", None), nn.ModuleList):
        raise UserError(f"{name} has no `blocks`: put its layers in an nn.ModuleList of this name")
    for buffer, _ in model.named_buffers():
        raise UserError(f"{name} has a buffer, {buffer}: compute it in `forward`")


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the equal units of sharding, checkpointing, compilation and fragments."""
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def describe(model: nn.Module) -> str:
    """Return the dimensions of a model, or else the name of its class."""
    return model.extra_repr() or type(model).__name__


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters: "total", and "embedding" for those in matrices outside the
    blocks, which are the embedding and the head."""
    in_blocks = set(blocks_of(model).parameters())
    others = [parameter for parameter in model.parameters() if parameter not in in_blocks]
    return {
        "total": sum(parameter.numel() for parameter in model.parameters()),
        "embedding": sum(parameter.numel() for parameter in others if parameter.dim() > 1),
    }


def flops_per_token(model: nn.Module, length: int) -> int:
    """Return the FLOPs of a token's forward and backward pass, in sequences of `length` tokens.

    They are counted as in PaLM: 6 per weight in a matrix product and 12 x layers x heads x head_dim
    x length for attention. Default: 6 per parameter.
    """
    if not hasattr(model, "flops_per_token"):
        return 6 * parameter_counts(model)["total"]
    flops: int = model.flops_per_token(length)  # type: ignore[operator]
    return flops


class Cache(Protocol):
    """What a model remembers of the tokens that it has read.

    Its `forward` first reads the beginnings of all rows, padded on the right to one length, and
    after that one more token of each row at a time.
    """

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these."""


def new_cache(model: nn.Module, lengths: Sequence[int], new_tokens: int) -> Cache | None:
    """Return a cache to read rows with. None: the model has none, and reads whole rows each time.

    `lengths`: of the beginnings of the rows. `new_tokens`: the most tokens that follow each.
    """
    if not hasattr(model, "new_cache") or getattr(model, "end_of_document", None) is not None:
        return None  # a token after the end of a document attends to nothing before it
    cache: Cache = model.new_cache(lengths, new_tokens)  # type: ignore[operator]
    return cache


def separate_documents(model: nn.Module, end_of_document: int | None) -> None:
    """Make attention begin anew after each token `end_of_document`. None: never."""
    if not hasattr(model, "end_of_document"):
        reason = "does not read end_of_document, so it cannot separate documents"
        raise UserError(
            f"model.document_mask = true: {type(model).__name__} {reason}: set it to false"
        )
    model.end_of_document = end_of_document  # type: ignore[assignment]


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Initialize matrices at random, biases with 0 and other vectors with 1.

    A value depends on the seed and the name of its parameter only, so the order of the parameters
    and their sharding do not matter.
    """
    for name, parameter in model.named_parameters():
        constant = 0.0 if name.endswith("bias") else 1.0
        value = torch.full(parameter.shape, constant, device=parameter.device)
        if parameter.dim() > 1:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator(parameter.device)
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            value.normal_(0.0, initial_std(model, name, parameter), generator=generator)
        copy_shard(parameter, value)


def initial_std(model: nn.Module, name: str, parameter: Tensor) -> float:
    """Return the standard deviation of the initial values of a matrix."""
    if not hasattr(model, "initial_std"):
        return STD
    std: float = model.initial_std(name, parameter)  # type: ignore[operator]
    return std


def copy_shard(parameter: Tensor, value: Tensor) -> None:
    """Copy this rank's shard of a value that all ranks have in full, without communication."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(value)
