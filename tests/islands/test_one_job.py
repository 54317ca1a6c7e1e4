"""Islands in fp32 that start together have the versions of one job, bit for bit."""

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.diloco.toy import config, inner_step, parameters, start
from tests.islands.by_hand import HandIsland, newest, open_run, syncer, train
from tests.islands.ranked import versions_of_islands
from tests.processes import ProcessPool
from tests.store.seaweed import BUCKET, SeaweedServer
from torchtitan_diloco.diloco import DiLoCoConfig

STEPS = 60
VERSIONS = 6
"""Versions of each fragment; the first comes after H steps and its offset."""

Versions = dict[tuple[int, int], Tensor]


def one_job(
    chosen: DiLoCoConfig, tokens: list[int], ranks: int = 1
) -> tuple[Versions, dict[str, Tensor]]:
    """Return all versions of the shared copies, and the parameters of this worker at the end.

    With several ranks a worker, the versions are the shards of this rank.
    """
    outer, model, optimizer = start(chosen, 2, ranks, adam=True)
    versions: Versions = {}
    for step in range(1, STEPS + 1):
        inner_step(model, optimizer, outer.worker, step)
        outer.step(tokens[outer.worker])
        for round_ in outer.rounds():
            state = outer.loop.states[round_.fragment]
            versions[round_.fragment, round_.outer_round] = state.outer.clone()
    return versions, parameters(model)


def compare(
    processes: ProcessPool,
    chosen: DiLoCoConfig,
    tokens: list[int],
    store: Path | str,
    scratch: Path,
) -> None:
    """Compare the versions, and the parameters at the end, of islands and of one job."""
    results = processes.run(one_job, 2, chosen, tokens)
    with open_run(store) as run:
        pair = [
            HandIsland(run, name, chosen, adam=True, step_tokens=sum(tokens)) for name in ("a", "b")
        ]
        with syncer(store, scratch):
            train(pair, STEPS // 2, tokens)
        with syncer(store, scratch):
            train(pair, STEPS, tokens)
    expected = results[0][0]
    assert {fragment for fragment, version in expected if version == VERSIONS} == {
        fragment for fragment, _ in expected
    }
    for island in pair:
        for key, value in expected.items():
            assert torch.equal(island.versions[key], value), f"fragment and version {key}"
        slot = island.machine.slot
        assert slot is not None
        for name, value in parameters(island.model).items():
            assert torch.equal(value, results[slot][1][name]), f"{name} of worker {slot}"
    decision = newest(store)
    assert decision.stopped
    assert [sum(ledger.lost for ledger in slot.ledgers) for slot in decision.slots] == [0, 0]


@pytest.mark.parametrize(
    ("layers", "outer", "delay", "tokens"),
    [
        (8, {"name": "nesterov"}, 1, [100, 100]),
        (2, {"name": "nesterov", "warmup": 70}, 1, [100, 170]),
        (0, {"name": "adam", "lr": 0.05, "beta2": 0.9}, 5, [100, 170]),
        (8, {"name": "sgd", "lr": 1.0}, 0, [130, 170]),
    ],
    ids=["nesterov", "warm-up", "adam", "average"],
)
def test_islands_have_the_versions_of_one_job(
    processes: ProcessPool,
    tmp_path: Path,
    layers: int,
    outer: dict[str, Any],
    delay: int,
    tokens: list[int],
) -> None:
    """Also if their syncer is stopped and started again on the same machine."""
    chosen = config(layers, delay=delay, **outer)
    compare(processes, chosen, tokens, tmp_path / "store", tmp_path / "scratch")


def test_islands_have_the_versions_of_one_job_in_a_bucket(
    processes: ProcessPool, tmp_path: Path, seaweed: SeaweedServer
) -> None:
    run = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    join_file = seaweed.join_file(tmp_path / "join.toml", "owner", location=run)
    compare(processes, config(8, delay=1), [100, 170], str(join_file), tmp_path / "scratch")


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "layers", "outer", "tokens"),
    [
        ("folder", 8, {"name": "nesterov"}, [100, 170]),
        ("folder", 2, {"name": "adam", "lr": 0.05}, [130, 130]),
        ("bucket", 2, {"name": "nesterov"}, [100, 170]),
    ],
    ids=["nesterov", "adam", "bucket"],
)
def test_islands_of_two_ranks_have_the_versions_of_one_job(
    processes: ProcessPool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    place: str,
    layers: int,
    outer: dict[str, Any],
    tokens: list[int],
) -> None:
    """Each rank has its shards of them."""
    chosen = config(layers, delay=1, **outer)
    store = tmp_path / "store"
    if place == "bucket":
        seaweed: SeaweedServer = request.getfixturevalue("seaweed")
        run = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        store = seaweed.join_file(tmp_path / "join.toml", "owner", location=run)
    job = processes.run(one_job, 4, chosen, tokens, 2)
    with syncer(store, tmp_path / "scratch"):
        found = processes.run(versions_of_islands, 4, store, chosen, tokens, STEPS)
    assert sorted(slot for slot, _, _ in found) == [0, 0, 1, 1]
    for rank, (slot, versions, parameters_here) in enumerate(found):
        expected, expected_parameters = job[2 * slot + rank % 2]
        assert any(version == VERSIONS for _, version in expected)
        for key, value in expected.items():
            assert torch.equal(versions[key], value), f"fragment and version {key}"
        for name, value in expected_parameters.items():
            assert torch.equal(parameters_here[name], value), f"{name} of slot {slot}"
    assert not any(ledger.lost for slot in newest(store).slots for ledger in slot.ledgers)
