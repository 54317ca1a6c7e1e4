"""The saved outer state: resumed is uninterrupted, and other settings take over what they can."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.diloco.test_against_reference import Net, config, inner_step
from tests.diloco.test_streaming import join, parameters, sgd
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import (
    Fragments,
    OuterOptimizer,
    Overlap,
    Quantization,
    StreamingDiLoCo,
)
from torchtitan_diloco.distributed.world import WORKER


def _interrupted(
    wire: Quantization, pattern: Fragments, stop_at: int
) -> tuple[list[Any], list[Any]]:
    """A run that is saved at a step and goes on, beside one that starts again from what was saved."""
    world = join(2)
    chosen = replace(config(2, delay=5, name="adam", lr=0.05), quantization=wire, fragments=pattern)
    model = Net()
    outer, optimizer = (
        StreamingDiLoCo(model, world.group(WORKER), chosen),
        torch.optim.AdamW(model.parameters(), lr=0.02),
    )
    for step in range(1, stop_at + 1):
        inner_step(model, optimizer, world.worker, step)
        outer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), outer.state_dict()))
    in_flight = len(saved[2]["in_flight_order"])

    again = Net()
    resumed = StreamingDiLoCo(again, world.group(WORKER), chosen)
    again.load_state_dict(saved[0])
    second = torch.optim.AdamW(again.parameters(), lr=0.02)
    second.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    ends = []
    for current, current_optimizer, current_outer in (
        (model, optimizer, outer),
        (again, second, resumed),
    ):
        for step in range(stop_at + 1, 40):
            inner_step(current, current_optimizer, world.worker, step)
            current_outer.step()
        state = current_outer.state_dict()
        ends.append([in_flight, parameters(current), state])
    return ends[0], ends[1]


def same_state(left: Any, right: Any) -> None:
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            same_state(value, right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same_state(one, other)
    else:
        assert left == right


@pytest.mark.parametrize(("stop_at", "in_flight"), [(7, 0), (12, 5), (13, 4), (16, 2)])
@pytest.mark.parametrize(
    "wire",
    [Quantization(), Quantization(codec="fp4_e3m0", rounding="stochastic", error_feedback=True)],
    ids=["fp32", "fp4-stochastic-feedback"],
)
@pytest.mark.parametrize(
    "pattern",
    [Fragments(layers_per_fragment=2), Fragments(pattern="balanced", layers_per_fragment=2)],
    ids=["whole layers", "split rows"],
)
def test_resumed_is_uninterrupted_bit_for_bit(
    processes: ProcessPool, wire: Quantization, pattern: Fragments, stop_at: int, in_flight: int
) -> None:
    for went_on, resumed in processes.run(_interrupted, 2, wire, pattern, stop_at):
        assert went_on[0] == in_flight, "the test is to stop with fragments in flight"
        torch.testing.assert_close(went_on[1], resumed[1], rtol=0, atol=0)
        for state in (went_on[2], resumed[2]):
            state.pop("exchanged")  # seconds, too
        same_state(went_on[2], resumed[2])


def test_a_state_of_another_model_is_refused() -> None:
    saved = StreamingDiLoCo(Net(), None, config(2)).state_dict()
    other = Net()
    other.gain = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"gain is \(2,\) here and \(1,\) there"):
        StreamingDiLoCo(other, None, config(2)).load_state_dict(saved)


def _resumed_otherwise(changes: dict[str, Any]) -> tuple[list[str], list[Any], list[Any]]:
    """The notes of a restart with other settings; the shared parameters and momentum before and after."""
    world = join(2)
    model = Net()
    outer, optimizer = StreamingDiLoCo(model, world.group(WORKER), config(2, delay=5)), sgd(model)
    for step in range(1, 14):
        inner_step(model, optimizer, world.worker, step)
        outer.step()
    saved = outer.state_dict()
    assert saved["in_flight_order"], "the test is to stop with fragments in flight"
    outer.drain()
    drained = outer.state_dict()
    again = Net()
    resumed = StreamingDiLoCo(again, world.group(WORKER), replace(config(2, delay=5), **changes))
    again.load_state_dict(parameters(model))
    notes = resumed.load_state_dict(copy.deepcopy(saved))
    loaded = resumed.state_dict()
    for step in range(14, 40):
        inner_step(again, optimizer, world.worker, step)
        resumed.step()
    resumed.drain()
    return notes, [drained["outer"], drained["slots"]], [loaded["outer"], loaded["slots"]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sync_every": 12}, ["applied now"]),
        ({"overlap": Overlap(delay=2)}, ["applied now"]),
        ({"fragments": Fragments(layers_per_fragment=8)}, ["applied now"]),
        ({"fragments": Fragments(pattern="balanced", layers_per_fragment=4)}, ["applied now"]),
        (
            {"sync_every": 12, "outer_optimizer": OuterOptimizer(name="adam")},
            ["applied now", "starts from zero"],
        ),
        (
            {"sync_every": 12, "quantization": Quantization(codec="int8", error_feedback=True)},
            ["applied now", "starts from zero"],
        ),
    ],
)
def test_a_restart_takes_over_what_it_can(
    processes: ProcessPool, changes: dict[str, Any], words: list[str]
) -> None:
    """What was under way is applied at once, as a drain would; shared parameters and momentum go with their names."""
    for notes, before, after in processes.run(_resumed_otherwise, 2, changes):
        assert len(notes) == len(words)
        assert all(word in note for word, note in zip(words, notes, strict=True))
        same_state(before[0], after[0])
        if "outer_optimizer" not in changes:
            same_state(before[1], after[1])


def test_loading_gives_up_what_is_in_flight() -> None:
    model = Net()
    outer = StreamingDiLoCo(model, None, config(2, delay=5))
    saved = outer.state_dict()
    for step in range(1, 12):
        inner_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, step)
        outer.step()
    outer.load_state_dict(saved)
    same_state(outer.state_dict(), saved)
