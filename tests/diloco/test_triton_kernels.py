"""GPU kernels make the bits of the torch code: in Triton's interpreter, and on a GPU if there is.

Triton reads its environment when it is imported, so it is imported in processes of their own here.
"""

import logging
import multiprocessing as mp
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.diloco.test_codecs import BLOCK_CODECS, build
from torchtitan_diloco.diloco.codecs import UNIT, Codec, blocks
from torchtitan_diloco.diloco.codecs.blocks import BlockCodec
from torchtitan_diloco.diloco.config import BLOCK_SIZES
from torchtitan_diloco.diloco.formats import FORMATS, small_float

WEIGHTS = [3.0, 1.0, 9.0, 0.25]

INT4 = small_float(exponent=1, mantissa=2, bias=-1, top=7.0)
"""A small float that this package does not have: any of them has kernels."""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


# --- what is compared -----------------------------------------------------------------------------


def plain_torch() -> Any:
    """Encode and decode tensors on a CPU without kernels in the body of a with statement."""
    return patch.dict(os.environ, TRITON_INTERPRET="0")


class Guarded:
    """A copy of a tensor on a device, unaligned and with bytes around it that must not change."""

    def __init__(self, tensor: Tensor, device: str) -> None:
        guard = torch.full((5,), 0x5A, dtype=tensor.dtype)
        self._all = torch.cat((guard, tensor, guard)).to(device)
        self.inside = self._all[5:-5]

    def read(self) -> Tensor:
        guards = torch.cat((self._all[:5], self._all[-5:]))
        assert (guards == 0x5A).all()
        return self.inside.cpu()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare bits. All NaNs are the same: their bits are the processor's."""
    words = [torch.where(values.isnan(), torch.nan, values) for values in (one, other)]
    return torch.equal(*(values.view(torch.int32) for values in words))


GRID_VALUES = torch.tensor([1.0, 448.0, 57344.0, 127.0, 6.0, 16.0, 480.0, 127.5])
KINDS: list[Callable[[Tensor], Tensor]] = [
    lambda normal: normal,
    lambda normal: normal * torch.exp(4 * normal.roll(1)),  # of very different size in one block
    lambda normal: (normal * 4).round() / 8,  # ties, grid values and zeros of both signs
    lambda normal: normal * 0.0,
    lambda normal: normal * 2.0**-147,  # subnormal
    lambda normal: normal * 2.0**-98,  # about the lowest scale
    lambda normal: normal.clamp(-4, 4) * 2.0**125.9,  # about the highest scale
    lambda normal: -normal.abs() - 1e-3,
    lambda normal: GRID_VALUES.repeat(len(normal) // 8 + 1)[: len(normal)],
    lambda normal: normal.where(torch.arange(len(normal)) != 3 % len(normal), torch.nan),
    lambda normal: normal.where(torch.arange(len(normal)) != len(normal) // 2, -torch.inf),
]


def inputs(length: int, block: int, first_kind: int) -> Tensor:
    """Values of another kind in each block, so that no block resembles its neighbor."""
    normal = torch.randn(length, generator=torch.Generator().manual_seed(length + block))
    kinds = KINDS[first_kind:] + KINDS[:first_kind]
    parts = [kinds[i % len(kinds)](part) for i, part in enumerate(normal.split(block))]
    return torch.cat(parts) if length else normal


def compare(codec: Codec, values: Tensor, device: str) -> None:
    """Compare the kernels on `device` with plain torch on the CPU."""
    assert blocks.kernels_for(codec.format, values.to(device)), (
        "this would compare torch with torch"
    )
    expected = torch.zeros(codec.wire_bytes(len(values)), dtype=torch.uint8)
    payload = Guarded(torch.zeros_like(expected), device)
    given = Guarded(values, device)
    with plain_torch():
        codec.encode(values.clone(), expected)
    codec.encode(given.inside, payload.inside)
    assert same_bits(given.read(), values)
    assert torch.equal(payload.read(), expected)
    compare_decoded(codec, expected, len(values), device)


def compare_decoded(codec: Codec, payload: Tensor, length: int, device: str) -> None:
    out = Guarded(torch.zeros(length), device)
    expected = torch.zeros(length)
    codec.decode(Guarded(payload, device).inside, out.inside)
    with plain_torch():
        codec.decode(payload, expected)
    assert same_bits(out.read(), expected)


def compare_means(codec: Codec, length: int, device: str) -> None:
    payloads = [torch.zeros(codec.wire_bytes(length), dtype=torch.uint8) for _ in WEIGHTS]
    for seed, payload in enumerate(payloads):
        with plain_torch():
            values = torch.randn(length, generator=torch.Generator().manual_seed(seed))
            codec.encode(values, payload)
    for count in range(1, len(WEIGHTS) + 1):
        expected = torch.zeros(length)
        mean = Guarded(torch.zeros(length), device)
        with plain_torch():
            codec.average(payloads[:count], WEIGHTS[:count], expected)
        arrived = [Guarded(payload, device).inside for payload in payloads[:count]]
        codec.average(arrived, WEIGHTS[:count], mean.inside)
        assert same_bits(mean.read(), expected)


def compare_any_bytes(codec: Codec, block: int, device: str) -> None:
    """Decode every code under every scale, also those that no encoder writes."""
    length = 2 * UNIT + 77
    generator = torch.Generator().manual_seed(block)
    payload = torch.randint(256, (codec.wire_bytes(length),), generator=generator)
    compare_decoded(codec, payload.to(torch.uint8), length, device)


# --- in Triton's interpreter, and on a GPU --------------------------------------------------------

Run = Callable[..., None]
"""Calls a function of this file with arguments and a device, where the device has kernels."""


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run on a CPU in a process where kernels are interpreted, which is slow, or on a GPU."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")
        yield lambda function, *arguments: function(*arguments, "cuda")
        return
    with ProcessPoolExecutor(1, mp.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        with patch.dict(os.environ, TRITON_INTERPRET="1"):
            pool.submit(os.getpid).result()
        submit: Any = pool.submit
        yield lambda *call: submit(*call, "cpu").result()


def _compare_format(name: str, device: str) -> None:
    with patch.dict(FORMATS, int4=INT4):  # in the process of the kernels, too
        number = list(FORMATS).index(name)
        fast = device == "cuda"
        lengths = [0, 1, 15, 1023, 1025, UNIT + 17] + fast * [512 * UNIT, 700 * UNIT + 333]
        for kind, length in enumerate(lengths):
            one_of_all = [BLOCK_SIZES[(number + 2 * kind) % len(BLOCK_SIZES)]]
            for block in BLOCK_SIZES if fast else one_of_all:
                compare(build(name, block_size=block), inputs(length, block, kind), device)
        compare(build(name, block_size=UNIT), inputs(len(KINDS) * UNIT, UNIT, 0), device)
        for block in BLOCK_SIZES if fast else (16, 1024):
            codec = build(name, block_size=block)
            compare_means(codec, (300 if fast else 1) * UNIT + 1, device)
            compare_any_bytes(codec, block, device)


@needs_triton
@pytest.mark.parametrize("name", [*BLOCK_CODECS, "int4"])
def test_kernels_make_the_bits_of_torch(run: Run, name: str) -> None:
    run(_compare_format, name)


def _compare_largest(length: int, top: int, device: str) -> None:
    codec = build("topk", top_values=top)
    compare(codec, inputs(length, 64, 0), device)
    compare_means(codec, length, device)


@needs_triton
@pytest.mark.parametrize(("length", "top"), [(0, 16), (15, 16), (UNIT, 256), (UNIT + 700, 10)])
def test_the_kernel_finds_the_largest_values(run: Run, length: int, top: int) -> None:
    run(_compare_largest, length, top)


# --- compiled for a GPU that is not there ---------------------------------------------------------


class _NoGpu:
    """As much of a driver as compiling needs."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class _Compiled:
    """Stands in for a kernel and compiles what would be launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.ptx = ""
        self.sass = ""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._compile, grid)

    def _compile(self, grid: tuple[int], *arguments: Any, **constants: Any) -> None:
        compiled = self._kernel.warmup(*arguments, grid=grid, **constants)
        assert compiled.asm["cubin"]
        self.ptx += compiled.asm["ptx"]
        self.sass += compiled.asm["sass"]  # after ptxas, which fuses, too


def _compile_all(cache: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    from triton.runtime import driver

    driver.set_active(_NoGpu())
    kernels = blocks.triton_kernels()
    assert kernels is not None
    encoder = _Compiled(kernels.encode_units)
    averager = _Compiled(kernels.average_units)
    kernels.encode_units = encoder  # type: ignore[attr-defined]
    kernels.average_units = averager  # type: ignore[attr-defined]
    largest = _Compiled(kernels.encode_largest_of_units)
    kernels.encode_largest_of_units = largest  # type: ignore[attr-defined]
    room = torch.zeros(64 * UNIT, dtype=torch.uint8)
    kernels.encode_largest(torch.zeros(64 * UNIT + 1), room, 10)
    for index, name in enumerate(BLOCK_CODECS):
        length = 64 * UNIT + index % 2
        codec = build(name, block_size=BLOCK_SIZES[index % len(BLOCK_SIZES)])
        assert isinstance(codec, BlockCodec)
        payload = torch.zeros(codec.wire_bytes(length), dtype=torch.uint8)
        values = torch.zeros(length)
        kernels.encode(values, payload, codec.grid)
        kernels.average([payload] * 3, WEIGHTS[:3], values, codec.grid)
    for kernel in (encoder, averager, largest):
        fused = {"fma", "FFMA"} & set(re.findall(r"\w+", kernel.ptx + kernel.sass))
        assert not fused, "a merged product and sum is rounded otherwise than torch's"
        assert ".ftz" not in kernel.ptx, "subnormal numbers would be lost"


@pytest.mark.long
@needs_triton
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
        pool.submit(_compile_all, tmp_path).result()


# --- which kernels there are ----------------------------------------------------------------------


def test_torch_is_used_for_formats_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(blocks, "triton_kernels", lambda: blocks)
    with_kernels = {
        name for name, form in FORMATS.items() if blocks.kernels_for(form, torch.zeros(1))
    }
    assert with_kernels == {*BLOCK_CODECS, "topk"}


def test_torch_is_used_without_triton(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks.triton_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, f"{blocks.__package__}.triton_kernels", raising=False)
    with caplog.at_level(logging.INFO, logger="torchtitan_diloco"):
        assert blocks.triton_kernels() is None
    assert len(caplog.messages) == 1
    assert "plain torch" in caplog.messages[0]
    blocks.triton_kernels.cache_clear()
