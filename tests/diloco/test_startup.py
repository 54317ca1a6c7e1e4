"""The start of an outer loop: what is refused says what to do; workers agree on all the rest."""

import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.diloco.toy import AVERAGE_EVERY_STEP, Net, config, fused, join
from tests.processes import ProcessPool, counting_sent
from torchtitan_diloco.base.hardware import describe_machine
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.tensors import local_of
from torchtitan_diloco.diloco import (
    Beginning,
    DiLoCoConfig,
    Link,
    OuterOptimizer,
    Overlap,
    Quantization,
    StreamingDiLoCo,
    arithmetic,
    gloo_peers,
)
from torchtitan_diloco.diloco.codecs import base
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.gloo_peers import GlooPeers
from torchtitan_diloco.diloco.outer_state import pick_state_device
from torchtitan_diloco.diloco.rendezvous import store_of_attempt
from torchtitan_diloco.distributed.world import FSDP, WORKER

GPU = torch.device("cuda", 0)
MESSAGE_BYTES = 12_500
"""Size of the messages with first weights, if the timeout is 1 s."""


def test_numbers_have_the_type_of_their_setting() -> None:
    """Those of islands are compared, and sent, as text."""
    every: Any = 1e2
    config = DiLoCoConfig(sync_every=every, outer_optimizer=OuterOptimizer(lr=1))
    assert repr((config.sync_every, config.outer_optimizer.lr)) == "(100, 1.0)"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"method": "none"}, "diloco.method"),
        ({"workers": 3}, "diloco.workers = 3: must be 1"),
        ({"sync_every": 2.5}, "DiLoCoConfig.sync_every = 2.5: expected a whole number"),
        ({"overlap": Overlap(delay=100)}, r"delay = 100: must be smaller than .*; 0 waits"),
        ({"overlap": Overlap(mixing_end=0.0)}, "mixing_end = 0.0: needs the length of the run"),
        ({"beginning": Beginning(length=0.1)}, "beginning.length = 0.1: needs the length"),
        ({"beginning": Beginning(sync_every=9)}, "is only used with diloco.beginning.length"),
        ({"quantization": Quantization(codec="int8", block_size=48)}, "block_size.*: use 32"),
    ],
)
def test_a_config_made_in_python_is_checked(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        StreamingDiLoCo(Net(), None, replace(DiLoCoConfig(), **changes))


def _with_link(link: Link) -> str:
    group = join(2).group(WORKER)
    with pytest.raises(ValueError, match="does not apply to a group that you have made") as caught:
        StreamingDiLoCo(Net(), group, replace(config(0), link=link))
    GlooPeers(group, streams=2).start(Net(), replace(config(0), link=link))
    return str(caught.value)


@pytest.mark.parametrize(
    ("link", "key"),
    [
        (Link(interface="eth7"), "diloco.link.interface = 'eth7'"),
        (Link(streams=3), "diloco.link.streams = 3"),
    ],
)
def test_a_link_is_not_that_of_a_group_made_before(
    processes: ProcessPool, link: Link, key: str
) -> None:
    assert all(key in message for message in processes.run(_with_link, 2, link))


def test_a_beginning_is_a_fraction_of_the_run() -> None:
    chosen = DiLoCoConfig(sync_every=10, beginning=Beginning(length=0.25, sync_every=5))
    outer = StreamingDiLoCo(Net(), None, chosen, total_steps=42)
    outer.close()
    assert outer.loop.schedule.beginning_steps == 10
    assert any("in the first 10 steps every 5 steps" in line for line in outer.describe())


def refusal(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    chosen: DiLoCoConfig = AVERAGE_EVERY_STEP,
    **options: Any,
) -> str:
    try:
        StreamingDiLoCo(model, group, chosen, **options).close()
    except ValueError as error:
        return str(error)
    return ""


OTHERS: dict[str, str] = {
    "diloco.overlap.mixing": "0.5 on worker 0, 0.25 on worker 1",
    "model": "",
    "total_steps": "0 on worker 0, 7 on worker 1",
    "device that encodes (run.device, diloco.link.outer_state)": "cuda on worker 1",
}


def _other_settings() -> tuple[dict[str, str], list[int]]:
    """Return the error for each setting in which worker 1 differs, and the numbers of two runs."""
    group = join(2).group(WORKER)
    found = {}
    for kind in OTHERS:
        model = Net()
        differs = kind if dist.get_rank() == 1 else ""
        if differs == "model":
            model.gain = nn.Parameter(torch.ones(2))
        chosen = config(2, mixing=0.25 if differs == "diloco.overlap.mixing" else 0.5)
        with pytest.MonkeyPatch.context() as patch:
            if differs.startswith("device"):
                patch.setattr(gloo_peers, "pick_state_device", lambda *_, **__: GPU)
                patch.setattr(arithmetic, "compute", lambda *_: {})
            steps = 7 if differs == "total_steps" else 0
            found[kind] = refusal(model, group, chosen, total_steps=steps)
    runs = [GlooPeers(group) for _ in range(2)]
    for one in runs:
        one.start(Net(), config(2))
    return found, [one._run for one in runs]


def test_workers_that_were_started_differently_are_refused(processes: ProcessPool) -> None:
    """Two runs of one configuration are kept apart as well."""
    results = processes.run(_other_settings, 2)
    for found, runs in results:
        for kind, message in found.items():
            assert "workers were started differently" in message
            assert kind in message
            assert OTHERS[kind] in message
        assert runs == results[0][1]
        assert len(set(runs)) == 2


def _other_arithmetic() -> str:
    """Return the error if worker 1 averages as with fused multiply-adds."""
    group = join(2).group(WORKER)
    chosen = replace(config(2), quantization=Quantization(codec="int8"))
    arithmetic.compute.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(base, "add_to_mean", fused)
            return refusal(Net(), group, chosen)
    finally:
        arithmetic.compute.cache_clear()


def test_workers_that_compute_other_bits_are_refused(processes: ProcessPool) -> None:
    """The error names the operation, the workers and their machines."""
    first, second = (re.escape(f"on worker {n} ({describe_machine()})") for n in range(2))
    line = rf"  average of int8: (\w{{8}}) {first}, (?!\1)\w{{8}} {second}"
    for message in processes.run(_other_arithmetic, 2):
        headline, named = message.split("\n")
        assert headline.startswith("workers compute different bits")
        assert re.fullmatch(line, named)


class WithBuffers(nn.Module):
    """Parameters and buffers of several types and layouts, the same on all ranks."""

    mask: Tensor
    scale: Tensor
    unequal: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.wide = nn.Linear(128, 70, bias=False)
        nn.init.ones_(self.wide.weight)
        self.frozen = nn.Parameter(torch.full((3, 2), 2.0).t(), requires_grad=False)
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.bfloat16))
        self.register_buffer("unequal", torch.tensor([math.nan, -0.0]), persistent=False)


CHANGES: dict[str, Callable[[WithBuffers], object]] = {
    "nothing": lambda _: None,
    "net.embedding.weight": lambda model: local_of(model.net.embedding.weight)[1:2].add_(1e-6),
    "net.gain": lambda model: local_of(model.net.gain).neg_(),
    "wide.weight": lambda model: local_of(model.wide.weight)[-1:, -1:].mul_(2),
    "frozen": lambda model: model.frozen[1, 2].neg_(),
    "mask": lambda model: model.mask[4].logical_not_(),
    "scale": lambda model: model.scale.fill_(0.25),
    "unequal": lambda model: model.unequal[1].abs_(),
}
"""A tensor of `WithBuffers` -> a small change of it. The first one changes nothing."""


class Start(NamedTuple):
    sizes: list[int]
    """Bytes of each broadcast."""
    lines: list[str]
    """The log."""
    bits: dict[str, bytes]
    """Bytes of this rank's shard of each tensor."""


def _first_weights(ranks: int) -> dict[str, Start]:
    """Start an outer loop for each change on worker 1."""
    world = join(2, ranks)
    chosen = replace(config(0), link=Link(timeout_seconds=1))
    found = {}
    for changed, change in CHANGES.items():
        model = WithBuffers()
        if world.mesh is not None and ranks > 1:
            fully_shard(model.net, mesh=world.mesh[FSDP])
            fully_shard(model.wide, mesh=world.mesh[FSDP])
        if world.worker == 1:
            with torch.no_grad():
                change(model)
        sizes = list[int]()
        lines = list[str]()
        with counting_sent(sizes, dist.broadcast), pytest.MonkeyPatch.context() as patch:
            patch.setattr(logger, "info", lines.append)
            start_peers(model, world.group(WORKER), chosen, shards=world.shards)
        tensors = (*model.named_parameters(), *model.named_buffers())
        bits = {
            name: local_of(value).reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, value in tensors
        }
        found[changed] = Start(sizes, lines, bits)
    return found


def start_peers(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    chosen: DiLoCoConfig,
    shards: dist.ProcessGroup | None = None,
) -> None:
    peers = GlooPeers(group, shard_group=shards)
    peers.start(model, chosen)
    peers.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_first_weights_that_differ_are_sent(processes: ProcessPool, ranks: int) -> None:
    """Bit by bit, and in messages that a slow link passes within the timeout."""
    results = processes.run(_first_weights, 2 * ranks, ranks)
    for rank, result in enumerate(results):
        expected = results[rank % ranks]["nothing"].bits
        token = result["nothing"].sizes  # of the run, which worker 0 always sends
        assert sum(token) < 100
        assert result["nothing"].lines == []
        for changed in CHANGES.keys() - {"nothing"}:
            sizes, lines, bits = result[changed]
            assert bits == expected, changed
            assert sizes[: len(token)] == token
            sent = sizes[len(token) :]
            assert sum(sent) == len(bits[changed])  # nothing if the shard is empty
            assert max(sent, default=0) <= MESSAGE_BYTES
            said = "worker 0 sends 1 of 19 tensors of the model, "
            assert [line.startswith(said) for line in lines] == [True] * bool(sent)
            assert all(line.endswith("first weights of worker 1 differ") for line in lines)
    sent = results[-1]["wide.weight"].sizes[len(token) :]
    assert len(sent) == math.ceil(4 * 128 * 70 / ranks / MESSAGE_BYTES) > 1


def _refusals() -> tuple[dict[str, str], list[str]]:
    """Return what is refused, over a group whose backend nobody has named, and warnings."""
    dist.init_process_group()
    rank = dist.get_rank()
    workers = dist.group.WORLD
    alone = [dist.new_group([one], backend="gloo") for one in range(2)]
    sharded = Net()
    a_minute = timedelta(minutes=1)
    fully_shard(sharded)
    by_hand: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, a_minute)  # type: ignore[attr-defined]
    statistics = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    warnings = list[str]()
    found = {
        "DDP over workers": refusal(DistributedDataParallel(Net()), workers),
        "DDP in a worker": refusal(
            DistributedDataParallel(Net(), process_group=alone[rank]), workers
        ),
        "FSDP over workers": refusal(sharded, workers),
        "another world": refusal(Net(), by_hand),
        "not in the group": refusal(Net(), alone[1 - rank]),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "warning", warnings.append)
        found["statistics"] = refusal(statistics, workers)
        patch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
        found["no gloo"] = refusal(Net(), workers)
    return found, warnings


def test_groups_and_models_that_cannot_work_are_refused(processes: ProcessPool) -> None:
    results = processes.run(_refusals, 2)
    for found, _ in results:
        assert found["DDP in a worker"] == found["statistics"] == ""
        assert 'DistributedDataParallel "" joins the ranks [0, 1]' in found["DDP over workers"]
        assert "the mesh of gain joins the ranks [0, 1]" in found["FSDP over workers"]
        for case in ("another world", "not in the group"):
            assert "call dist.new_group(ranks) on all ranks" in found[case]
        assert 'pass dist.new_group(ranks, backend="gloo")' in found["no gloo"]
    # A rank may also log that the other one has ended before it.
    (_, on_first), (_, on_second) = [
        (found, [line for line in said if "running_mean" in line]) for found, said in results
    ]
    (warning,) = on_first
    assert "such as 1.running_mean are not exchanged: each worker keeps its own" in warning
    assert on_second == []


@pytest.mark.parametrize(
    ("choice", "outer", "memory", "expected"),
    [
        ("auto", "nesterov", 60e6, "cuda"),  # three buffers of 4 MB are a fifth of it
        ("auto", "nesterov", 59e6, "cpu"),
        ("auto", "adam", 60e6, "cpu"),
        ("device", "adam", 1e6, "cuda"),
        ("cpu", "nesterov", 1e9, "cpu"),
    ],
)
def test_the_outer_state_is_on_a_gpu_that_has_room_for_it(
    monkeypatch: pytest.MonkeyPatch, choice: Any, outer: Any, memory: float, expected: str
) -> None:
    known = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: known)
    chosen = replace(config(name=outer), link=Link(outer_state=choice))
    local = SimpleNamespace(device=GPU, numel=lambda: 1_000_000)
    on_gpu: Any = SimpleNamespace(parts=[SimpleNamespace(local=lambda: local)])
    assert pick_state_device([on_gpu], chosen).type == expected
    known.total_memory = 41e6  # for two buffers: those of an island in a store
    if choice == "auto":
        assert pick_state_device([on_gpu], chosen, has_optimizer=False).type == "cuda"
    on_cpu = build_fragments(Net(), chosen.fragments)
    assert pick_state_device(on_cpu, chosen).type == "cpu"


def test_ranks_share_a_store_in_which_nothing_of_earlier_attempts_is() -> None:
    job: Any = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as threads:
        for size in (3, 3, 2):  # a node may not come back
            given = [(job, rank, size, timedelta(minutes=1)) for rank in range(size)]
            stores = [one.result() for one in [threads.submit(store_of_attempt, *g) for g in given]]
            assert not any(store.check(["address"]) for store in stores)
            stores[0].set("address", str(size))
            assert all(store.get("address") == str(size).encode() for store in stores)


def test_a_rank_does_not_meet_those_of_the_attempt_before() -> None:
    job: Any = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: store_of_attempt(job, rank, 2, timedelta(minutes=1)), (0, 1)))
    with pytest.raises(RuntimeError, match="did not restart"):
        store_of_attempt(job, 0, 2, timedelta(seconds=0.2))
