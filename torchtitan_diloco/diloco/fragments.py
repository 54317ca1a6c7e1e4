"""Partition of a module's parameters into fragments."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from torchtitan_diloco.base.settings import nearest
from torchtitan_diloco.base.tensors import local_of
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.config import Fragments

REST = "embedding, head and norms"


@dataclass(frozen=True)
class FragmentParameter:
    """A parameter of a fragment."""

    name: str
    parameter: nn.Parameter

    def local(self) -> Tensor:
        """Return this rank's shard as a flat view."""
        return local_rows(self.name, self.parameter)

    def is_in(self, module: str) -> bool:
        return self.name == module or self.name.startswith(f"{module}.")


def local_rows(name: str, value: Tensor) -> Tensor:
    """Return this rank's shard of a parameter as a flat view."""
    shard = local_of(value)
    if not shard.is_contiguous():
        raise UserError(
            f"parameter {name} is not contiguous in memory, so it cannot be exchanged in place: "
            "make it contiguous before StreamingDiLoCo is built"
        )
    return shard.view(-1)


@dataclass(frozen=True)
class Fragment:
    index: int
    name: str
    parts: tuple[FragmentParameter, ...]

    @property
    def parameters(self) -> int:
        """Number of values on all ranks of the worker."""
        return sum(part.parameter.numel() for part in self.parts)

    @property
    def megabytes(self) -> float:
        """Size in fp32, in megabytes."""
        return 4e-6 * self.parameters


Group = tuple[str, list[FragmentParameter]]
"""Name and parts of a fragment or block."""


def build_fragments(model: nn.Module, config: Fragments) -> tuple[Fragment, ...]:
    """Put every trainable parameter into exactly one fragment."""
    trained = [
        FragmentParameter(name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    if not trained:
        raise UserError("the model has no trainable parameter: there is nothing to exchange")
    for part in trained:
        if not part.parameter.is_floating_point():
            raise UserError(
                f"parameter {part.name} is {part.parameter.dtype}, of which workers exchange no "
                "mean: make it a parameter of real numbers (torch.view_as_real), or freeze it"
            )
    if config.layers_per_fragment == 0:
        groups = [("whole model", trained)]
    else:
        blocks, outside = _split_blocks(model, trained, config.blocks)
        _check_size(config.layers_per_fragment, len(blocks))
        groups = _groups_of_blocks(blocks, config)
        if outside:
            groups.append((REST, outside))
    return tuple(Fragment(index, name, tuple(parts)) for index, (name, parts) in enumerate(groups))


def _groups_of_blocks(blocks: list[Group], config: Fragments) -> list[Group]:
    """Combine the blocks to as few groups as possible, whose sizes differ as little as possible."""
    count = -(-len(blocks) // config.layers_per_fragment)
    size = -(-len(blocks) // count)
    groups = list[Group]()
    for number in range(count):
        chosen = blocks[number * size :][:size]
        if config.pattern == "strided":
            chosen = blocks[number::count]
        if chosen:  # the last of consecutive groups may be empty
            name = ", ".join(name for name, _ in chosen)
            groups.append((name, [part for _, parts in chosen for part in parts]))
    return groups


def _check_size(layers: int, blocks: int) -> None:
    """Raise an error if the user asked for more blocks per fragment than the model has."""
    if layers > blocks and layers != Fragments.layers_per_fragment:
        raise UserError(
            f"diloco.fragments.layers_per_fragment = {layers}: the model has {blocks} blocks with "
            f"trainable parameters; give 1 to {blocks}, or 0 for one fragment"
        )


def check_identity(model: nn.Module, fragment: Fragment) -> None:
    """Raise an error if a parameter of the model was replaced."""
    for part in fragment.parts:
        owner, _, name = part.name.rpartition(".")
        if getattr(model.get_submodule(owner), name) is not part.parameter:
            raise UserError(
                f"parameter {part.name} was replaced after StreamingDiLoCo was built: build it "
                "when the model is final (load weights with assign=False)"
            )


def describe_layout(fragments: Iterable[Fragment]) -> list[str]:
    """Describe each parameter of the fragments on one line, the same on all ranks of a worker."""
    return [
        f"{fragment.index} {part.name} {tuple(part.parameter.shape)} {part.parameter.dtype}"
        for fragment in fragments
        for part in fragment.parts
    ]


def _split_blocks(
    model: nn.Module, trained: list[FragmentParameter], blocks_name: str
) -> tuple[list[Group], list[FragmentParameter]]:
    """Return the blocks with trainable parameters, and the parameters outside the blocks."""
    container = blocks_name or _longest_module_list(model)
    modules = dict(model.named_modules())
    if container not in modules:
        raise UserError(
            f'diloco.fragments.blocks = "{container}" is not a module of the model: name the one '
            f"that contains its blocks, or leave it empty{nearest(container, modules)}"
        )
    names = [f"{container}.{child}" for child, _ in modules[container].named_children()]
    groups = [(name, [part for part in trained if part.is_in(name)]) for name in names]
    blocks = [(name, parts) for name, parts in groups if parts]
    if not blocks:
        raise UserError(
            f"the blocks of {container} have no trainable parameter: set "
            "diloco.fragments.blocks to another module, or "
            "diloco.fragments.layers_per_fragment = 0"
        )
    in_blocks = {part.name for _, parts in blocks for part in parts}
    return blocks, [part for part in trained if part.name not in in_blocks]


def _longest_module_list(model: nn.Module) -> str:
    """Return the name of the longest list that is not nested, as a list of experts is in a block.

    A ModuleDict with numbers as keys counts as a list, as in torchtitan.
    """
    lists: dict[str, int] = {}
    for name, module in model.named_modules():  # outer ones first
        is_numbered = isinstance(module, nn.ModuleDict) and all(key.isdigit() for key in module)
        is_list = is_numbered or isinstance(module, nn.ModuleList)
        if is_list and len(module) and not any(name.startswith(f"{other}.") for other in lists):
            lists[name] = len(module)
    if not lists:
        raise UserError(
            "the model has no ModuleList of blocks, nor a ModuleDict with numbers as "
            "keys: set diloco.fragments.blocks to the module that contains them, or "
            "diloco.fragments.layers_per_fragment = 0"
        )
    return max(lists, key=lists.__getitem__)
