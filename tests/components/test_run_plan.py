"""A run that cannot fit is refused before memory is taken, and one that takes months says so."""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from torchtitan_diloco import utils
from torchtitan_diloco.components import run_plan
from torchtitan_diloco.components.run_plan import RunPlan, check_size, log_early_end, plan_run
from torchtitan_diloco.config.schema import Checkpoint, Training
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.utils import GIB, LOCAL_ISLANDS, free_memory_bytes

ALONE = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
LARGE = RunPlan(GIB, GIB // 4, accumulation=1, tokens_per_step=1000, total_steps=10)


@pytest.mark.parametrize(
    ("ranks", "muon", "outer_bytes", "needed"),
    [(1, False, 0, 16), (2, False, 12, 56), (1, True, 8, 21)],
)
def test_what_does_not_fit_into_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, ranks: int, muon: bool, outer_bytes: int, needed: int
) -> None:
    """A quarter of the parameters are embeddings, which are AdamW's with either optimizer."""
    plan = plan_run(Training(steps=10), 1, GIB, GIB // 4, muon=muon)
    check = partial(check_size, plan, ALONE, 1, outer_bytes=outer_bytes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(run_plan, "free_memory_bytes", lambda _: needed * GIB)
    check()
    monkeypatch.setattr(run_plan, "free_memory_bytes", lambda _: needed * GIB - 1)
    with pytest.raises(ValueError, match=rf"need {needed}.0 GiB on this machine.*--config 35m"):
        check()


@pytest.mark.parametrize(("flops", "said"), [(10**6, False), (10**18, True)])
def test_a_run_of_months_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flops: int, said: bool
) -> None:
    monkeypatch.setattr(run_plan, "free_memory_bytes", lambda _: 1000 * GIB)
    with caplog.at_level(logging.WARNING, "torchtitan_diloco"):
        check_size(LARGE, ALONE, flops, outer_bytes=0)
    assert ("10,000 tokens take" in caplog.text) == said


def test_an_island_that_stops_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `islands.local` by the folder of all islands, not by its own."""
    caplog.set_level(logging.INFO)
    about = LARGE, 4, Training(steps=10), Checkpoint(), Path("runs/island-1")
    log_early_end(*about, island=True)
    monkeypatch.setenv(LOCAL_ISLANDS, "runs")
    log_early_end(*about, island=True)
    resumes = "left the run after own step 4; the same command with --run.folder {} resumes it"
    assert caplog.messages == [resumes.format(one) for one in ("runs/island-1", "runs")]


@pytest.mark.parametrize(("limit", "free"), [("1000", 350), ("max", None)])
def test_files_that_a_container_has_read_are_not_in_the_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, free: int | None
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("950\n")
    (tmp_path / "memory.stat").write_text("anon 600\nactive_file 100\ninactive_file 200\n")
    monkeypatch.setattr(utils, "CGROUP", tmp_path)
    found = free_memory_bytes(torch.device("cpu"))
    assert found == free if free is not None else found > 1000
