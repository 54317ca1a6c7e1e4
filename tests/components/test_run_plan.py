"""A run that cannot fit is refused before memory is taken, and one that takes months says so."""

import logging

import pytest
import torch

from torchtitan_diloco.components import run_plan
from torchtitan_diloco.components.run_plan import RunPlan, check_size
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.utils import GIB

ALONE = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
LARGE = RunPlan(GIB, 0, accumulation=1, tokens_per_step=1000, total_steps=10)


@pytest.mark.parametrize(("ranks", "outer_loop", "needed"), [(1, False, 16), (2, True, 56)])
def test_what_does_not_fit_into_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, ranks: int, outer_loop: bool, needed: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(run_plan, "free_memory_bytes", lambda _: needed * GIB)
    check_size(LARGE, ALONE, 1, outer_loop=outer_loop)
    monkeypatch.setattr(run_plan, "free_memory_bytes", lambda _: needed * GIB - 1)
    with pytest.raises(ValueError, match=rf"need {needed}.0 GiB on this machine.*--config 35m"):
        check_size(LARGE, ALONE, 1, outer_loop=outer_loop)


@pytest.mark.parametrize(("flops", "said"), [(10**6, False), (10**18, True)])
def test_a_run_of_months_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flops: int, said: bool
) -> None:
    monkeypatch.setattr(run_plan, "free_memory_bytes", lambda _: 1000 * GIB)
    with caplog.at_level(logging.WARNING, "torchtitan_diloco"):
        check_size(LARGE, ALONE, flops, outer_loop=False)
    assert ("10,000 tokens take" in caplog.text) == said
