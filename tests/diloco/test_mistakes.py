"""Mistakes of a loop of one's own are errors that say what to do, and not a silent waste."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.diloco.toy import AVERAGE_EVERY_STEP, Net, config, inner_step, join, sgd
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import DiLoCoConfig, Overlap, StreamingDiLoCo
from torchtitan_diloco.diloco.healing import Watch
from torchtitan_diloco.diloco.transport import NOT_FINITE, Header
from torchtitan_diloco.distributed.world import WORKER
from torchtitan_diloco.utils import logger


@pytest.mark.parametrize(
    ("section", "wrong", "hint"),
    [
        (DiLoCoConfig, "sync_evry", "; did you mean sync_every?"),
        (DiLoCoConfig, "delay", "; did you mean overlap.delay?"),
        (Overlap, "mixin", "; did you mean mixing?"),
        (Overlap, "temperature", ""),
    ],
)
def test_a_misspelled_setting_names_the_right_one(
    section: Callable[..., object], wrong: str, hint: str
) -> None:
    with pytest.raises(TypeError, match=rf"has no setting {wrong}{re.escape(hint)}$"):
        section(**{wrong: 1})
    with pytest.raises(TypeError, match="has no setting sync_evry"):
        replace(DiLoCoConfig(), sync_evry=1)  # type: ignore[call-arg]


# --- groups and models ----------------------------------------------------------------------------


def _refusal(model: nn.Module, group: dist.ProcessGroup | None) -> str:
    try:
        StreamingDiLoCo(model, group, AVERAGE_EVERY_STEP).close()
    except ValueError as error:
        return str(error)
    return ""


def _refusals() -> dict[str, str]:
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.group.WORLD
    alone = [dist.new_group([one]) for one in range(2)]
    sharded, a_minute = Net(), timedelta(minutes=1)
    fully_shard(sharded)
    by_hand: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, a_minute)  # type: ignore[attr-defined]
    return {
        "DDP over workers": _refusal(DistributedDataParallel(Net()), workers),
        "DDP in a worker": _refusal(
            DistributedDataParallel(Net(), process_group=alone[rank]), workers
        ),
        "FSDP over workers": _refusal(sharded, workers),
        "another world": _refusal(Net(), by_hand),
        "not in the group": _refusal(Net(), alone[1 - rank]),
    }


def test_groups_and_models_that_cannot_work_are_refused(processes: ProcessPool) -> None:
    for found in processes.run(_refusals, 2):
        assert found["DDP in a worker"] == ""
        assert 'DistributedDataParallel "" joins the ranks [0, 1]' in found["DDP over workers"]
        assert "the mesh of gain joins the ranks [0, 1]" in found["FSDP over workers"]
        for case in ("another world", "not in the group"):
            assert "hand in dist.new_group(ranks), which all ranks call" in found[case]


def _warnings(patch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    patch.setattr(logger, "warning", found.append)
    return found


def _with_statistics() -> list[str]:
    world = join(2)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.MonkeyPatch.context() as patch:
        found = _warnings(patch)
        StreamingDiLoCo(model, world.group(WORKER), AVERAGE_EVERY_STEP)
    return found


def test_running_statistics_are_warned_about(processes: ProcessPool) -> None:
    (warning,), on_second = processes.run(_with_statistics, 2)
    assert "such as 1.running_mean are not exchanged: every worker keeps its own" in warning
    assert on_second == []


# --- exchanges in vain ----------------------------------------------------------------------------


def header(delta: int = 0, flags: int = 0, fragment: int = 0) -> Header:
    return Header(flags, 1, fragment, 1, 1, 1.0, 0, delta)


def rounds(watch: Watch, *headers: Header, count: int) -> None:
    for _ in range(count):
        watch.note(list(headers), norm_limit=20.0)


def test_equal_deltas_of_all_fragments_are_an_error() -> None:
    watch = Watch(workers=2, fragments=4)
    rounds(watch, header(), header(), count=9)  # nothing has changed yet
    rounds(watch, header(5), header(5), count=3)
    with pytest.raises(ValueError, match="the same bits in all 4 exchanges so far"):
        rounds(watch, header(6), header(6), count=1)


def test_deltas_are_compared_until_they_differ_once() -> None:
    watch = Watch(workers=2, fragments=4)
    rounds(watch, header(5), header(5), count=3)
    rounds(watch, header(5), header(6), count=1)
    assert not watch.compares
    rounds(watch, header(), header(), count=9)
    assert not Watch(workers=1, fragments=4).compares


def test_a_worker_without_finite_deltas_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    watch, bad = Watch(workers=3, fragments=2), header(flags=NOT_FINITE)
    rounds(watch, header(), bad, bad, count=3)
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1, "one line for rounds in a row"
    assert "the delta of worker 1 and of 2 after step 1 is not finite" in lines[0]
    rounds(watch, header(), header(), header(), count=1)
    rounds(watch, header(), header(), bad, count=3)
    assert len(caplog.records) == 2
    fine = header(fragment=1)
    rounds(watch, fine, fine, fine, count=3)  # of the other fragment
    message = "worker 2 has not sent a finite delta of fragment 0 in 4 rounds"
    with pytest.raises(ValueError, match=message):
        rounds(watch, header(), header(), bad, count=1)


def _run(mistake: str) -> tuple[int, str]:
    """Return the steps that were made, and the error."""
    world, model = join(2), Net()
    optimizer = sgd(model)

    def average(*_: object) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    if mistake == "averaged":
        optimizer.register_step_pre_hook(average)
    outer = StreamingDiLoCo(model, world.group(WORKER), config(2))
    step = 0
    try:
        for step in range(1, 41):
            if mistake == "NaN" and world.worker == step == 1:
                model.gain.data.fill_(math.nan)
            inner_step(model, optimizer, 0 if mistake == "same data" else world.worker, step)
            outer.step()
        outer.drain()
    except ValueError as error:
        return step, str(error)
    return step, ""


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("", ""),
        ("averaged", "gradients are averaged over the workers in every step"),
        ("same data", "or they read the same data"),
        ("NaN", "worker 1 has not sent a finite delta of fragment 0 in 4 rounds"),
    ],
)
def test_a_run_ends_where_its_exchanges_are_in_vain(
    processes: ProcessPool, mistake: str, message: str
) -> None:
    for steps, error in processes.run(_run, 2, mistake):
        assert message in error
        assert (steps == 40) == (error == "") == (mistake == "")
