"""Streaming DiLoCo for any training loop: workers exchange one fragment at a time.

outer = StreamingDiLoCo(model, group, DiLoCoConfig(sync_every=100))
for batch in loader:
    loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
    outer.step()
outer.drain()

The peers (diloco/peers.py) decide when the loop (diloco/loop.py) takes the delta of a fragment and
applies the next shared copy, and compute this copy from all deltas.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.settings import described_class
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco import description, healing
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.agreement import check_shards
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.fragments import Fragment, check_identity
from torchtitan_diloco.diloco.gloo_peers import GlooPeers
from torchtitan_diloco.diloco.peers import Peers
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.state_dict import OuterFacts, SavedState


class StreamingDiLoCo:
    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | Peers | None,
        config: DiLoCoConfig,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        shard_group: dist.ProcessGroup | None = None,
        total_steps: int = 0,
        seed: int = 0,
    ) -> None:
        """Start from worker 0's parameters. For a restart, load weights after this.

        Call methods from one thread at a time, `metrics` and `rounds` from the one that trains.

        Args:
            group: a gloo group of this rank and its peers on the other workers. None: one worker.
                Alternatively other peers, such as `IslandPeers`, to which the last three arguments
                do not apply.
            optimizer: the inner optimizer. Its state is dropped for fragments that are reset to the
                shared parameters.
            shard_group: a gloo group of this worker's ranks, if the model is sharded over several,
                that nothing else uses, over which they sum the norm of a delta.
            total_steps: length of the run, for `overlap.mixing_end` and shares of it.
            seed: for the rounds that `link.drop_probability` drops.
        """
        if not isinstance(group, Peers):
            group = GlooPeers(
                group,
                shard_group=shard_group,
                total_steps=total_steps,
                seed=seed,
            )
        elif shard_group or total_steps or seed:
            raise TypeError("shard_group, total_steps and seed can only be used with a gloo group")
        # A program may wrap its optimizer in a class that is no subclass.
        has_state = isinstance(getattr(optimizer, "state", None), Mapping)
        if optimizer is not None and not has_state:
            raise TypeError(
                "optimizer: must be the inner torch.optim.Optimizer, or None, not "
                f"{described_class(optimizer)}"
            )
        self.peers = group
        self.loop = group.start(model, config, optimizer)

    @property
    def config(self) -> DiLoCoConfig:
        """Settings in use, which islands change during a run."""
        return self.loop.config

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return self.loop.fragments

    @property
    def step_count(self) -> int:
        """Inner steps so far."""
        return self.loop.step

    @property
    def workers(self) -> int:
        """Number of workers in each exchange."""
        return self.peers.reports.workers

    @property
    def worker(self) -> int:
        """Index of this worker."""
        return self.peers.reports.worker

    # --- training ---------------------------------------------------------------------------------

    def step(self, weight: float = 1.0) -> None:
        """Apply and send the fragments that are due. Call it after every inner step.

        `weight`: weight of this inner step in the mean over workers, such as the tokens of the
        worker, the same on all of its ranks. Islands count it, so pass the number of tokens.
        """
        if not 0 <= weight < math.inf:
            raise UserError(
                f"StreamingDiLoCo.step(weight={weight}): pass a finite number of at least 0, such "
                "as the tokens of this worker in this step"
            )
        self.loop.step += 1
        reset = sorted(self.loop.reset)
        self.loop.reset.clear()
        self.peers.due(weight, reset)

    def drain(self) -> None:
        """Wait for the fragments in flight, and apply them in the order of their sends.

        An island finishes the run with the others or, before the end of the run, leaves it after
        sending its work since the last send. At the end, all islands have the same copy.
        """
        self.peers.rest()

    def check(self) -> None:
        """Raise if a worker is lost or an exchange has failed, even before its result is due."""
        self.peers.check()

    def close(self) -> None:
        """End the threads. Needed only before an exit handler that destroys the process group."""
        self.peers.close()

    def heal(self, group: dist.ProcessGroup | None = None) -> list[int]:
        """Reset fragments that are not finite to the shared parameters, and return their indices.

        Call it on every rank of a worker after a step whose gradient is not finite, and before a
        save. A fragment is also reset if its inner optimizer state is not finite. `group`: a group
        of the worker's ranks for use in this thread, not the `shard_group`. Default: that of the
        mesh of the parameters, if it has one dimension.
        """
        group = group or healing.group_of_shards(self.fragments)
        check_shards(self.loop.model, group, "group to StreamingDiLoCo.heal")
        healed = healing.find_broken(self.fragments, self.loop.optimizer, group)
        if healed:
            drop_gathered(self.loop.model)
        for index in healed:
            self.loop.states[index].write_model()
            self.loop.start_afresh(index)
        if healed and (group is None or group.rank() == 0):
            logger.warning(
                f"{self.peers.reports.name}: fragments {healed} are not finite after "
                f"step {self.step_count}; they take the shared parameters, and "
                f"their inner optimizer state is reset ({self.loop.healed} fragments "
                "healed so far)"
            )
        return healed

    # --- shared model -----------------------------------------------------------------------------

    def global_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict with the shared parameters in fp32, sharded as they are.

        They are bitwise equal on all workers. Frozen parameters and buffers are this worker's.
        """
        drop_gathered(self.loop.model)
        shared: dict[Tensor, Tensor] = {}
        for state in self.loop.states:
            check_identity(self.loop.model, state.fragment)
            for part, view in zip(state.fragment.parts, state.views(state.outer), strict=True):
                mesh = part.parameter.device_mesh if isinstance(part.parameter, DTensor) else None
                shared[part.parameter] = saving.shaped_like(part.parameter, view.clone(), mesh)
        parameters = dict(self.loop.model.named_parameters(remove_duplicate=False))
        state_dict = dict[str, Tensor]()
        for name, value in self.loop.model.state_dict().items():
            if name in parameters and parameters[name] in shared:
                state_dict[name] = shared[parameters[name]]
            elif isinstance(value, Tensor):
                state_dict[name] = value.detach().clone()
            else:  # what a module returns as its extra state
                state_dict[name] = copy.deepcopy(value)
        return state_dict

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Return a context manager in which the model holds the shared parameters."""
        drop_gathered(self.loop.model)
        parts = [part for fragment in self.fragments for part in fragment.parts]
        saved = [part.local().clone() for part in parts]
        for state in self.loop.states:
            state.write_model()
        try:
            yield
        finally:
            drop_gathered(self.loop.model)
            with torch.no_grad():
                for part, before in zip(parts, saved, strict=True):
                    part.local().copy_(before)

    # --- restart ----------------------------------------------------------------------------------

    def state_dict(self, mesh: DeviceMesh | None = None) -> dict[str, Any]:
        """Return what a restart needs in addition to model and inner optimizer, in host memory.

        This waits for fragments in flight but does not apply them: their results are in the state.
        `mesh`: a CPU mesh of this worker's ranks for the tensors of a model that is sharded over
        GPUs, so that gloo can gather them. Default: the mesh of the model.
        """
        return self.saved_state(mesh).to_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Resume from a saved state, dropping fragments in flight. Load the model first.

        Fragments, schedule, codec and outer optimizer may differ from the saved run. Return a line
        for each thing that could not be kept. Saved fragments in flight that do not fit the new
        schedule are applied now, to the model and to the tensors of `saved`.
        """
        return self.load_state(SavedState.from_dict(saved))

    def saved_state(self, mesh: DeviceMesh | None = None) -> SavedState:
        """Return the state that `state_dict` turns into a dictionary."""
        self.check()
        facts = OuterFacts(
            step=self.step_count,
            progress=self.peers.reports.progress,
            settings=saving.resume_settings(self.config),
            layout=saving.layout_of(self.loop.states),
            healed=self.loop.healed,
        )
        saved = self.peers.save(facts, mesh)
        saved.drop_unsent(self.loop.reset)
        return saved

    def load_state(self, saved: SavedState) -> list[str]:
        """Resume from what `saved_state` has returned, as `load_state_dict` does."""
        saving.check_same_model(self.loop.states, saved)
        drop_gathered(self.loop.model)
        self.loop.reset.clear()
        self.loop.step = saved.facts.step
        self.loop.healed = saved.facts.healed
        return self.peers.load(saved)

    def restart_from_model(self, step: int) -> None:
        """Start over at a step from the model, which must be equal on all workers."""
        self.load_state(SavedState.of_model(self.loop.states, self.config, step))

    # --- reports ----------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return the numbers of this rank since the last call, merged over rounds (metrics.py).

        `exposed` seconds are those of the training thread, others those of the background thread.
        An exchange counts when its result is applied.
        """
        in_flight = float(len(self.peers.reports.in_flight))
        return self.loop.meter.take() | {"worker/fragments_in_flight": in_flight}

    @property
    def exposed_seconds(self) -> float:
        """Total seconds that training has spent in the outer loop or waited for it."""
        return self.loop.meter.exposed_seconds

    def rounds(self) -> list[Round]:
        """Return the rounds applied since the last call, at most 256."""
        return self.loop.meter.take_rounds()

    def table(self) -> str:
        """Return a table of the fragments and their slots in the cycle."""
        return description.table(self.loop)

    def describe(self) -> list[str]:
        """Describe peers, settings, wire format, memory and fragments for the start of a run."""
        return [*self.peers.reports.describe(), *description.describe(self.loop)]
