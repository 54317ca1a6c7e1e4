"""The interface of a model family: all that the rest of the package uses of a model."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_diloco.config.schema import Model

Head = Callable[[Tensor, Tensor], Any]
"""Called with the last hidden states [batch, length, width] and the output matrix [vocabulary,
width]."""


class LanguageModel(nn.Module, ABC):
    """Decoder for a single device. parallelize.py applies parallelism from outside."""

    shape: object
    """Dimensions, which are printed."""
    blocks: nn.ModuleList
    """Units of sharding, activation checkpointing, compilation and fragments, of one shape."""

    def __init__(self, config: Model, vocab_size: int, sequence_length: int) -> None:
        super().__init__()
        self.config, self.vocab_size, self.sequence_length = config, vocab_size, sequence_length

    @abstractmethod
    def forward(self, tokens: Tensor, head: Head = F.linear) -> Any:
        """Return the logits of tokens [batch, length], or what `head` makes of the last hidden
        states and the output matrix."""

    @abstractmethod
    def initial_std(self, name: str, parameter: Tensor) -> float:
        """Return the standard deviation of the initial values of a matrix. Vectors start as 1."""

    @abstractmethod
    def parameter_counts(self) -> dict[str, int]:
        """Return the number of all parameters ("total"), and of those in embeddings."""

    @abstractmethod
    def flops_per_token(self, length: int) -> int:
        """Return the operations of one token's forward and backward pass, counted as in PaLM: 6 per
        weight in a matrix product and 12 x layers x heads x head_dim x length for attention."""

    def to_transformers(self) -> Any:
        """Return the model as one of the package transformers, with the same parameters."""
        raise ValueError(
            f'--format hf: model.name = "{self.config.name}" has no form in transformers: use '
            "--format safetensors"
        )

    def transformers_names(self) -> dict[str, str]:
        """Return the name of each parameter in files of transformers."""
        return {name: name for name, _ in self.named_parameters()}

    def differing_settings(self, _config: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the settings of [model] that differ in a config.json of transformers, which is of
        this family, and their values there."""
        return {}

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize the parameters. A value depends on the seed and on the parameter's name only,
        not on the order of the parameters or on how they are sharded."""
        for name, parameter in self.named_parameters():
            value = torch.ones(parameter.shape, device=parameter.device)
            if parameter.dim() > 1:
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator(parameter.device)
                generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                value.normal_(0.0, self.initial_std(name, parameter), generator=generator)
            copy_shard(parameter, value)


def copy_shard(parameter: Tensor, value: Tensor) -> None:
    """Copy this rank's shard of a value, which all ranks have in full: nothing is sent."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    parameter.copy_(value)
