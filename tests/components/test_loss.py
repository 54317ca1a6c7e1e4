"""The chunked loss is the plain one."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.data.batch import IGNORE_INDEX


def plain_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.t()).float()
    entropy = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    log_partition = logits.logsumexp(-1)[targets != IGNORE_INDEX]
    return entropy + z_loss * log_partition.square().sum(), entropy


def example(seed: int, batch: int, length: int, ignored: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, length, 12, generator=generator, requires_grad=True)
    weight = torch.randn(31, 12, generator=generator, requires_grad=True)
    targets = torch.randint(0, 31, (batch, length), generator=generator)
    targets[torch.rand(batch, length, generator=generator) < ignored] = IGNORE_INDEX
    return hidden, weight, targets


@given(
    seed=st.integers(0, 1000),
    batch=st.integers(1, 4),
    length=st.integers(1, 9),
    chunk=st.integers(1, 40),
    z_loss=st.sampled_from([0.0, 1e-4, 0.5]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_values_and_gradients(
    seed: int, batch: int, length: int, chunk: int, z_loss: float, ignored: float
) -> None:
    hidden, weight, targets = example(seed, batch, length, ignored)
    objective, entropy = plain_loss(hidden, weight, targets, z_loss)
    expected = torch.autograd.grad(3 * objective, (hidden, weight))
    sums = loss_head(targets, z_loss=z_loss, chunk_tokens=chunk)(hidden, weight)
    gradients = torch.autograd.grad(3 * sums.objective, (hidden, weight))
    torch.testing.assert_close(sums.objective, objective, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sums.cross_entropy, entropy, rtol=1e-5, atol=1e-4)
    assert sums.tokens.item() == (targets != IGNORE_INDEX).sum().item()
    assert not sums.cross_entropy.requires_grad
    with torch.no_grad():
        same = loss_head(targets, z_loss=z_loss, chunk_tokens=chunk)(hidden, weight)
    assert torch.equal(same.objective, sums.objective)
    assert not same.objective.requires_grad
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-4)


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    """A parameter requires its gradient also under `torch.no_grad()`."""
    called = list[str]()

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(func.__name__)
            return func(*args, **(kwargs or {}))

    hidden, weight, targets = example(0, 2, 10, 0.0)
    head = loss_head(targets, z_loss=1e-4)
    with Watch():
        head(hidden, weight)
        assert "scatter_add_" in called
        called.clear()
        with torch.no_grad():
            head(hidden, weight)
    assert "gather" in called
    assert "scatter_add_" not in called


def test_logits_of_the_batch_never_exist_at_once() -> None:
    largest = 0

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, weight, targets = example(0, 8, 100, 0.0)
    with Watch():
        loss_head(targets, z_loss=1e-4, chunk_tokens=50)(hidden, weight).objective.backward()
        assert largest == hidden.numel()
        plain_loss(hidden, weight, targets, 0.0)
        assert largest == 800 * 31, "the watch would have seen them"
