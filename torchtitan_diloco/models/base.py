"""The interface of a model."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_diloco.config.schema import Model

Head = Callable[[Tensor, Tensor], Any]
"""Called with the last hidden states [batch, length, width] and the output matrix [vocabulary,
width]."""


class LanguageModel(nn.Module, ABC):
    """Model for a single device. parallelize.py applies parallelism."""

    shape: object
    """Dimensions, for the log."""
    blocks: nn.ModuleList
    """Equal units of sharding, activation checkpointing, compilation and fragments."""
    separates_documents: ClassVar[bool] = False
    """Whether `forward` reads `end_of_document`."""
    end_of_document: int | None = None
    """Token after which attention begins anew. None: it reaches back to the first token."""

    def __init__(self, config: Model, vocab_size: int, sequence_length: int) -> None:
        super().__init__()
        self.config, self.vocab_size, self.sequence_length = config, vocab_size, sequence_length

    @abstractmethod
    def forward(self, tokens: Tensor, head: Head = F.linear) -> Any:
        """Return `head(hidden, output_matrix)` of tokens [batch, length], by default the logits."""

    @abstractmethod
    def initial_std(self, name: str, parameter: Tensor) -> float:
        """Return the standard deviation of the initial values of a matrix. Vectors start at 1."""

    @abstractmethod
    def parameter_counts(self) -> dict[str, int]:
        """Return the number of parameters: "total", and "embedding" for those in embeddings."""

    @abstractmethod
    def flops_per_token(self, length: int) -> int:
        """Return the FLOPs of a token's forward and backward pass, counted as in PaLM: 6 per weight
        in a matrix product and 12 x layers x heads x head_dim x length for attention."""

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize each parameter from the seed and its name only, so that the order of the
        parameters and their sharding do not matter."""
        for name, parameter in self.named_parameters():
            value = torch.ones(parameter.shape, device=parameter.device)
            if parameter.dim() > 1:
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator(parameter.device)
                generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                value.normal_(0.0, self.initial_std(name, parameter), generator=generator)
            copy_shard(parameter, value)


def copy_shard(parameter: Tensor, value: Tensor) -> None:
    """Copy this rank's shard of a value that all ranks have in full, without communication."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    parameter.copy_(value)
