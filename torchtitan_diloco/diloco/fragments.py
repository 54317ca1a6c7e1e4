"""Which parameters belong to which fragment. Works on any module; needs no process group."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_diloco.diloco.config import Fragments

REST = "embedding, head and norms"


@dataclass(frozen=True)
class Part:
    """A parameter, or one of several equal runs of its rows."""

    name: str
    parameter: nn.Parameter
    run: int = 0
    runs: int = 1

    def local(self) -> Tensor:
        """The rows on this rank, flat, sharing memory with the parameter."""
        return local_rows(self.name, self.parameter.detach(), self.run, self.runs)

    @property
    def bytes(self) -> int:
        """Of the whole parameter's part in fp32, over all ranks of the worker."""
        rows = self.parameter.shape[0] if self.parameter.dim() else 1
        return (
            4
            * (self.parameter.numel() // max(1, rows))
            * len(range(rows)[_span(rows, self.run, self.runs)])
        )

    def __str__(self) -> str:
        return self.name if self.runs == 1 else f"{self.name} (rows {self.run + 1}/{self.runs})"


def local_rows(name: str, value: Tensor, run: int, runs: int) -> Tensor:
    """One of `runs` equal runs of the rows of a parameter, or of what belongs to it, that are on this rank: flat, sharing
    its memory."""
    shard = value.to_local() if isinstance(value, DTensor) else value
    if not shard.is_contiguous():
        raise ValueError(
            f"parameter {name} is not contiguous in memory, so it cannot be exchanged in place: make it contiguous before "
            "StreamingDiLoCo is built"
        )
    return (shard.tensor_split(runs)[run] if runs > 1 else shard).view(-1)


@dataclass(frozen=True)
class Fragment:
    index: int
    name: str
    parts: tuple[Part, ...]

    @property
    def parameters(self) -> int:
        return self.bytes // 4

    @property
    def bytes(self) -> int:
        """In fp32, over all ranks of the worker."""
        return sum(part.bytes for part in self.parts)


def build_fragments(model: nn.Module, config: Fragments) -> tuple[Fragment, ...]:
    """Every trainable parameter in exactly one fragment. Frozen ones never change, so nothing of them is exchanged."""
    named = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    if not named:
        raise ValueError(
            "the model has no trainable parameter, so there is nothing to exchange between workers"
        )
    if config.pattern == "explicit":
        groups = _explicit(model, named, config.modules)
    elif config.layers_per_fragment == 0:
        groups = [("whole model", [Part(name, parameter) for name, parameter in named])]
    else:
        blocks, rest = _split_blocks(model, named, config.blocks)
        count = -(-len(blocks) // config.layers_per_fragment)
        if config.pattern == "balanced":
            groups = _balanced(blocks, rest, count + bool(rest))
        else:
            groups = _whole_blocks(blocks, count, strided=config.pattern == "strided")
            groups += [(REST, rest)] if rest else []
    fragments = tuple(
        Fragment(index, name, tuple(parts)) for index, (name, parts) in enumerate(groups)
    )
    check_coverage(named, fragments)
    return fragments


def check_coverage(
    named: Iterable[tuple[str, nn.Parameter]], fragments: Iterable[Fragment]
) -> None:
    """Raises unless every parameter is in exactly one fragment (all runs of its rows, if it is split)."""
    seen: dict[str, list[tuple[int, int]]] = {}
    for fragment in fragments:
        for part in fragment.parts:
            seen.setdefault(part.name, []).append((part.run, part.runs))
    for name, _ in named:
        runs = sorted(seen.get(name, []))
        if not runs:
            raise ValueError(
                f"parameter {name} is in no fragment: add its module to diloco.fragments.modules"
            )
        if runs != [(run, runs[0][1]) for run in range(runs[0][1])]:
            raise ValueError(
                f"parameter {name} is in more than one fragment: name its module in only one of them"
            )


def check_identity(model: nn.Module, fragment: Fragment) -> None:
    """Raises where the model no longer holds the parameters that are exchanged."""
    for part in fragment.parts:
        owner, _, name = part.name.rpartition(".")
        if getattr(model.get_submodule(owner), name) is not part.parameter:
            raise ValueError(
                f"the model has a new parameter in the place of {part.name} since StreamingDiLoCo was built, so the old one is "
                "exchanged in vain: build it after the model is final (load weights with assign=False)"
            )


def fragment_table(fragments: Iterable[Fragment], slots: Iterable[int]) -> str:
    """The fragments and their place in the cycle, for humans."""
    lines = [f"{'fragment':>8}  {'slot':>5}  {'parameters':>13}  {'MB (fp32)':>9}  modules"]
    for fragment, slot in zip(fragments, slots, strict=True):
        megabytes = fragment.bytes / 1e6
        lines.append(
            f"{fragment.index:>8}  {slot:>5}  {fragment.parameters:>13,}  {megabytes:>9,.2f}  {fragment.name}"
        )
    return "\n".join(lines)


Named = list[tuple[str, nn.Parameter]]
Group = tuple[str, list[Part]]


def _span(rows: int, run: int, runs: int) -> slice:
    """The rows that tensor_split puts into a run."""
    size, larger = divmod(rows, runs)
    start = run * size + min(run, larger)
    return slice(start, start + size + (run < larger))


def _split_blocks(
    model: nn.Module, named: Named, blocks_name: str
) -> tuple[list[Group], list[Part]]:
    container = blocks_name or _longest_module_list(model)
    modules = dict(model.named_modules())
    if container not in modules:
        nearest = difflib.get_close_matches(container, modules, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ValueError(f'diloco.fragments.blocks = "{container}" is no module of the model{hint}')
    prefixes = [f"{container}.{child}" for child, _ in modules[container].named_children()]
    blocks = [
        (prefix, [Part(n, p) for n, p in named if n.startswith(f"{prefix}.")])
        for prefix in prefixes
    ]
    blocks = [block for block in blocks if block[1]]
    if not blocks:
        raise ValueError(
            f"the blocks of {container} have no trainable parameter: name another module in diloco.fragments.blocks, or set "
            "diloco.fragments.layers_per_fragment = 0 to exchange all that is trained at once"
        )
    inside = {part.name for _, parts in blocks for part in parts}
    return blocks, [Part(n, p) for n, p in named if n not in inside]


def _longest_module_list(model: nn.Module) -> str:
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    lengths = {
        name: len(lists[name]) for name in outermost
    }  # the experts inside a block are no blocks
    if not lengths:
        raise ValueError(
            "the model has no ModuleList whose blocks could be its fragments: name the module that holds them in "
            "diloco.fragments.blocks, list fragments in diloco.fragments.modules, or set "
            "diloco.fragments.layers_per_fragment = 0 to exchange the whole model at once"
        )
    longest: str = max(lengths, key=lengths.__getitem__)
    return longest


def _whole_blocks(blocks: list[Group], count: int, *, strided: bool) -> list[Group]:
    """Strided: fragment p holds blocks p, p + P, p + 2P, ...; sequential: consecutive ones."""
    per_fragment = -(-len(blocks) // count)
    chosen = [
        blocks[p::count] if strided else blocks[p * per_fragment : (p + 1) * per_fragment]
        for p in range(count)
    ]
    return [_merge(group) for group in chosen if group]


def _balanced(blocks: list[Group], rest: list[Part], count: int) -> list[Group]:
    """`count` fragments of nearly equal bytes: what is larger than its share is split by rows, then the largest piece
    always goes where there is least."""
    total = sum(part.bytes for _, parts in blocks for part in parts) + sum(
        part.bytes for part in rest
    )
    share = max(1, total // count)
    pieces: list[Group] = []
    for name, parts in [*blocks, *((part.name, [part]) for part in rest)]:
        if sum(part.bytes for part in parts) <= share:
            pieces.append((name, parts))
        else:
            pieces += [
                (str(piece), [piece]) for part in parts for piece in _split_rows(part, share)
            ]
    bins: list[list[Group]] = [[] for _ in range(count)]
    for piece in sorted(pieces, key=lambda group: -sum(part.bytes for part in group[1])):
        min(
            bins, key=lambda chosen: sum(part.bytes for _, parts in chosen for part in parts)
        ).append(piece)
    return [_merge(chosen) for chosen in bins if chosen]


def _split_rows(part: Part, share: int) -> list[Part]:
    rows = part.parameter.shape[0] if part.parameter.dim() else 1
    runs = max(1, min(rows, -(-part.bytes // share)))
    return [Part(part.name, part.parameter, run, runs) for run in range(runs)]


def _explicit(model: nn.Module, named: Named, modules: tuple[tuple[str, ...], ...]) -> list[Group]:
    known = {name for name, _ in model.named_modules()} | {name for name, _ in named}
    groups: list[Group] = []
    for names in modules:
        parts: list[Part] = []
        for wanted in names:
            if wanted not in known:
                nearest = difflib.get_close_matches(wanted, known, n=1)
                hint = (
                    f"did you mean {nearest[0]}?"
                    if nearest
                    else f"it has {', '.join(sorted(known - {''})[:8])}, ..."
                )
                raise ValueError(
                    f'diloco.fragments.modules names "{wanted}", which the model does not have; {hint}'
                )
            parts += [
                Part(name, p)
                for name, p in named
                if name == wanted or name.startswith(f"{wanted}.")
            ]
        if not parts:
            raise ValueError(
                f"the fragment {list(names)} of diloco.fragments.modules has no trainable parameter of its own (a tied one "
                "counts where it comes first): remove it"
            )
        groups.append((", ".join(names), parts))
    return groups


def _merge(groups: list[Group]) -> Group:
    return ", ".join(name for name, _ in groups), [part for _, parts in groups for part in parts]
