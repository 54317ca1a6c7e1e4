"""Checkpoints of torchtitan: DCP folders with the parameters of its Llama 3 or dense Qwen3.

Names and order are those of its state-dict adapters. Names of torchtitan 0.2 are read, too.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.models.decoder import shape_of

if TYPE_CHECKING:
    from torchtitan_diloco.export.dcp import Stored

EMBEDDING = "tok_embeddings.weight"
HEAD = "lm_head.weight"
MODULES = {
    "embedding": "tok_embeddings",
    "blocks": "layers",
    "out": "wo",
    "feed_forward_norm": "ffn_norm",
    "gate": "w1",
    "up": "w3",
    "down": "w2",
    "head": "lm_head",
}
PROJECTIONS = ("qkv_linear.wq", "qkv_linear.wk", "qkv_linear.wv")
OF_MODEL = ("tok_embeddings.", "layers.", "norm.", "lm_head.")
"""Beginnings of the names of parameters. The rest is of the optimizer, the loader and the run."""


def torchtitan_names(model: nn.Module) -> dict[str, dict[str, int]]:
    """Map each parameter to its parts in torchtitan: their names and numbers of rows."""
    shape = shape_of(model)
    names = {}
    kv_rows = (shape.kv_heads or shape.heads) * shape.head_dim
    rows_of = dict(zip(PROJECTIONS, (shape.heads * shape.head_dim, kv_rows, kv_rows), strict=True))
    for name, parameter in model.named_parameters():
        their_name = ".".join(MODULES.get(part, part) for part in name.split("."))
        names[name] = {their_name: parameter.shape[0]}
        if ".qkv." in their_name:
            names[name] = {their_name.replace("qkv", part): rows for part, rows in rows_of.items()}
    return names


def from_torchtitan(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """Return a part as our models have it.

    torchtitan's Llama rotates pairs of neighbors among the dimensions of a head, its Qwen3 and our
    models rotate the first half with the second.
    """
    return _reordered(model, name, value, pairs_first=True)


def to_torchtitan(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """Return a part as torchtitan has it: the inverse of `from_torchtitan`."""
    return _reordered(model, name, value, pairs_first=False)


def _reordered(model: nn.Module, name: str, value: Tensor, *, pairs_first: bool) -> Tensor:
    """Reorder the rows of each head of a query or key projection of a Llama.

    `pairs_first`: the rows are pairs of neighbors; they become first halves, then second ones.
    Otherwise the reverse.
    """
    shape = shape_of(model)
    rotated = name.endswith((f"{PROJECTIONS[0]}.weight", f"{PROJECTIONS[1]}.weight"))
    if shape.qk_norm or not rotated:
        return value
    pairs = shape.head_dim // 2
    order = (pairs, 2) if pairs_first else (2, pairs)
    reordered: Tensor = value.unflatten(0, (-1, *order)).transpose(1, 2).flatten(0, 2)
    return reordered


def current_name(name: str) -> str:
    """Return the name of today for one of torchtitan 0.2, or of today."""
    name = re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name)
    return re.sub(r"^output\.", "lm_head.", name)


def settings_of_checkpoint(shapes: dict[str, list[int]], model: nn.Module) -> dict[str, object]:
    """Return the settings of [model] that the shapes of a checkpoint decide.

    How many heads the rows of a Llama are of, its rotary settings and its epsilon are not in a
    checkpoint: they have to be right in [model].
    """
    shape = shape_of(model)
    block = "layers.0."
    query, key, _ = (f"{block}attention.{part}.weight" for part in PROJECTIONS)
    norm = f"{block}attention.q_norm.weight"
    gate = f"{block}feed_forward.w1.weight"
    for name in (EMBEDDING, query, key, gate):
        if name not in shapes:
            raise UserError(f"it has no {name}, as a Llama or a dense Qwen3 of torchtitan has")
    qk_norm = norm in shapes
    head_dim = shapes[norm][0] if qk_norm else shape.head_dim
    return {
        "vocab_size": shapes[EMBEDDING][0],
        "layers": len({name.split(".")[1] for name in shapes if name.startswith("layers.")}),
        "width": shapes[EMBEDDING][1],
        "heads": shapes[query][0] // head_dim,
        "kv_heads": shapes[key][0] // head_dim,
        "head_dim": head_dim,
        "feed_forward": shapes[gate][0],
        "activation": "swiglu",
        "qk_norm": qk_norm,
    }


# --- folders --------------------------------------------------------------------------------------


def open_checkpoint(folder: Path) -> "dict[str, Stored]":
    """Return the parameters of a checkpoint by their names in torchtitan of today."""
    from torchtitan_diloco.export.dcp import stored_tensors

    tensors = {current_name(name): tensor for name, tensor in stored_tensors(folder).items()}
    return {name: tensor for name, tensor in tensors.items() if name.startswith(OF_MODEL)}


def save_torchtitan(folder: Path, model: nn.Module, dtype: torch.dtype) -> None:
    """Write what torchtitan starts from: the parameters, and no optimizer."""
    from torchtitan_diloco.export.dcp import save_tensors

    shape = shape_of(model)
    if shape.activation != "swiglu":
        raise UserError(
            f"--format torchtitan: the model ({shape}) is no Llama or Qwen3: use --format "
            "safetensors"
        )
    weights: dict[str, Tensor] = {}
    for name, parts in torchtitan_names(model).items():
        values = model.get_parameter(name).detach().to(dtype).split(list(parts.values()))
        for part, value in zip(parts, values, strict=True):
            weights[part] = to_torchtitan(model, part, value).contiguous()
    weights.setdefault(HEAD, weights[EMBEDDING])  # one matrix has both names there
    save_tensors(folder, weights)
