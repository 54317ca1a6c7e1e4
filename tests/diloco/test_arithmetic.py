"""The shared copies have the same bits on all machines."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.diloco.toy import fused
from tests.processes import INSTRUCTIONS, with_instructions
from torchtitan_diloco.diloco import arithmetic
from torchtitan_diloco.diloco.arithmetic import (
    CODEC_PARTS,
    check_device,
    compute,
    compute_all,
    short_digest,
)
from torchtitan_diloco.diloco.codecs import base
from torchtitan_diloco.diloco.config import OuterOptimizer
from torchtitan_diloco.diloco.formats import FORMATS
from torchtitan_diloco.diloco.outer_optimizers import OUTER_OPTIMIZERS
from torchtitan_diloco.diloco.outer_step import outer_step

LENGTHS = [1, 1023, 200_003]


def computed() -> dict[str, str]:
    """Return what all formats and outer steps make of several numbers of values."""
    found = compute_all()
    for length in LENGTHS:
        with patch.object(arithmetic, "VALUES", length):
            for name in (*FORMATS, *OUTER_OPTIMIZERS):
                results = compute.__wrapped__(name)
                found |= {f"{key}, {length}": value for key, value in results.items()}
    return found


def test_all_instruction_sets_make_the_same_bits() -> None:
    plain, *others = (
        with_instructions(one, "tests.diloco.test_arithmetic.computed") for one in INSTRUCTIONS
    )
    steps = sum(1 + len(rule.slots) for rule in OUTER_OPTIMIZERS.values())
    assert len(plain) == (1 + len(LENGTHS)) * (len(CODEC_PARTS) * len(FORMATS) + steps)
    assert all(one == plain for one in others)


def test_the_roots_of_adam_are_rounded_correctly() -> None:
    """Those of torch in fp32 are not, and differ between processors."""
    config = OuterOptimizer(name="adam", lr=1.0, momentum=0.0)
    count = LENGTHS[-1]
    delta = torch.ones(count)
    second = torch.rand(count, generator=torch.Generator().manual_seed(0))
    outer_step(config, torch.zeros(count), delta, [torch.zeros(count), second], count=2, lr=1.0)
    root = np.sqrt(second.numpy())  # as IEEE 754 asks
    expected = -np.float32(1) / (root + np.float32(config.epsilon))
    assert np.array_equal(delta.numpy(), expected)


def test_a_machine_that_rounds_otherwise_has_other_digests() -> None:
    before = compute_all(["int8", "nesterov"])
    with patch.object(base, "add_to_mean", fused):
        results = compute.__wrapped__("int8")
    differing = [operation for operation in results if results[operation] != before[operation]]
    assert differing == ["average of int8"]
    assert short_digest(before | results) != short_digest(before)


def test_a_gpu_that_rounds_otherwise_than_its_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["int8", "adam"]
    check_device(torch.device("cpu"), names)
    gpu = torch.device("cuda")
    plain = compute_all(names)
    others = {gpu: plain}
    monkeypatch.setattr(
        arithmetic,
        "compute_all",
        lambda _names, device=arithmetic.CPU: others.get(device, plain),
    )
    check_device(gpu, names)
    others[gpu] = plain | {"decode of int8": "other"}
    message = r"use another GPU.*\n  decode of int8: \w{8} on the CPU, other on the GPU"
    with pytest.raises(ValueError, match=message):
        check_device(gpu, names)
