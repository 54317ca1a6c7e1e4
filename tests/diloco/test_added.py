"""The formats and the outer optimizer that docs/algorithm.md adds are trained, and resumed."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import REPOSITORY
from tests.diloco.toy import alone, config, full, loss, parameters, start, train
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import Quantization
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.formats import FORMATS, Format, island_formats
from torchtitan_diloco.diloco.outer_optimizers import OUTER_OPTIMIZERS
from torchtitan_diloco.diloco.state_dict import saved_bytes
from torchtitan_diloco.islands.layout import Layout
from torchtitan_diloco.islands.merging import merge, outer_optimizer
from torchtitan_diloco.islands.payload import PartHeader, encode, memory_of, read_header
from torchtitan_diloco.islands.rules.settings import Settings
from torchtitan_diloco.islands.scratch import Scratch

PAGE = (REPOSITORY / "docs/algorithm.md").read_text()
STEPS = 48
SIGNUM: dict[str, Any] = {"name": "signum", "lr": 0.02, "warmup": 30}


@contextmanager
def added() -> Iterator[None]:
    """Run the programs of the page in this process, and undo what they have added."""
    dicts: tuple[dict[str, Any], ...] = (FORMATS, OUTER_OPTIMIZERS)
    before = [dict(entries) for entries in dicts]
    programs = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert len(programs) == len(dicts)
    for program in programs:
        exec(program, {"__name__": "mine"})
    try:
        yield
    finally:
        for entries, known in zip(dicts, before, strict=True):
            entries.clear()
            entries.update(known)


def _losses(codec: str, outer_settings: dict[str, Any]) -> tuple[float, float, dict[str, Tensor]]:
    """Return the loss of the shared parameters before and after training, and them."""
    with added():
        wire = Quantization(codec, block_size=16) if codec == "int4" else Quantization(codec)
        chosen = replace(config(2, 3, **outer_settings), quantization=wire)
        outer, model, optimizer = start(chosen, 2)

        def shared_loss() -> float:
            with outer.global_parameters(), torch.no_grad():
                seen = [loss(model, worker, step) for worker in range(2) for step in range(1, 9)]
            return float(torch.stack(seen).mean())

        before = shared_loss()
        train(outer, model, optimizer, range(1, STEPS + 1))
        outer.drain()
        after = shared_loss()
        shared = {name: full(value) for name, value in outer.global_state_dict().items()}
        outer.close()
        return before, after, shared


@pytest.mark.parametrize(
    ("codec", "outer_settings"), [("fp16", {}), ("int4", {}), ("fp32", SIGNUM)]
)
def test_what_the_page_adds_is_trained(
    processes: ProcessPool, codec: str, outer_settings: dict[str, Any]
) -> None:
    (before, after, shared), (_, _, other) = processes.run(_losses, 2, codec, outer_settings)
    assert after < before - 0.2
    torch.testing.assert_close(shared, other, rtol=0, atol=0)


@pytest.fixture
def programs() -> Iterator[None]:
    with added():
        yield


@pytest.mark.usefixtures("programs")
def test_the_formats_of_the_page_have_their_values() -> None:
    values = torch.arange(-7.0, 8.0).repeat(100)
    for codec in (build_codec(Quantization(name)) for name in ("fp16", "int4")):
        payload = torch.zeros(codec.wire_bytes(len(values)), dtype=torch.uint8)
        codec.encode(values, payload)
        arrived = torch.empty_like(values)
        codec.decode(payload, arrived)
        assert torch.equal(arrived, values)
        name = codec.name
        content = memory_of(encode(values, PartHeader(name)))
        assert read_header(content).codec == name, "islands can send it"


def test_islands_refuse_formats_that_they_cannot_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "n" * 25, Format(build="mine:Codec"))
    monkeypatch.setitem(FORMATS, "n" * 24, Format(build="mine:Codec"))
    assert {*FORMATS} - {*island_formats()} == {"topk", "n" * 25}


@pytest.mark.usefixtures("programs")
def test_an_added_optimizer_is_resumed_bit_for_bit() -> None:
    """Also in the middle of a warm-up of its learning rate."""
    chosen = config(2, 3, **SIGNUM)
    outer, model, optimizer = alone(chosen)
    train(outer, model, optimizer, range(1, 21))
    saved = copy.deepcopy((model.state_dict(), outer.state_dict()))
    tensors = saved[1]["tensors"]
    assert {key for key in tensors if key.startswith("mean_delta/")} == {
        f"mean_delta/{name}" for name in parameters(model)
    }
    train(outer, model, optimizer, range(21, STEPS + 1))
    resumed, again, fresh = alone(chosen)
    again.load_state_dict(saved[0])
    assert resumed.load_state_dict(saved[1]) == []
    train(resumed, again, fresh, range(21, STEPS + 1))
    torch.testing.assert_close(parameters(again), parameters(model), rtol=0, atol=0)
    assert saved_bytes(chosen) == 4 * 3, "the copies and its state"
    outer.close()
    resumed.close()


@pytest.mark.usefixtures("programs")
def test_the_syncer_of_islands_makes_the_step_of_an_added_optimizer(tmp_path: Path) -> None:
    settings = Settings(
        sync_every=8,
        delay=1,
        total_tokens=1000,
        slots=1,
        start_with=1,
        streams=1,
        block=1,
        outer_optimizer="signum",
        outer_lr=0.25,
        outer_numbers={"momentum": 0.5, "warmup": 100},
    )
    shapes = [(3, 5)]
    scratch = Scratch(tmp_path, [shapes], slots=len(outer_optimizer(settings).rule.slots))
    before = scratch.take(0)
    for buffer in (before.theta, before.published, *before.slots):
        buffer.zero_()
    before.complete(0)
    after = scratch.take(0)
    delta = torch.arange(15.0) - 7
    parts = [(memory_of(encode(delta, PartHeader())), 25)]
    assert merge(before, after, Layout(shapes), parts, settings, weight_of_all=25, clock=25)
    assert torch.equal(after.theta, before.theta - 0.25 * 25 / 100 * delta.sign())
    assert torch.equal(after.slots[0], 0.5 * delta)
