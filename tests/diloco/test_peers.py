"""A kind of peers needs the seven methods of `Peers`, and nothing else."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.diloco.toy import Net, config, parameters, sgd, train
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.diloco import DiLoCoConfig, StreamingDiLoCo
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.loop import Loop
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.outer_state import build_states
from torchtitan_diloco.diloco.peers import Peers
from torchtitan_diloco.diloco.reports import Reports
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.state_dict import OuterFacts, SavedState


class Alone(Peers):
    """A single worker, whose parameters are the next shared copy of a fragment at its turn."""

    def __init__(self) -> None:
        self.reports = Reports()
        self.seen = list[tuple[float, list[int]]]()
        """What the loop says after each step."""

    def start(
        self, model: nn.Module, config: DiLoCoConfig, optimizer: torch.optim.Optimizer | None
    ) -> Loop:
        drop_gathered(model)
        fragments = build_fragments(model, config.fragments)
        self.loop = Loop(model, config, fragments, build_states(fragments, config), optimizer)
        return self.loop

    def due(self, weight: float, reset: Collection[int]) -> None:
        self.seen.append((weight, list(reset)))
        for index in self.loop.schedule.sent_at(self.loop.step):
            self._average(index)

    def rest(self) -> None:
        for index in range(len(self.loop.fragments)):
            self._average(index)

    def _average(self, index: int) -> None:
        loop = self.loop
        state = loop.states[index]
        round_ = Round(index, loop.step, loop.step)
        loop.take(round_)
        state.finish_delta()
        state.advance(None)
        loop.apply(round_, state.delta, Mode.TAKE)

    def check(self) -> None: ...

    def save(self, facts: OuterFacts, mesh: DeviceMesh | None) -> SavedState:
        weights = [0.0] * len(self.loop.states)
        return saving.save(self.loop.states, weights, in_flight={}, facts=facts, mesh=mesh)

    def load(self, saved: SavedState) -> list[str]:
        return saving.load(self.loop.states, saved, self.loop.config, mixing=0.0).notes

    def close(self) -> None:
        self.loop.background.close(timeout=5.0)


def assert_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_seven_methods_make_a_kind_of_peers() -> None:
    model = Net()
    optimizer = sgd(model)
    peers = Alone()
    outer = StreamingDiLoCo(model, peers, config(2), optimizer=optimizer)
    train(outer, model, optimizer, range(1, 20))
    rounds = outer.rounds()
    assert {round_.fragment for round_ in rounds} == set(range(len(outer.fragments)))
    assert all(round_.applied_step == round_.sent_step for round_ in rounds)

    with torch.no_grad():
        model.gain.fill_(torch.nan)
    (broken,) = outer.heal()
    train(outer, model, optimizer, range(20, 22))
    assert peers.seen[-2:] == [(1.0, [broken]), (1.0, [])]

    outer.drain()
    assert_equal(parameters(model), outer.global_state_dict())
    saved = outer.state_dict()
    assert saved["facts"]["step"] == 21
    outer.close()

    again = StreamingDiLoCo(Net(), Alone(), config(2))
    assert again.load_state_dict(saved) == []
    assert_equal(again.global_state_dict(), outer.global_state_dict())
    assert again.step_count == 21
    assert again.describe() == outer.describe()
    again.close()


def test_a_fragment_starts_from_the_model_after_a_restart() -> None:
    """It forgets what was saved, healed and reset before."""
    model = Net()
    outer = StreamingDiLoCo(model, Alone(), config(2))
    with torch.no_grad():
        model.gain.fill_(torch.nan)
    outer.heal()
    with torch.no_grad():
        model.gain.fill_(7.0)
    outer.restart_from_model(5)
    assert_equal(outer.global_state_dict(), parameters(model))
    facts = outer.state_dict()["facts"]
    assert (facts["step"], facts["healed"], facts["in_flight"]) == (5, 0, [])
    outer.close()
