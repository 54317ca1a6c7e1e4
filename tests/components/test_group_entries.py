"""A checkpoint holds what an optimizer counts in its groups. The rest follows the settings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.components.checkpoints import ALONE, alone
from tests.components.test_resume import assert_same_end, chosen, run
from tests.components.test_start import find
from tests.conftest import write_text
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint import Loads, RunPart, RunState
from torchtitan_diloco.components.checkpoint_folder import folder_of_worker, read_manifest
from torchtitan_diloco.components.group_entries import GroupEntries, SavedEntries
from torchtitan_diloco.components.optimizer import create_state
from torchtitan_diloco.config.parts import OPTIMIZERS, OptimizerEntry
from torchtitan_diloco.diloco.data_parallel import DataParallel


class ScheduleFree(torch.optim.Optimizer):
    """Moves the parameters towards the mean of a sequence that it keeps, as schedule-free
    optimizers do: the weight of a step depends on how many there were."""

    def __init__(self, parameters: Any, lr: float = 0.1, decay: float = 0.0) -> None:
        settings = {"lr": lr, "decay": decay, "betas": [0.9, 0.99], "k": 0, "mode": "new"}
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            group["k"] += 1
            group["mode"] = "begun"
            group["weight_sum"] = group.get("weight_sum", 0.0) + group["k"] / 7
            share = group["k"] / 7 / group["weight_sum"]
            for parameter in group["params"]:
                state = self.state[parameter]
                sequence = state.setdefault("z", parameter.clone())
                sequence.sub_(parameter.grad + group["decay"] * sequence, alpha=group["lr"])
                parameter.lerp_(sequence, share)


def build(**settings: Any) -> tuple[RunState, GroupEntries]:
    model = torch.nn.Linear(2, 3)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 0.5)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "decay": 0.0}]
    optimizer = ScheduleFree(groups, **settings)
    entries = GroupEntries(optimizer)
    parts = [RunPart("optimizer", entries, SavedEntries, Loads.ALWAYS)]
    return RunState(model, optimizer, DataParallel(model), parts), entries


def train(state: RunState, steps: range) -> list[Tensor]:
    for step in steps:
        for parameter in state.model.parameters():
            parameter.grad = torch.full_like(parameter, 1 / step)
        state.optimizer.step()
    return [parameter.detach().clone() for parameter in state.model.parameters()]


def plain_entries(state: RunState) -> list[dict[str, Any]]:
    groups = state.optimizer.param_groups
    return [{key: group[key] for key in group if key != "params"} for group in groups]


def test_an_optimizer_that_counts_in_its_groups_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Its settings and its learning rate are those of the new start."""
    state, _ = build(decay=0.25)
    train(state, range(1, 6))
    saver = alone(folder_of_worker(tmp_path, 0), state)
    saver.save(step=5, tokens=10, position=None)
    saver.wait()
    saver.close()
    start = find(tmp_path)
    assert start.checkpoint is not None
    assert read_manifest(start.checkpoint).parts["optimizer"] == {
        "optimizer": "ScheduleFree",
        "groups": [{"k": 5, "mode": "begun", "weight_sum": pytest.approx(15 / 7)}] * 2,
    }

    resumed, entries = build(decay=0.25)
    start.load(resumed, ALONE)
    assert plain_entries(resumed) == plain_entries(state)
    assert entries.saved_state().groups[0]["k"] == 5, "a next save has it, too"
    expected = train(state, range(6, 9))
    assert all(map(torch.equal, train(resumed, range(6, 9)), expected))

    changed, _ = build(decay=0.5, lr=0.05)
    start.load(changed, ALONE)
    group = changed.optimizer.param_groups[0]
    assert (group["decay"], group["lr"], group["k"]) == (0.5, 0.05, 5)


def test_what_is_created_to_be_filled_leaves_the_groups_as_they_were() -> None:
    state, entries = build()
    before = plain_entries(state)
    create_state(state.optimizer)
    assert all(state.optimizer.state[parameter] for parameter in state.model.parameters())
    assert plain_entries(state) == before
    assert entries.saved_state().groups == [{}, {}]


def test_entries_of_another_optimizer_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    state, entries = build()
    before = plain_entries(state)
    entries.load_state(SavedEntries("Prodigy", [{"k": 3}, {"k": 3}]))
    assert caplog.messages == []
    entries.load_state(SavedEntries("ScheduleFree", [{"k": 3}]))
    assert "had 1 group and has 2" in caplog.text
    assert plain_entries(state) == before


@pytest.mark.parametrize("value", [object(), [1.0], torch.ones(())])
def test_a_changed_entry_that_json_does_not_hold_is_refused(value: object) -> None:
    state, entries = build()
    group = state.optimizer.param_groups[1]
    group["betas"] = list(group["betas"])
    group["fixed"] = 1
    entries.check()
    group["fixed"] = value
    reason = rf"ScheduleFree changes fixed .* of {type(value).__name__} and .* state\[parameter\]"
    with pytest.raises(UserError, match=reason):
        entries.check()


def test_what_does_not_change_may_be_anything() -> None:
    state, _ = build()
    group = state.optimizer.param_groups[0]
    group |= {"object": object(), "tensor": torch.ones(2), "function": len, "list": [1, [2]]}
    entries = GroupEntries(state.optimizer)
    create_state(state.optimizer)
    assert entries.saved_state().groups == [{}, {}]
    group["list"][1].append(3)
    with pytest.raises(UserError, match="changes list of its groups"):
        entries.check()
    group["list"] = [1, [2]]
    group["tensor"].add_(1)
    with pytest.raises(UserError, match="changes tensor of its groups"):
        entries.check()


class Hoarding(torch.optim.SGD):
    """Keeps an object in its groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.param_groups[0]["history"] = {1.0}


def test_a_run_saves_what_its_optimizer_counts_or_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_text(tmp_path)
    for kind in (ScheduleFree, Hoarding):
        entry = OptimizerEntry(build=lambda model, *_, kind=kind: kind(model.parameters(), lr=0.1))
        monkeypatch.setitem(OPTIMIZERS, kind.__name__, entry)
    free = {"optimizer.name": "ScheduleFree", "validation.every": 0}
    run(chosen(text, tmp_path / "whole", **free))
    for stop in (6, 0):
        run(chosen(text, tmp_path / "parts", **free, **{"training.stop_after": stop}))
    assert_same_end(tmp_path / "whole", tmp_path / "parts")
    with pytest.raises(UserError, match="changes history of its groups, which is of set"):
        run(chosen(text, tmp_path / "refused", **{"optimizer.name": "Hoarding"}))
    assert not list((tmp_path / "refused").glob("worker-0/step-*"))
