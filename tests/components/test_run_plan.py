"""A run that cannot fit is refused before memory is taken."""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from torchtitan_diloco.components import run_plan
from torchtitan_diloco.components.run_plan import check_memory, log_early_end, plan_run
from torchtitan_diloco.config.schema import Config, Training
from torchtitan_diloco.diloco.config import DiLoCoConfig, OuterOptimizer
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.hardware import GIB
from torchtitan_diloco.log import LOCAL_ISLANDS

ALONE = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
NONE = DiLoCoConfig(method="none")
WITHOUT_MOMENTUM = DiLoCoConfig(outer_optimizer=OuterOptimizer("sgd"))


@pytest.mark.parametrize(
    ("ranks", "muon", "diloco", "needed"),
    [(1, False, NONE, 16), (2, False, DiLoCoConfig(), 56), (1, True, WITHOUT_MOMENTUM, 21)],
)
def test_what_does_not_fit_into_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, ranks: int, muon: bool, diloco: DiLoCoConfig, needed: int
) -> None:
    """A quarter of the parameters are embeddings, which are AdamW's with either optimizer."""
    plan = plan_run(Training(steps=10), 1, GIB, GIB // 4, muon=muon)
    check = partial(check_memory, plan, ALONE, diloco)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(run_plan, "available_memory_bytes", lambda: needed * GIB)
    check()
    monkeypatch.setattr(run_plan, "available_memory_bytes", lambda: needed * GIB - 1)
    with pytest.raises(ValueError, match=rf"need {needed}.0 GiB on this machine.*--config 35m"):
        check()


def test_an_island_that_stops_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `islands.local` by the folder of all islands, not by its own."""
    caplog.set_level(logging.INFO)
    log_early_end(Config(), Path("runs/island-1"), 4, 10, island=True)
    monkeypatch.setenv(LOCAL_ISLANDS, "runs")
    log_early_end(Config(), Path("runs/island-1"), 4, 10, island=True)
    resumes = "left the run after own step 4; the same command with --run.folder {} resumes it"
    assert caplog.messages == [resumes.format(one) for one in ("runs/island-1", "runs")]
