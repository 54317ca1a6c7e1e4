"""StreamingDiLoCo in any loop: identities, any kind of parameter, FSDP2, settings, memory."""

import gc
import math
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.diloco.toy import (
    AVERAGE_EVERY_STEP,
    Net,
    alone,
    config,
    full,
    inner_step,
    join,
    loss,
    parameters,
    sgd,
    start,
    train,
)
from tests.processes import ProcessPool
from tests.waiting import wait_until
from torchtitan_diloco.base.background import ENCODING_THREADS
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco import OuterOptimizer, Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco.gloo_peers import GlooPeers
from torchtitan_diloco.diloco.state_dict import shared_parameter_name
from torchtitan_diloco.distributed.world import WORKER


def _average_every_step() -> dict[str, Tensor]:
    outer, model, optimizer = start(AVERAGE_EVERY_STEP)
    train(outer, model, optimizer, range(1, 9))
    return parameters(model)


def test_averaging_every_step_is_data_parallelism(processes: ProcessPool) -> None:
    """With inner SGD the mean of the parameters is the step along the mean of the gradients."""
    model = Net()
    optimizer = sgd(model)
    for step in range(1, 9):
        ((loss(model, 0, step) + loss(model, 1, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in processes.run(_average_every_step, 2):
        torch.testing.assert_close(result, parameters(model), rtol=1e-4, atol=1e-5)


def test_peers_serve_one_loop_and_have_their_own_arguments() -> None:
    peers = GlooPeers(None)
    with pytest.raises(TypeError, match="total_steps and seed can only be used with a gloo group"):
        StreamingDiLoCo(Net(), peers, config(), total_steps=8)
    StreamingDiLoCo(Net(), peers, config()).close()
    with pytest.raises(RuntimeError, match="already belong to an outer loop"):
        StreamingDiLoCo(Net(), peers, config())


def test_one_worker_needs_no_process_group() -> None:
    outer, _, _ = alone(AVERAGE_EVERY_STEP)
    outer.step()
    assert [outer.metrics()["worker/fragments_applied"] for _ in range(2)] == [1, 0]
    assert outer.load_state_dict(outer.state_dict()) == []
    described = "\n".join(outer.describe())
    assert "each fragment every step, applied 0 steps later; local weight 0;" in described
    assert "fp32, 32 bits a parameter; summed in fp32" in described
    assert "whole model" in described
    outer.close()
    with pytest.raises(RuntimeError, match="diloco-exchange was closed"):
        outer.step()


class Odd(nn.Module):
    """bf16 and fp32 parameters, tied, frozen, without gradient, of one element, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("counter", torch.randn(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens).bfloat16()).float()
        out: Tensor = self.head(self.blocks[1](x) * self.scale)
        return out


def _odd_model() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    group = join(2).group(WORKER)
    torch.manual_seed(dist.get_rank(group))  # different weights, which the start makes equal
    model = Odd()
    fresh = Odd()
    outer = StreamingDiLoCo(model, group, replace(config(1, delay=2), sync_every=4))
    started = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    train(outer, model, optimizer, range(1, 15))
    outer.drain()
    fresh.load_state_dict(outer.global_state_dict())
    return started, dict(model.state_dict()), dict(fresh.state_dict())


def test_any_kind_of_parameter(processes: ProcessPool) -> None:
    (started, first, shared), (started_too, second, shared_too) = processes.run(_odd_model, 2)
    torch.testing.assert_close(started, started_too, rtol=0, atol=0)
    torch.testing.assert_close(shared, shared_too, rtol=0, atol=0)
    assert first["blocks.0.weight"].dtype == torch.bfloat16
    for name in ("frozen", "unused", "counter"):
        assert torch.equal(first[name], started[name]), name
    for name in ("embedding.weight", "blocks.0.weight", "blocks.1.bias", "scale"):
        assert not torch.equal(shared[name], started[name]), name
        assert not torch.equal(first[name], second[name]), f"{name}: mixing keeps workers apart"
    assert torch.equal(shared["embedding.weight"], shared["head.weight"])


def test_what_a_module_keeps_beside_tensors_is_in_the_shared_model() -> None:
    class Counting(Net):
        seen: ClassVar[dict[str, int]] = {"batches": 3}

        def get_extra_state(self) -> dict[str, int]:
            return self.seen

        def set_extra_state(self, state: dict[str, int]) -> None:
            assert state == self.seen

    model = Counting()
    outer = StreamingDiLoCo(model, None, config(1))
    shared: dict[str, Any] = outer.global_state_dict()
    model.load_state_dict(shared)
    model.seen["batches"] = 4
    assert shared["_extra_state"] == {"batches": 3}
    outer.close()


def test_rounds_without_a_change_leave_bf16_models_alone() -> None:
    """The shared copy is finer than bf16: rounding must not be taken for a change."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).bfloat16()
    weight = model.get_parameter("0.weight").data.fill_(1.0)
    chosen = replace(AVERAGE_EVERY_STEP, outer_optimizer=OuterOptimizer(name="sgd", lr=0.1))
    outer = StreamingDiLoCo(model, None, chosen)
    weight.add_(0.015625)
    outer.step()
    moved = outer.global_state_dict()["0.weight"]
    assert moved.dtype == torch.float32
    assert moved.item() == pytest.approx(1.0015625)
    for _ in range(30):
        outer.step()
    assert torch.equal(outer.global_state_dict()["0.weight"], moved)


def test_moved_parameters_are_exchanged_and_replaced_ones_refused() -> None:
    outer, model, _ = alone(AVERAGE_EVERY_STEP)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() + 1.0
    before = outer.global_state_dict()
    outer.step()
    for name, value in outer.global_state_dict().items():
        torch.testing.assert_close(value, before[name] + 1.0)
        assert torch.equal(model.state_dict()[name], value)
    model.load_state_dict(Net().state_dict(), assign=True)
    for call in (outer.step, outer.global_state_dict):
        with pytest.raises(ValueError, match=r"was replaced after .*assign=False"):
            call()


def _shared_parameters_under_fsdp() -> tuple[float, float, float, float]:
    world = join(1, ranks=2)
    outer, model, optimizer = start(config(2, delay=1), world=world)
    train(outer, model, optimizer, range(1, 20))
    with torch.no_grad():
        before = loss(model, 0, 99).item()
        with outer.global_parameters():
            shared = loss(model, 0, 99).item()
        after = loss(model, 0, 99).item()
    plain = Net()
    saved = outer.state_dict(world.host_mesh)["tensors"]
    plain.load_state_dict({name: full(value) for name, value in outer.global_state_dict().items()})
    for name, value in plain.state_dict().items():
        assert torch.equal(full(saved[shared_parameter_name(name)]), value), "sharded as they are"
    return before, shared, after, loss(plain, 0, 99).item()


def test_the_model_holds_the_shared_parameters_for_a_while(processes: ProcessPool) -> None:
    """FSDP2 keeps gathered parameters after a forward pass: they must be the current ones."""
    for before, shared, after, expected in processes.run(_shared_parameters_under_fsdp, 2):
        assert shared == pytest.approx(expected, rel=1e-5)
        assert before == after
        assert before != pytest.approx(shared, rel=1e-3)


def _sharded_workers() -> tuple[float, float, float]:
    """Run a forward pass without gradient between the optimizer's step and the outer one."""
    outer, model, optimizer = start(replace(AVERAGE_EVERY_STEP, sync_every=2), ranks=2)
    for step in range(1, 3):
        inner_step(model, optimizer, outer.worker, step)
        with torch.no_grad():
            loss(model, 0, 99)
        if step == 2 and dist.get_rank() == 2:  # one shard of worker 1
            model.get_parameter("blocks.0.weight").data.to_local()[0, 0] = math.nan  # type: ignore[attr-defined]
        outer.step()
    with torch.no_grad():
        seen = loss(model, 0, 99).item()
        model.reshard()  # type: ignore[operator]
        return seen, loss(model, 0, 99).item(), outer.metrics()["worker/participants"]


def test_shards_see_what_was_applied_and_agree_on_what_is_finite(processes: ProcessPool) -> None:
    for seen, fresh, participants in processes.run(_sharded_workers, 4):
        assert seen == fresh
        assert math.isfinite(seen)
        assert participants == 1, "all shards of a worker are left out"


def _threads_after_work() -> int:
    torch.ones(2**20).exp()  # torch sets its threads in the first large operation
    return torch.get_num_threads()


def test_threads_end_with_their_owner_and_leave_torchs_threads_alone() -> None:
    before = set(threading.enumerate())
    threads = torch.get_num_threads()
    for _ in range(3):
        StreamingDiLoCo(Net(), None, AVERAGE_EVERY_STEP)
    gc.collect()
    assert set(threading.enumerate()) <= before
    outer = StreamingDiLoCo(Net(), None, AVERAGE_EVERY_STEP)
    assert outer.loop.background.submit(_threads_after_work).result() == ENCODING_THREADS
    with ThreadPoolExecutor() as later:
        assert later.submit(torch.get_num_threads).result() == threads
    assert torch.get_num_threads() == threads


def _drop_a_loop() -> None:
    world = join(2)
    before = set(threading.enumerate())
    model = Net()
    optimizer = sgd(model)
    peers = GlooPeers(world.group(WORKER), reports=world.reports)
    outer = StreamingDiLoCo(model, peers, config())
    train(outer, model, optimizer, range(1, 20))
    outer.drain()
    assert set(threading.enumerate()) > before
    del outer, peers
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of its threads")


def test_threads_between_workers_end_with_their_owner(processes: ProcessPool) -> None:
    """The liveness of the workers, which goes on, does not keep them."""
    processes.run(_drop_a_loop, 2)


def _many_syncs() -> tuple[int, int]:
    world = join(2)
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(200, 200) for _ in range(4))})
    wire = Quantization(codec="topk")
    plain = config(1, delay=3, name="sgd", lr=1.0)
    chosen = replace(plain, sync_every=4, measure_every=10, quantization=wire)
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)

    def syncs(count: int) -> int:
        for _ in range(count):
            for parameter in model.parameters():
                parameter.data.add_(0.001 * (1 + world.worker))
            outer.step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    return syncs(100), syncs(300)


def test_hundreds_of_syncs_leave_memory_where_it_was(processes: ProcessPool) -> None:
    for warm, later in processes.run(_many_syncs, 2):
        # A heap that fragments takes some 8,000 KiB at most. One delta kept of each sync is 48,000.
        assert later - warm < 16_000, "KiB"


@pytest.mark.parametrize(
    ("optimizer", "given"),
    [("adamw", "<class 'str'>"), (torch.optim.AdamW, "the class AdamW"), ([], "<class 'list'>")],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, given: str) -> None:
    message = f"optimizer: must be the inner torch.optim.Optimizer, or None, not {given}"
    with pytest.raises(TypeError, match=message):
        StreamingDiLoCo(Net(), None, config(), optimizer=optimizer)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    outer, *_ = alone(config())
    with pytest.raises(UserError, match=rf"step\(weight={weight}\): pass a finite number of at"):
        outer.step(weight)
    outer.close()
    assert outer.step_count == 0
