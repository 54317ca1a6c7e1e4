"""Saved outer state: resumed is uninterrupted, and other settings take over what they can."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.diloco.toy import Net, alone, config, inner_step, join, parameters, sgd, start, train
from tests.processes import ProcessPool
from torchtitan_diloco.base.tensors import local_of, shard_rows
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco import (
    Beginning,
    Fragments,
    OuterOptimizer,
    Overlap,
    Quantization,
    StreamingDiLoCo,
)
from torchtitan_diloco.diloco.data_parallel import DataParallel
from torchtitan_diloco.diloco.state_dict import (
    SavedState,
    saved_bytes,
    shaped_like,
    shared_parameter_name,
    write_shared,
)

State = dict[str, Any]
STOPS = {3: 0, 12: 5, 13: 4, 16: 2}
"""Step of a save -> fragments that are in flight then."""


def assert_same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def _interrupted(wire: Quantization, optimizer_name: str) -> tuple[list[int], Any, list[Any]]:
    """Return the fragments in flight at each save, and the ends of the saved and resumed runs."""
    overlap = Overlap(delay=5, mixing_end=0.0)
    beginning = Beginning(length=5)
    outer: dict[str, Any] = {"lr": 1.0} if optimizer_name == "sgd" else {"lr": 0.7, "warmup": 0.8}
    outer_config = config(2, name=optimizer_name, **outer)
    chosen = replace(outer_config, overlap=overlap, beginning=beginning, quantization=wire)
    world = join(2)
    saves = list[Any]()

    def run(begin: int = 0, saved: Any = None) -> Any:
        outer, model, optimizer = start(chosen, world=world, adam=True, total_steps=39)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            assert outer.load_state_dict(saved[2]) == []
        for stop in [*STOPS, 39]:
            train(outer, model, optimizer, range(begin + 1, stop + 1))
            begin = max(begin, stop)
            if saved is None and stop in STOPS:
                parts = model.state_dict(), optimizer.state_dict(), outer.state_dict()
                saves.append(copy.deepcopy(parts))
        state: Any = outer.state_dict()
        outer.close()
        return parameters(model), state

    went_on = run()
    resumed = [run(step, saved) for step, saved in zip(STOPS, saves, strict=True)]
    return [len(saved[2]["facts"]["in_flight"]) for saved in saves], went_on, resumed


@pytest.mark.parametrize(
    ("codec", "name"),
    [("fp32", "nesterov"), ("fp32", "adam"), ("fp4_e3m0", "nesterov"), ("topk", "sgd")],
)
def test_resumed_is_uninterrupted_bit_for_bit(
    processes: ProcessPool, codec: str, name: str
) -> None:
    workers = processes.run(_interrupted, 2, Quantization(codec), name)
    outer = workers[0][1][1]["tensors"]
    moments = {"adam": 2, "sgd": 0}.get(name, 1)
    assert len({key.partition("/")[0] for key in outer if "moment" in key}) == moments
    for flying, went_on, ends in workers:
        for key in (one for one in outer if not one.startswith("sent/")):
            assert_same(went_on[1]["tensors"][key], outer[key])
        assert flying == list(STOPS.values())
        for resumed in ends:
            assert_same(went_on[0], resumed[0])
            assert went_on[1]["facts"] == resumed[1]["facts"]
            assert_same(went_on[1]["tensors"], resumed[1]["tensors"])


def _resumed_otherwise(changes: State) -> tuple[list[str], State, State]:
    """Return the notes of a restart with other settings, and shared tensors before and after."""
    world = join(2)
    chosen = config(2, delay=5)
    outer, model, optimizer = start(chosen, world=world)
    train(outer, model, optimizer, range(1, 14))
    saved = outer.state_dict()
    assert saved["facts"]["in_flight"]
    outer.drain()
    resumed, again, _ = start(replace(chosen, **changes), world=world)
    again.load_state_dict(parameters(model))
    notes = resumed.load_state_dict(copy.deepcopy(saved))
    loaded = resumed.state_dict()
    train(resumed, again, sgd(again), range(14, 40))
    resumed.drain()
    return notes, outer.state_dict()["tensors"], loaded["tensors"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sync_every": 12}, ["applied now"]),
        ({"overlap": Overlap(delay=2)}, ["applied now"]),
        ({"beginning": Beginning(length=20)}, ["applied now"]),
        ({"fragments": Fragments("sequential", layers_per_fragment=2)}, ["applied now"]),
        (
            {"fragments": Fragments(layers_per_fragment=8), "quantization": Quantization("int8")},
            ["applied now"],
        ),
        (
            {
                "outer_optimizer": OuterOptimizer("sgd", lr=1.0),
                "quantization": Quantization("topk"),
            },
            ["applied now", "its state starts from zero"],
        ),
        ({"outer_optimizer": OuterOptimizer(name="sgd")}, ["its state starts from zero"]),
        ({"outer_optimizer": OuterOptimizer(name="adam")}, ["its state starts from zero"]),
    ],
)
def test_a_restart_takes_over_what_it_can(
    processes: ProcessPool, changes: State, words: list[str]
) -> None:
    """Fragments in flight are applied at once, like a drain; tensors follow their names."""
    for notes, before, after in processes.run(_resumed_otherwise, 2, changes):
        assert len(notes) == len(words)
        assert all(word in note for word, note in zip(words, notes, strict=True))
        if "outer_optimizer" not in changes:
            assert_same(after, before)


@pytest.mark.parametrize("sync_every", [20, 40])
def test_norms_of_other_turns_judge_no_delta(sync_every: int) -> None:
    """A delta of more steps is larger."""
    chosen = replace(config(1), delta_norm_limit=3.0, sync_every=20)
    outer, model, optimizer = alone(chosen)
    train(outer, model, optimizer, range(1, 6 * 20 + 1))
    saved = outer.saved_state()
    norms = [list(fragment.delta_norms) for fragment in saved.facts.fragments]
    assert all(len(latest) >= 5 for latest in norms)
    resumed, _, _ = alone(replace(chosen, sync_every=sync_every))
    resumed.load_state(saved)
    loaded = [list(state.norms.latest) for state in resumed.loop.states]
    assert loaded == (norms if sync_every == 20 else [[]] * len(norms))


@pytest.mark.parametrize("sync_every", [20, 40])
def test_an_unusable_delta_in_flight_resets_its_fragment_after_a_restart(sync_every: int) -> None:
    """When it is due, or at once, because the turns have changed."""
    chosen = replace(config(0, delay=5), sync_every=20)
    outer, model, _ = alone(chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(outer, model, optimizer, range(1, 20))
    inner_step(model, optimizer, 0, 20)
    model.gain.data.fill_(math.nan)
    outer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), outer.saved_state()))
    assert saved[2].facts.fragments[0].flags

    again = Net()
    again.load_state_dict(saved[0])
    fresh = torch.optim.AdamW(again.parameters(), lr=0.01)
    fresh.load_state_dict(saved[1])
    chosen = replace(chosen, sync_every=sync_every)
    resumed = StreamingDiLoCo(again, None, chosen, optimizer=fresh)
    resumed.load_state(saved[2])
    for _ in range(5):
        resumed.step()
    assert_same(parameters(again), dict(resumed.global_state_dict()))
    assert not fresh.state
    assert resumed.loop.healed == 1
    weight = resumed.saved_state().facts.fragments[0].weight
    assert weight == (0 if sync_every == 20 else 5), "steps since it was reset"


def test_a_saved_state_starts_other_loops_and_not_other_models() -> None:
    outer, _, _ = alone(config(2))
    outer.step(weight=3.0)
    saved = outer.saved_state()
    fragments = saved.facts.for_new_worker().fragments
    assert [fragment.weight for fragment in fragments] == [0.0] * 5, "nothing to send"
    assert saved.facts.fragments[0].weight == 3.0
    saved.tensors[shared_parameter_name("gain")].fill_(7.0)
    model = Net()
    assert "no longer has an outer loop" in DataParallel(model).load_state(saved)[0]
    assert model.gain.item() == 7.0
    model.gain = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"gain is \(2,\) here and \(1,\) there"):
        StreamingDiLoCo(model, None, config(2)).load_state(saved)


def test_what_had_arrived_is_in_a_model_without_an_outer_loop() -> None:
    outer, model, optimizer = alone(config(2, delay=5))
    train(outer, model, optimizer, range(1, 14))
    saved = outer.saved_state()
    arrived = saved.kind("next")
    assert arrived
    following = Net()
    DataParallel(following).load_state(saved)
    expected = saved.kind("outer") | arrived
    assert_same(dict(following.named_parameters()), expected)


def test_an_outer_optimizer_whose_state_was_not_saved_counts_its_steps_anew() -> None:
    """As that of an island is not: the numbers of the syncer are in the store."""
    chosen = config(2, name="adam", lr=0.1)
    outer, model, optimizer = alone(chosen)
    train(outer, model, optimizer, range(1, 14))
    saved = outer.saved_state()
    assert any(fragment.optimizer_steps for fragment in saved.facts.fragments)
    kept = {"outer", "next"}
    saved.tensors = {
        name: value for name, value in saved.tensors.items() if name.split("/")[0] in kept
    }
    resumed, _, _ = alone(chosen)
    assert "starts from zero" in "".join(resumed.load_state(saved))
    facts = resumed.saved_state().facts
    assert not any(fragment.optimizer_steps for fragment in facts.fragments)
    assert resumed.load_state(outer.saved_state()) == []


def test_what_is_no_saved_state_is_refused() -> None:
    outer, _, _ = alone(config(2))
    saved = outer.state_dict()
    others: list[Any] = [
        {},
        None,
        [],
        outer.global_state_dict(),
        saved | {"facts": {"step": 3}},
        saved | {"facts": None},
        saved | {"tensors": [1]},
        saved | {"tensors": {"outer/gain": "x"}},
    ]
    for other in others:
        with pytest.raises(UserError, match=r"must be what StreamingDiLoCo.state_dict\(\) has ret"):
            outer.load_state_dict(other)
    assert outer.load_state_dict(saved) == []


def test_a_new_worker_follows_what_was_in_flight_when_it_joined() -> None:
    """It starts from the shared parameters, which the rounds in flight then change."""
    chosen = config(2, delay=5)
    outer, model, optimizer = alone(chosen)
    train(outer, model, optimizer, range(1, 14))
    saved = outer.saved_state()
    assert saved.facts.in_flight
    saved.facts = saved.facts.for_new_worker()
    new_model = Net()
    write_shared(new_model, saved)
    joined = StreamingDiLoCo(new_model, None, chosen)
    assert joined.load_state(saved) == []
    joined.drain()
    torch.testing.assert_close(parameters(new_model), dict(joined.global_state_dict()))
    joined.close()
    outer.close()


def test_a_load_and_a_restart_from_the_model_give_up_what_is_in_flight() -> None:
    saved = alone(config(2, delay=5))[0].state_dict()
    outer, model, optimizer = alone(config(2, delay=5))
    train(outer, model, optimizer, range(1, 12))
    outer.load_state_dict(saved)
    again = outer.state_dict()
    assert again["facts"] == saved["facts"]
    assert_same(again["tensors"], saved["tensors"])

    train(outer, model, optimizer, range(1, 21))
    nn.init.constant_(model.gain, 7.0)
    wanted: dict[str, Tensor] = parameters(model)
    outer.restart_from_model(100)
    outer.drain()
    assert_same(outer.global_state_dict(), wanted)
    assert_same(parameters(model), wanted)
    saved = outer.state_dict()
    assert saved["facts"]["step"] == 100
    slots = [value for name, value in saved["tensors"].items() if name.startswith("momentum/")]
    assert slots
    assert not any(slot.any() for slot in slots)


def _sharded_over_devices_without_memory() -> set[tuple[str, str]]:
    """Check the saved state of a model on a mesh of "meta" devices, which stand for GPUs: a tensor
    that is moved to one has lost its values. Return the devices of meshes and tensors."""
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "meta", torch.cpu, raising=False)  # torch asks it for its devices
        gpus, hosts = (DeviceMesh(kind, [0, 1]) for kind in ("meta", "cpu"))

        def on_gpus(value: Tensor) -> DTensor:
            rows = shard_rows(len(value), dist.get_rank(), 2)
            options: Any = {"run_check": False, "shape": value.shape, "stride": value.stride()}
            own = value.detach()[rows.start : rows.stop].to("meta")
            return DTensor.from_local(own, gpus, [Shard(0)], **options)

        values = torch.arange(6.0)
        shaped = shaped_like(on_gpus(torch.empty(6, 2, dtype=torch.bfloat16)), values, None)
        assert_same(local_of(shaped), values.view(3, 2))
        assert shaped_like(shaped, values, gpus).is_meta

        model = Net()
        for name, parameter in list(model.named_parameters()):
            offloaded = torch.empty_like(on_gpus(parameter), device="cpu")  # as FSDP2 does
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, nn.Parameter(offloaded))
            local_of(offloaded).fill_(dist.get_rank() + 1.5)
        with pytest.raises(ValueError, match=r"sharded over 2 ranks of this worker.*shard_group"):
            StreamingDiLoCo(model, None, config(2))
        shards = dist.group.WORLD
        outer = StreamingDiLoCo(model, None, config(2), shard_group=shards)
        outer.step()
        on_hosts = outer.state_dict(hosts)["tensors"]
        saved = outer.saved_state()
        assert outer.load_state(saved) == []
        outer.close()
        empty = SavedState.template(model, saved.facts, saved.tensors, None)
        for name, value in saved.tensors.items():
            assert_same(local_of(value), local_of(on_hosts[name]))
            assert_same(local_of(empty.tensors[name]), torch.zeros_like(local_of(value)))
        tensors: Any = [*saved.tensors.values(), *empty.tensors.values()]
        return {(one.device_mesh.device_type, one.device.type) for one in tensors}


def test_a_saved_state_is_in_host_memory_whatever_the_model_is_sharded_over(
    processes: ProcessPool,
) -> None:
    """With two ranks a worker, one has no row of the gain."""
    found = processes.run(_sharded_over_devices_without_memory, 2)
    assert found == [{("meta", "cpu")}] * 2


@pytest.mark.parametrize("delay", [0, 7])
@pytest.mark.parametrize(
    ("codec", "optimizer_name"), [("fp32", "nesterov"), ("int8", "adam"), ("topk", "sgd")]
)
def test_the_memory_of_a_save_is_known_before(codec: str, optimizer_name: str, delay: int) -> None:
    """The most, when all fragments are in flight."""
    wire = Quantization(codec=codec)
    chosen = replace(config(2, delay=delay, name=optimizer_name), quantization=wire)
    if codec == "topk":
        chosen = replace(chosen, outer_optimizer=OuterOptimizer("sgd", lr=1.0))
    outer, model, optimizer = alone(chosen)
    sizes = list[int]()
    for step in range(1, 2 * chosen.sync_every + 1):
        train(outer, model, optimizer, [step])
        sizes.append(sum(value.nbytes for value in outer.state_dict()["tensors"].values()))
    outer.close()
    values = sum(parameter.numel() for parameter in model.parameters())
    assert max(sizes) == saved_bytes(chosen) * values
