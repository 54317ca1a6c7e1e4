"""The shared copies have the same bits on all machines."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.processes import INSTRUCTIONS, with_instructions
from torchtitan_diloco.diloco import arithmetic
from torchtitan_diloco.diloco.arithmetic import (
    KNOWN,
    OPTIMIZERS,
    check_arithmetic,
    hashes,
    outer_step,
)
from torchtitan_diloco.diloco.codecs import CODECS, base
from torchtitan_diloco.diloco.config import OuterOptimizer

CPU = torch.device("cpu")
LENGTHS = [1, 1023, 200_003]


def computed() -> dict[str, str]:
    """Return what all formats and outer steps make of several numbers of values."""
    found = {"difference": arithmetic.find_difference(CPU)}
    for length in LENGTHS:
        with patch.object(arithmetic, "VALUES", length):
            found |= {f"{name}, {length}": hashes.__wrapped__(CPU, name) for name in KNOWN}
    return found


def test_all_instruction_sets_make_the_known_bits() -> None:
    plain, *others = (
        with_instructions(one, "tests.diloco.test_arithmetic.computed") for one in INSTRUCTIONS
    )
    assert plain.pop("difference") == ""
    assert len(plain) == len(LENGTHS) * len(KNOWN)
    assert all(one == plain | {"difference": ""} for one in others)


def test_the_roots_of_adam_are_rounded_correctly() -> None:
    """Those of torch in fp32 are not, and differ between processors."""
    config, count = OuterOptimizer(name="adam", lr=1.0, momentum=0.0), LENGTHS[-1]
    delta, second = torch.ones(count), torch.rand(count, generator=torch.Generator().manual_seed(0))
    outer_step(config, torch.zeros(count), delta, [torch.zeros(count), second], 2)
    root = np.sqrt(second.numpy())  # as IEEE 754 asks
    expected = -np.float32(1) / (root + np.float32(config.epsilon))
    assert np.array_equal(delta.numpy(), expected)


def test_every_format_and_outer_step_is_known() -> None:
    assert set(KNOWN) == {*CODECS, *OPTIMIZERS}


def test_a_machine_that_rounds_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(mean: torch.Tensor, values: torch.Tensor, share: float) -> None:
        mean.copy_(torch.lerp(mean.double(), values.double(), share))

    hashes.cache_clear()
    monkeypatch.setattr(base, "add_to_mean", fused)
    with pytest.raises(
        ValueError, match=r"average of int8 on cpu is \w+, not .*another version of torch"
    ):
        check_arithmetic(CPU, "int8", OuterOptimizer())
    hashes.cache_clear()
