"""A run that cannot fit is refused before memory is taken, and one that takes months says so."""

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_diloco import hardware
from torchtitan_diloco.components import run_plan
from torchtitan_diloco.components.run_plan import (
    RunPlan,
    check_size,
    log_early_end,
    plan_run,
    state_of_rank,
)
from torchtitan_diloco.config.schema import Checkpoint, Training
from torchtitan_diloco.diloco.config import DiLoCoConfig, Link, OuterOptimizer
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.hardware import GIB, free_memory_bytes
from torchtitan_diloco.log import LOCAL_ISLANDS

ALONE = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
ON_GPU = World(rank=0, size=1, workers=1, device=torch.device("cuda", 0))
NONE = DiLoCoConfig(method="none")
ON_HOST = DiLoCoConfig(link=Link(outer_state="cpu"))
WITHOUT_MOMENTUM = DiLoCoConfig(outer_optimizer=OuterOptimizer("sgd"))
MIB = 2**20
INNER, OUTER = "parameters, gradients, optimizer", "outer state"
SMALL = RunPlan(MIB, MIB // 4, accumulation=1, tokens_per_step=1000, total_steps=10)


@pytest.mark.parametrize(
    ("world", "ranks", "muon", "diloco", "needed", "where"),
    [
        (ALONE, 1, False, NONE, 16, "machine"),
        (ALONE, 2, False, DiLoCoConfig(), 56, "machine"),
        (ALONE, 1, True, WITHOUT_MOMENTUM, 21, "machine"),
        (ON_GPU, 4, False, NONE, 32, "GPU"),  # two ranks on each GPU
        (ON_GPU, 4, False, ON_HOST, 48, "machine"),
    ],
)
def test_what_does_not_fit_into_memory_is_refused_and_months_are_said(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    world: World,
    ranks: int,
    muon: bool,
    diloco: DiLoCoConfig,
    needed: int,
    where: str,
) -> None:
    """A quarter of the parameters are embeddings, which are AdamW's with either optimizer."""
    plan = plan_run(Training(steps=10), 1, GIB, GIB // 4, muon=muon)
    check = partial(check_size, plan, world, diloco=diloco)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a new one")
    monkeypatch.setattr(run_plan, "free_memory_bytes", lambda _: needed * GIB)
    check(flops_per_token=1)
    assert not caplog.text
    check(flops_per_token=10**18)
    is_known = world is ALONE  # how fast its device is
    assert ("tokens take" in caplog.text) == is_known
    monkeypatch.setattr(run_plan, "free_memory_bytes", lambda _: needed * GIB - 1)
    with pytest.raises(ValueError, match=rf"need {needed}.0 GiB on this {where} \(.*--config 35m"):
        check(flops_per_token=1)


@pytest.mark.parametrize(
    ("chosen", "island", "on_gpu", "on_host"),
    [
        ("auto", False, {INNER: 16, OUTER: 12}, {}),
        ("device", False, {INNER: 16, OUTER: 12}, {}),
        ("auto", True, {INNER: 16, OUTER: 16}, {}),  # a copy more
        ("cpu", False, {INNER: 16}, {OUTER: 12}),
        ("none", False, {INNER: 16}, {}),
    ],
)
def test_the_outer_state_counts_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
    chosen: Any,
    island: bool,
    on_gpu: dict[str, float],
    on_host: dict[str, float],
) -> None:
    """In bytes for each of 1 Mi parameters, on a GPU of 64 MiB."""
    diloco = NONE if chosen == "none" else DiLoCoConfig(link=Link(outer_state=chosen))
    properties = SimpleNamespace(total_memory=64 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = state_of_rank(SMALL, ON_GPU, diloco, island=island)
    for place, expected in ((ON_GPU.device, on_gpu), (ALONE.device, on_host)):
        assert {name: size / MIB for name, size in found.get(place, {}).items()} == expected


def test_an_island_that_stops_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `islands.local` by the folder of all islands, not by its own."""
    caplog.set_level(logging.INFO)
    about = SMALL, 4, Training(steps=10), Checkpoint(), Path("runs/island-1")
    log_early_end(*about, island=True)
    monkeypatch.setenv(LOCAL_ISLANDS, "runs")
    log_early_end(*about, island=True)
    resumes = "left the run after own step 4; the same command with --run.folder {} resumes it"
    assert caplog.messages == [resumes.format(one) for one in ("runs/island-1", "runs")]


@pytest.mark.parametrize(("limit", "free"), [("1000", 350), ("max", None)])
def test_files_that_a_container_has_read_are_not_in_the_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, free: int | None
) -> None:
    stat = "anon 600\nactive_file 100\ninactive_file 200\n"
    for name, text in (("max", f"{limit}\n"), ("current", "950\n"), ("stat", stat)):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    found = free_memory_bytes(ALONE.device)
    assert found == free if free is not None else found > 1000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 64))
    assert free_memory_bytes(ON_GPU.device) == 10, "free, not all memory"
