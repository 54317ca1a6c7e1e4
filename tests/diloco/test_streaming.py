"""StreamingDiLoCo in anybody's loop: identities, weights, drops, restart, memory, any kind of parameter."""

import gc
import resource
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.diloco.test_against_reference import Case, Net, Wire, batch, config, full, inner_step
from tests.processes import ProcessPool
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco import (
    DiLoCoConfig,
    Fragments,
    OuterOptimizer,
    Overlap,
    Quantization,
    StreamingDiLoCo,
)
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.reference import ReferenceDiLoCo
from torchtitan_diloco.diloco.schedule import is_dropped
from torchtitan_diloco.diloco.transport import HEADER_BYTES
from torchtitan_diloco.distributed.world import FSDP, WORKER, World, join_world

AVERAGE_EVERY_STEP = DiLoCoConfig(
    sync_every=1,
    fragments=Fragments(layers_per_fragment=0),
    overlap=Overlap(delay=0, mixing=0.0),
    outer_optimizer=OuterOptimizer(name="sgd", lr=1.0),
)


def join(workers: int) -> World:
    return join_world(Distributed(), Link(), device="cpu", workers=workers, fsdp=0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def test_one_worker_that_averages_every_step_is_plain_training() -> None:
    plain, wrapped = Net(), Net()
    outer = StreamingDiLoCo(wrapped, None, AVERAGE_EVERY_STEP)
    optimizers = sgd(plain), sgd(wrapped)
    for step in range(1, 9):
        inner_step(plain, optimizers[0], 0, step)
        inner_step(wrapped, optimizers[1], 0, step)
        outer.step()
    torch.testing.assert_close(parameters(wrapped), parameters(plain), rtol=1e-5, atol=1e-6)


def _average_every_step() -> dict[str, Tensor]:
    world = join(2)
    model = Net()
    outer, optimizer = StreamingDiLoCo(model, world.group(WORKER), AVERAGE_EVERY_STEP), sgd(model)
    for step in range(1, 9):
        inner_step(model, optimizer, world.worker, step)
        outer.step()
    return parameters(model)


def test_averaging_every_step_is_data_parallelism(processes: ProcessPool) -> None:
    """With inner SGD the mean of the parameters is the step along the mean of the gradients."""
    model = Net()
    optimizer = sgd(model)
    for step in range(1, 9):
        for worker in range(2):
            tokens, targets = batch(worker, step)
            (nn.functional.cross_entropy(model(tokens), targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in processes.run(_average_every_step, 2):
        torch.testing.assert_close(result, parameters(model), rtol=1e-4, atol=1e-5)


def _weighted(
    wire: Quantization, weights: list[float], drop: float, spoiled_step: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    world = join(len(weights))
    model = Net()
    chosen = replace(
        config(0, delay=0, mixing=0.5), link=Link(drop_probability=drop), quantization=wire
    )
    outer, optimizer = StreamingDiLoCo(model, world.group(WORKER), chosen, seed=3), sgd(model)
    for step in range(1, 18):
        inner_step(model, optimizer, world.worker, step)
        if step == spoiled_step and world.worker == 1:
            with torch.no_grad():
                model.blocks[2].weight[0, 0] = float("nan")  # type: ignore[operator]
        outer.step(weights[world.worker])
    return parameters(model), {
        name: full(value) for name, value in outer.global_state_dict().items()
    }


def _reference(
    quantization: Quantization, weights_by_round: dict[int, list[float]], workers: int
) -> ReferenceDiLoCo:
    models = [Net() for _ in range(workers)]
    names = [
        [part.name for part in fragment.parts]
        for fragment in build_fragments(models[0], Fragments(layers_per_fragment=0))
    ]
    chosen = replace(config(0, delay=0, mixing=0.5), quantization=quantization)
    wire = Wire(Case(workers, chosen))
    reference = ReferenceDiLoCo(
        models,
        names,
        sync_every=8,
        delay=0,
        mixing=0.5,
        outer=chosen.outer_optimizer,
        transmit=wire.transmit,
        gather=wire.gather,
        feedback=quantization.error_feedback,
    )
    optimizers = [sgd(model) for model in models]
    for step in range(1, 18):
        for worker, model in enumerate(models):
            inner_step(model, optimizers[worker], worker, step)
        kept = {worker: parameters(model) for worker, model in enumerate(models)}
        weights = weights_by_round.get(step // 8, [1.0] * workers)
        reference.step(weights)
        for worker, weight in enumerate(weights):
            if not weight and step % 8 == 0:  # a dropped worker keeps its own parameters
                for name, value in kept[worker].items():
                    reference.theta[worker][name].data.copy_(value)
    return reference


WIRES = pytest.mark.parametrize(
    "wire",
    [
        Quantization(),
        Quantization(codec="fp4_e3m0", error_feedback=True),
        Quantization(codec="int8", gather_codec="bf16"),
    ],
    ids=lambda wire: wire.codec,
)


@WIRES
def test_means_are_weighted(processes: ProcessPool, wire: Quantization) -> None:
    weights = [3.0, 1.0, 2.0]
    reference = _reference(wire, {1: weights, 2: weights}, 3)
    for worker, (local, shared) in enumerate(processes.run(_weighted, 3, wire, weights, 0.0, 0)):
        torch.testing.assert_close(shared, reference.Theta, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            local, {n: full(p) for n, p in reference.theta[worker].items()}, rtol=1e-4, atol=1e-5
        )


@WIRES
def test_a_dropped_worker_keeps_its_own_and_follows_the_others(
    processes: ProcessPool, wire: Quantization
) -> None:
    chance = 0.6
    dropped = {r: [not is_dropped(chance, 3, worker, 0, r) for worker in range(3)] for r in (1, 2)}
    assert {sum(kept) for kept in dropped.values()} & {1, 2}, (
        "the seed drops somebody, not everybody"
    )
    reference = _reference(
        wire, {r: [float(kept) for kept in row] for r, row in dropped.items()}, 3
    )
    for worker, (local, shared) in enumerate(
        processes.run(_weighted, 3, wire, [1.0, 1.0, 1.0], chance, 0)
    ):
        torch.testing.assert_close(shared, reference.Theta, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            local, {n: full(p) for n, p in reference.theta[worker].items()}, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "wire",
    [Quantization(), Quantization(codec="fp4_e2m1", error_feedback=True)],
    ids=["fp32", "fp4"],
)
def test_a_delta_that_is_not_finite_is_left_out_and_its_worker_recovers(
    processes: ProcessPool, wire: Quantization, workers: int
) -> None:
    results = processes.run(_weighted, workers, wire, [1.0] * workers, 0.0, 8)
    for local, shared in results:
        for value in [*local.values(), *shared.values()]:
            assert value.isfinite().all()
    clean = processes.run(_weighted, workers, wire, [1.0] * workers, 0.0, 0)
    assert not torch.equal(results[0][1]["embedding.weight"], clean[0][1]["embedding.weight"]), (
        "it was left out"
    )


def test_drops_are_drawn_at_the_given_rate() -> None:
    draws = [
        is_dropped(0.3, 1, worker, fragment, r)
        for worker in range(4)
        for fragment in range(5)
        for r in range(100)
    ]
    assert sum(draws) / len(draws) == pytest.approx(0.3, abs=0.03)
    assert not any(is_dropped(0.0, 1, worker, 0, 1) for worker in range(9))


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
    world = join(2)
    torch.manual_seed(world.worker)  # different weights, which the start makes equal
    model = Odd()
    outer = StreamingDiLoCo(model, world.group(WORKER), replace(config(1, delay=2), sync_every=4))
    started = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for step in range(1, 15):
        inner_step(model, optimizer, world.worker, step)
        outer.step()
    outer.drain()
    fresh = Odd()
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
        assert not torch.equal(first[name], second[name]), (
            f"{name}: with mixing 0.5 the workers stay apart"
        )
    assert torch.equal(shared["embedding.weight"], shared["head.weight"])


def test_the_outer_copy_of_bf16_parameters_is_fp32() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    outer = StreamingDiLoCo(model, None, AVERAGE_EVERY_STEP)
    assert {value.dtype for value in outer.global_state_dict().values()} == {torch.float32}


def _shared_parameters_under_fsdp() -> tuple[float, float, float, float]:
    world = join(1)
    assert world.mesh is not None
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh[FSDP])
    fully_shard(model, mesh=world.mesh[FSDP])
    outer, optimizer = StreamingDiLoCo(model, None, config(2, delay=1)), sgd(model)
    for step in range(1, 20):
        inner_step(model, optimizer, 0, step)
        outer.step()
    tokens, targets = batch(0, 99)

    def loss() -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(model(tokens), targets).item()

    before = loss()
    with outer.global_parameters():
        shared = loss()
    after = loss()
    plain = Net()
    plain.load_state_dict({name: full(value) for name, value in outer.global_state_dict().items()})
    expected = nn.functional.cross_entropy(plain(tokens), targets).item()
    return before, shared, after, expected


def test_the_model_holds_the_shared_parameters_for_a_while(processes: ProcessPool) -> None:
    """FSDP2 keeps gathered parameters after a forward pass: those must be neither the old nor the shared ones."""
    for before, shared, after, expected in processes.run(_shared_parameters_under_fsdp, 2):
        assert shared == pytest.approx(expected, rel=1e-5)
        assert before == after
        assert before != pytest.approx(shared, rel=1e-3)


def _traffic(delay: int) -> dict[str, float]:
    world = join(3)
    model = Net()
    outer, optimizer = (
        StreamingDiLoCo(model, world.group(WORKER), config(2, delay=delay)),
        sgd(model),
    )
    for step in range(1, 17):
        inner_step(model, optimizer, world.worker, step)
        outer.step()
    outer.drain()
    first = outer.metrics()
    assert outer.metrics()["diloco/sent_bytes"] == 0.0, "counted since the last call"
    return first


@pytest.mark.parametrize("delay", [0, 5])
def test_bytes_are_those_of_both_hops(processes: ProcessPool, delay: int) -> None:
    """Steps 8 to 16 send fragments 0, 1, 2, 3, 4, 0. Each worker sends the other two their third, then both its mean."""
    sizes = [
        fragment.parameters for fragment in build_fragments(Net(), Fragments(layers_per_fragment=2))
    ]
    everything = 0.0
    for metrics in processes.run(_traffic, 3, delay):
        assert metrics["diloco/fragments_applied"] == 6
        assert metrics["diloco/participants"] == 18
        everything += metrics["diloco/sent_bytes"]
    values = sum(sizes) + sizes[0]
    assert everything == 6 * 3 * 2 * HEADER_BYTES + 4 * 2 * 2 * values


def _over_the_groups_own_backend() -> list[Tensor]:
    dist.init_process_group()
    model = Net()
    chosen = replace(AVERAGE_EVERY_STEP, link=Link(backend="gloo"))
    outer = StreamingDiLoCo(model, dist.group.WORLD, chosen)
    inner_step(model, sgd(model), outer.worker, 1)
    outer.step()
    return list(outer.global_state_dict().values())


def test_a_group_whose_backend_nobody_named_is_one_of_gloo_on_the_cpu(
    processes: ProcessPool,
) -> None:
    one, other = processes.run(_over_the_groups_own_backend, 2)
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def alone(**settings: Any) -> tuple[Net, StreamingDiLoCo]:
    model = Net()
    return model, StreamingDiLoCo(
        model, None, DiLoCoConfig(fragments=Fragments(layers_per_fragment=0), **settings)
    )


def test_a_restart_from_the_model_forgets_what_is_in_flight_and_what_was_learned() -> None:
    model, outer = alone(sync_every=2, overlap=Overlap(delay=1))
    optimizer = sgd(model)
    for step in range(1, 5):
        inner_step(model, optimizer, 0, step)
        outer.step()
    nn.init.constant_(next(model.parameters()), 7.0)
    wanted = {name: value.clone() for name, value in parameters(model).items()}
    outer.restart_from_model(100)
    outer.drain()
    torch.testing.assert_close(outer.global_state_dict(), wanted, rtol=0, atol=0)
    torch.testing.assert_close(parameters(model), wanted, rtol=0, atol=0)
    saved = outer.state_dict()
    assert saved["step"] == 100
    assert not any(value.any() for slot in saved["slots"] for value in slot.values())


def test_a_closed_one_says_so_instead_of_waiting_for_ever() -> None:
    _, outer = alone(sync_every=1, overlap=Overlap(delay=0))
    outer.close()
    with pytest.raises(RuntimeError, match="diloco-exchange has been closed"):
        outer.step()


def _threads_after_work() -> int:
    torch.ones(2**20).exp()  # a large operation, with which torch makes up its mind
    return torch.get_num_threads()


def test_threads_end_with_what_they_serve_and_leave_torchs_threads_alone() -> None:
    before, threads = set(threading.enumerate()), torch.get_num_threads()
    for _ in range(3):
        alone()
    gc.collect()
    assert set(threading.enumerate()) <= before
    _, outer = alone(quantization=Quantization(threads=threads + 1))
    assert outer._background.submit(_threads_after_work).result() == threads + 1
    seen: list[int] = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [threads] == [torch.get_num_threads()]


def _many_syncs() -> tuple[int, int]:
    world = join(2)
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(200, 200) for _ in range(4))})
    wire = Quantization(codec="fp4_e3m0", rounding="stochastic", error_feedback=True)
    chosen = DiLoCoConfig(
        sync_every=4,
        fragments=Fragments(layers_per_fragment=1),
        overlap=Overlap(delay=3),
        quantization=wire,
    )
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)

    def syncs(count: int) -> int:
        for _ in range(count):
            for parameter in model.parameters():
                parameter.data.add_(0.001)
            outer.step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    return syncs(200), syncs(1000)


def test_a_thousand_syncs_leave_memory_where_it_was(processes: ProcessPool) -> None:
    for warm, later in processes.run(_many_syncs, 2):
        assert later - warm < 1024, "peak memory in KiB grew by more than two fragments"
