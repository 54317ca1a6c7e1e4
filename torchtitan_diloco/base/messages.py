"""Small values that ranks exchange, encoded as MessagePack.

Unlike the pickles of `torch.distributed.all_gather_object`, it cannot run code when it is decoded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


class TransferError(RuntimeError):
    """Ranks could not exchange data: one of them left, or did not answer in time."""


@contextmanager
def transfers() -> Iterator[None]:
    """Raise what gloo or NCCL says in the body as a TransferError.

    The body only calls torch.distributed. Gloo raises a RuntimeError without a type of its own; the
    other types, such as that of a full memory, are no matter of other ranks.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            raise TransferError(str(error)) from error
        raise


def gather_objects(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """Return the values of all ranks on every rank. All values must have the same type."""
    if group is None:
        return [value]
    content = _encode(value)
    size = torch.tensor([content.numel()])
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    with transfers():
        dist.all_gather(sizes, size, group=group)
    longest = int(torch.cat(sizes).max())
    padded = content.new_zeros(longest)
    padded[: content.numel()] = content
    contents = [torch.empty_like(padded) for _ in sizes]
    with transfers():
        dist.all_gather(contents, padded, group=group)
    kind = type(value)
    return [
        _decode(content[: int(size)], kind) for content, size in zip(contents, sizes, strict=True)
    ]


def broadcast_object(
    value: Value | None, kind: type[Value], group: dist.ProcessGroup | None
) -> Value:
    """Return the value of the group's first rank, of type `kind`."""
    content = _encode(value)
    if group is not None:
        size = torch.tensor([content.numel()])
        with transfers():
            dist.broadcast(size, group_src=0, group=group)
        content = content.new_zeros(int(size)) if group.rank() else content
        with transfers():
            dist.broadcast(content, group_src=0, group=group)
    return _decode(content, kind)


def _encode(value: object) -> Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)


def _decode(content: Tensor, kind: type[Value]) -> Value:
    return msgspec.msgpack.decode(content.numpy().tobytes(), type=kind)
