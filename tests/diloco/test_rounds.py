"""What StreamingDiLoCo tells of each round, against what the parameters say; who came last, on durations alone."""

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from tests.diloco.test_against_reference import Net, full, inner_step
from tests.diloco.test_streaming import join, sgd
from tests.processes import ProcessPool
from torchtitan_diloco.components.round_records import PendingRounds
from torchtitan_diloco.diloco import (
    DiLoCoConfig,
    Fragments,
    OuterOptimizer,
    Overlap,
    Quantization,
    StreamingDiLoCo,
)
from torchtitan_diloco.diloco.config import CodecName
from torchtitan_diloco.distributed.world import FSDP, WORKER

LATE_WORKER, LATE_SECONDS = 1, 0.3


def plain_mean(codec: CodecName = "fp32", mixing: float = 0.5) -> DiLoCoConfig:
    """The outer step is the mean, so that each norm can be read off the parameters."""
    return DiLoCoConfig(
        sync_every=4,
        fragments=Fragments(layers_per_fragment=0),
        overlap=Overlap(delay=0, mixing=mixing),
        outer_optimizer=OuterOptimizer(name="sgd", lr=1.0),
        quantization=Quantization(codec=codec),
    )


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([full(value).double().flatten() for value in values.values()])


def _records(
    workers: int, chosen: DiLoCoConfig, sharded: bool = False
) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Of every round: the record, and what it should say of this worker."""
    world = join(workers)
    model = Net()
    if sharded and world.mesh is not None:
        fully_shard(model, mesh=world.mesh[FSDP])
    outer, optimizer = (
        StreamingDiLoCo(model, world.group(WORKER), chosen, shard_group=world.shards),
        sgd(model),
    )
    found = []
    for step in range(1, 13):
        inner_step(model, optimizer, world.worker, step)
        before, local = flat(outer.global_state_dict()), flat(dict(model.named_parameters()))
        outer.step(weight=2.0)
        after = flat(outer.global_state_dict())
        rounds = outer.rounds()
        assert len(rounds) == (step % 4 == 0)
        records = PendingRounds(
            world, rounds, outer.fragment_names, clock_start=0.0, where=""
        ).records()
        delta, update = before - local, after - before
        expected = {
            "outer_gradient_norm": float(delta.norm()),
            "cosine_to_mean": float(-torch.dot(delta, update) / (delta.norm() * update.norm())),
            "drift_norm": float((local - after).norm()),
            "update_norm": float(update.norm()),
            "values": float(local.numel()),
        }
        found += [(record, expected) for record in records]
    return found


@pytest.mark.parametrize(
    ("workers", "codec", "mixing"),
    [(1, "fp32", 0.5), (2, "fp32", 0.0), (2, "fp4_e3m0", 1.0), (3, "fp32", 0.5), (3, "int8", 0.5)],
)
def test_norms_and_angles_are_those_of_the_parameters(
    processes: ProcessPool, workers: int, codec: CodecName, mixing: float
) -> None:
    for worker, found in enumerate(
        processes.run(_records, workers, workers, plain_mean(codec, mixing))
    ):
        assert len(found) == 3
        for record, expected in found:
            check(record, expected, worker, workers)


def check(record: dict[str, Any], expected: dict[str, float], worker: int, workers: int) -> None:
    own = record["workers"][worker]
    for key in ("outer_gradient_norm", "drift_norm"):
        assert own[key] == pytest.approx(expected[key], rel=1e-4), key
    assert record["update_norm"] == pytest.approx(expected["update_norm"], rel=1e-4)
    assert record["parameters"] == expected["values"]
    assert (record["participants"], record["fragment"]) == (workers, 0)
    assert own["weight"] == 8.0, "of four inner steps"
    if workers == 1:
        assert (own["cosine_to_mean"], own["sent_bytes"], record["last_worker"]) == (None, 0, None)
        return
    assert own["cosine_to_mean"] == pytest.approx(expected["cosine_to_mean"], rel=1e-4)
    assert min(own["sent_bytes"], own["received_bytes"]) > 0
    names = ("due", "taken", "begun", "heard", "received", "ready", "arrived", "applied")
    moments = [own[f"{name}_at_seconds"] for name in names]
    assert moments == sorted(moments), "one after the other on the worker's own clock"
    others = [other != worker for other in range(workers)]
    assert [value is not None for value in own["heard_after_seconds"]] == others
    assert own["received_bits_per_second_from"] == [None] * workers, (
        "messages too small to tell how fast a link is"
    )


def test_shards_of_a_worker_add_up(processes: ProcessPool) -> None:
    """Two workers of two ranks tell what two of one rank would."""
    for rank, found in enumerate(processes.run(_records, 4, 2, plain_mean(), True)):
        for record, expected in found:
            check(record, expected, rank // 2, 2)


def _slowed() -> list[dict[str, Any]]:
    world = join(3)
    model = Net()
    outer, optimizer = StreamingDiLoCo(model, world.group(WORKER), plain_mean()), sgd(model)
    for step in range(1, 13):
        inner_step(model, optimizer, world.worker, step)
        if world.worker == LATE_WORKER and step % 4 == 0:
            time.sleep(LATE_SECONDS)
        outer.step()
    return PendingRounds(
        world, outer.rounds(), outer.fragment_names, clock_start=0.0, where=""
    ).records()


def test_a_slow_worker_is_the_last_to_arrive(processes: ProcessPool) -> None:
    """The others wait for it, and it waits for nobody; no link is slow. All workers come to the same record."""
    results = processes.run(_slowed, 3)
    for records in results:
        assert len(records) == 3
        for record in records:
            assert record["last_worker"] == LATE_WORKER
            assert LATE_SECONDS / 2 < record["late_by_seconds"] < math.inf
            for worker, facts in enumerate(record["workers"]):
                ahead = facts["ahead_of_last_seconds"]
                assert ahead == 0 if worker == LATE_WORKER else ahead > LATE_SECONDS / 2
                late = [
                    seconds
                    for seconds in facts["heard_after_seconds"]
                    if seconds is not None and seconds > LATE_SECONDS / 2
                ]
                assert len(late) == (worker != LATE_WORKER), (
                    "only the slow worker's header was waited for"
                )
    assert results[0] == results[1] == results[2]


def test_rounds_nobody_asks_for_are_not_kept_for_ever() -> None:
    model = Net()
    outer = StreamingDiLoCo(model, None, plain_mean())
    for _ in range(4 * 300):
        outer.step()
    rounds = outer.rounds()
    assert (len(rounds), rounds[-1].sent_step) == (256, 1200)
    assert outer.rounds() == []
