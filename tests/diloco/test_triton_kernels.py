"""The kernels against the torch code that defines their bits: in Triton's interpreter on a CPU, and on a GPU if there is one.

What Triton is told by the environment it reads when it is imported, so it is imported in processes of its own here.
"""

import logging
import multiprocessing as mp
import os
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

from torchtitan_diloco.diloco import codecs
from torchtitan_diloco.diloco.codecs import CODECS, UNIT, Place, build_codec, fused
from torchtitan_diloco.diloco.codecs.blocks import BlockCodec
from torchtitan_diloco.diloco.config import BLOCK_SIZES, Quantization

BLOCK_CODECS = [name for name in CODECS if name not in ("fp32", "bf16")]
PLACE = Place(key=0x9234567812345678, start=7 * UNIT)
WEIGHTS = [3.0, 1.0, 9.0, 0.25]
GUARD = 5
"""Bytes or values on either side of a buffer that must stay as they are; it is odd, so buffers are not aligned."""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
every_format = pytest.mark.parametrize("name", BLOCK_CODECS)
every_rounding = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


# --- what is compared -------------------------------------------------------------------------------------------------


def build(name: str, rounding: str, block: int, *, kernels: bool) -> BlockCodec:
    codec = build_codec(Quantization(codec=name, rounding=rounding, block_size=block))  # type: ignore[arg-type]
    assert isinstance(codec, BlockCodec)
    codec.use_kernels = kernels
    return codec


class Guarded:
    """A buffer with guards around it."""

    def __init__(
        self, size: int, dtype: torch.dtype, device: str, fill: Tensor | None = None
    ) -> None:
        self._all = torch.full((size + 2 * GUARD,), 0x5A, dtype=dtype, device=device)
        self.inside = self._all[GUARD : GUARD + size]
        if fill is not None:
            self.inside.copy_(fill)

    def read(self) -> Tensor:
        assert (self._all[:GUARD] == 0x5A).all()
        assert (self._all[len(self._all) - GUARD :] == 0x5A).all()
        return self.inside.cpu()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaNs are all the same: their bits are the processor's."""
    words = [
        torch.where(values.isnan(), torch.nan, values).view(torch.int32) for values in (one, other)
    ]
    return torch.equal(*words)


KINDS: list[Callable[[Tensor], Tensor]] = [
    lambda normal: normal,
    lambda normal: normal * torch.exp(4 * normal.roll(1)),  # of very different size in one block
    lambda normal: (normal * 4).round() / 8,  # ties, grid values and zeros of both signs
    lambda normal: normal * 0.0,
    lambda normal: normal * 2.0**-147,  # subnormal
    lambda normal: normal * 2.0**-98,  # about the lowest scale
    lambda normal: normal.clamp(-4, 4) * 2.0**125.9,  # about the highest one
    lambda normal: -normal.abs() - 1e-3,
    lambda normal: normal.new_tensor([1.0, 448.0, 57344.0, 127.0, 6.0, 16.0, 480.0, 127.5]).repeat(
        len(normal) // 8 + 1
    )[: len(normal)],
]
BROKEN: list[Callable[[Tensor], Tensor]] = [
    lambda normal: normal.where(torch.arange(len(normal)) != 3 % len(normal), torch.nan),
    lambda normal: normal.where(torch.arange(len(normal)) != len(normal) // 2, -torch.inf),
]


def inputs(length: int, block: int, first_kind: int, *, finite: bool) -> Tensor:
    """One kind of values in each block, so that no block says anything of its neighbours."""
    normal = torch.randn(length, generator=torch.Generator().manual_seed(length + block))
    kinds = KINDS if finite else KINDS[:2] + BROKEN + KINDS[2:3]
    blocks = [
        kinds[(first_kind + number) % len(kinds)](part)
        for number, part in enumerate(normal.split(block))
    ]
    return torch.cat(blocks) if length else normal


def compare(name: str, rounding: str, block: int, values: Tensor, device: str) -> None:
    """The kernels on `device` against plain torch on the CPU."""
    plain, kernels = (build(name, rounding, block, kernels=chosen) for chosen in (False, True))
    assert fused.fused_available(torch.device(device)), "this would compare torch with torch"
    length, size, finite = len(values), plain.wire_bytes(len(values)), bool(values.isfinite().all())
    residual = (
        inputs(length, block, 0, finite=True)[torch.arange(length).flip(0)] * 1e-2
        if finite
        else torch.ones(length)
    )
    for feedback in (False, True):
        expected, expected_residual = torch.zeros(size, dtype=torch.uint8), residual.clone()
        payload, lost = (
            Guarded(size, torch.uint8, device),
            Guarded(length, torch.float32, device, residual),
        )
        given = Guarded(length, torch.float32, device, values)
        if feedback:
            plain.encode_with_feedback(values.clone(), expected_residual, expected, PLACE)
            kernels.encode_with_feedback(given.inside, lost.inside, payload.inside, PLACE)
        else:
            plain.encode(values.clone(), expected, PLACE)
            kernels.encode(given.inside, payload.inside, PLACE)
        given.read()
        assert same_bits(lost.read(), expected_residual)
        if finite and bool((values + residual).isfinite().all()):
            assert torch.equal(payload.read(), expected)
        else:  # the codes of a block that is not finite may be any
            assert same_bits(
                decoded(plain, payload.read(), length), decoded(plain, expected, length)
            )
    check_decoding(plain, kernels, expected, length, device)


def check_decoding(
    plain: BlockCodec, kernels: BlockCodec, payload: Tensor, length: int, device: str
) -> None:
    out = Guarded(length, torch.float32, device)
    kernels.decode(Guarded(len(payload), torch.uint8, device, payload).inside, out.inside)
    assert same_bits(out.read(), decoded(plain, payload, length))


def decoded(codec: BlockCodec, payload: Tensor, length: int) -> Tensor:
    values = torch.zeros(length)
    codec.decode(payload, values)
    return values


def compare_means(name: str, block: int, length: int, device: str) -> None:
    plain, kernels = (build(name, "nearest", block, kernels=chosen) for chosen in (False, True))
    payloads = [torch.zeros(plain.wire_bytes(length), dtype=torch.uint8) for _ in WEIGHTS]
    for number, payload in enumerate(payloads):
        plain.encode(torch.randn(length, generator=torch.Generator().manual_seed(number)), payload)
    for count in range(1, len(WEIGHTS) + 1):
        expected, mean = torch.zeros(length), Guarded(length, torch.float32, device)
        plain.average(payloads[:count], WEIGHTS[:count], expected)
        arrived = [
            Guarded(len(payload), torch.uint8, device, payload).inside
            for payload in payloads[:count]
        ]
        kernels.average(arrived, WEIGHTS[:count], mean.inside)
        torch.testing.assert_close(
            mean.read(), expected, rtol=0, atol=2**-22
        )  # of values of about 1: a last bit or two


def compare_any_bytes(name: str, block: int, device: str) -> None:
    """Every code there is, under every scale, also those that no encoder writes."""
    plain, kernels = (build(name, "nearest", block, kernels=chosen) for chosen in (False, True))
    length = 2 * UNIT + 77
    payload = torch.randint(
        256, (plain.wire_bytes(length),), generator=torch.Generator().manual_seed(block)
    )
    check_decoding(plain, kernels, payload.to(torch.uint8), length, device)


# --- in Triton's interpreter ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., None]]:
    """Runs a function of this file in a process where kernels are interpreted."""
    with ProcessPoolExecutor(1, mp.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        with patch.dict(os.environ, TRITON_INTERPRET="1"):
            pool.submit(os.getpid).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _compare_at_odd_lengths(name: str, rounding: str) -> None:
    nearest = (
        rounding == "nearest"
    )  # the interpreter is slow: every size of block with one of the two
    for block in BLOCK_SIZES[::2] if nearest else BLOCK_SIZES[1::2]:
        for number, length in enumerate(
            [0, 1, 1023, 1025] if nearest else [15, 2 * UNIT + block + 1]
        ):
            compare(name, rounding, block, inputs(length, block, number, finite=True), "cpu")
    for kind in range(len(KINDS)):
        compare(name, rounding, UNIT, inputs(UNIT, UNIT, kind, finite=True), "cpu")


def _compare_blocks_that_are_not_finite(name: str, rounding: str) -> None:
    for block in (16, 128, 1024):
        compare(name, rounding, block, inputs(4 * block + 3, block, 1, finite=False), "cpu")


@needs_triton
@every_rounding
@every_format
def test_interpreted_kernels_make_the_bits_of_torch(
    interpreter: Callable[..., None], name: str, rounding: str
) -> None:
    interpreter(_compare_at_odd_lengths, name, rounding)


@needs_triton
@every_rounding
@every_format
def test_interpreted_kernels_keep_a_broken_block_to_itself(
    interpreter: Callable[..., None], name: str, rounding: str
) -> None:
    interpreter(_compare_blocks_that_are_not_finite, name, rounding)


@needs_triton
@every_format
def test_interpreted_kernels_decode_any_bytes(interpreter: Callable[..., None], name: str) -> None:
    for block in (16, 1024):
        interpreter(compare_any_bytes, name, block, "cpu")


@needs_triton
@every_format
def test_interpreted_kernels_take_the_weighted_mean(
    interpreter: Callable[..., None], name: str
) -> None:
    for block, length in ((16, 1), (128, UNIT + 1), (1024, UNIT - 1)):
        interpreter(compare_means, name, block, length, "cpu")


# --- compiled for a GPU that is not there -----------------------------------------------------------------------------


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
    """In a kernel's place: compiles what the host functions would launch."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.ptx = ""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._compile, grid)

    def _compile(self, grid: tuple[int], *arguments: Any, **constants: Any) -> None:
        compiled = self._kernel.warmup(*arguments, grid=grid, **constants)
        assert compiled.asm["cubin"]
        self.ptx += compiled.asm["ptx"]


def _compile_all(cache: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    from triton.runtime import driver

    driver.set_active(_NoGpu())
    kernels = fused._kernels()
    assert kernels is not None
    encoder, averager = _Compiled(kernels.encode_units), _Compiled(kernels.average_units)
    with (
        patch.object(kernels, "encode_units", encoder),
        patch.object(kernels, "average_units", averager),
    ):
        for index, name in enumerate(BLOCK_CODECS):
            for rounding, length in (("nearest", 64 * UNIT), ("stochastic", 64 * UNIT + 1)):
                codec = build(name, rounding, BLOCK_SIZES[index], kernels=True)
                values, payload = (
                    torch.zeros(length),
                    torch.zeros(codec.wire_bytes(length), dtype=torch.uint8),
                )
                residual = values if rounding == "stochastic" else None
                fused.encode(values, residual, payload, codec._format, codec._rounding, PLACE)
                fused.average([payload] * 3, WEIGHTS[:3], values, codec._format)
    assert "fma" not in encoder.ptx, (
        "a product and a sum merged: the sum is rounded otherwise than torch's"
    )
    assert "fma.rn.f32" in averager.ptx
    assert ".ftz" not in encoder.ptx + averager.ptx, "subnormal numbers would be lost"


@needs_triton
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
        pool.submit(_compile_all, tmp_path).result()


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@needs_triton
@needs_gpu
@pytest.mark.parametrize("block", BLOCK_SIZES)
@every_rounding
@every_format
def test_kernels_on_a_gpu_make_the_bits_of_torch_on_a_cpu(
    name: str, rounding: str, block: int
) -> None:
    for number, length in enumerate(
        [0, 1, 15, 1023, 1025, 2 * UNIT + block + 1, 512 * UNIT, 700 * UNIT + 333]
    ):
        compare(name, rounding, block, inputs(length, block, number, finite=True), "cuda")
    compare(name, rounding, block, inputs(5 * UNIT + 3, block, 1, finite=False), "cuda")
    compare_any_bytes(name, block, "cuda")
    compare_means(name, block, 300 * UNIT + 1, "cuda")


# --- which kernels there are ------------------------------------------------------------------------------------------


def test_without_triton_torch_does_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused._kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, f"{codecs.__name__}.triton_kernels", raising=False)
    monkeypatch.delattr(codecs, "triton_kernels", raising=False)
    monkeypatch.setattr(logging.getLogger("torchtitan_diloco"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="torchtitan_diloco"):
        assert fused.kernels_name() == "torch"
        assert not fused.fused_available(torch.device("cuda"))
    assert len(caplog.messages) == 1
    assert "plain torch" in caplog.messages[0]
    fused._kernels.cache_clear()


def test_on_a_cpu_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not fused.fused_available(torch.device("cpu"))


def _name_and_version() -> tuple[str, str]:
    import triton

    return fused.kernels_name(), triton.__version__


@needs_triton
def test_the_name_has_tritons_version(interpreter: Callable[..., tuple[str, str]]) -> None:
    name, version = interpreter(_name_and_version)
    assert version.startswith(name.removeprefix("triton ") + ".")
