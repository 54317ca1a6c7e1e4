"""Streaming DiLoCo for any training loop: workers exchange one fragment at a time.

outer = StreamingDiLoCo(model, group, DiLoCoConfig(sync_every=100))
for batch in loader:
    loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
    outer.step()
outer.drain()

`_take` takes the delta of a fragment and `_apply` applies the next shared copy. The peers
(diloco/peers.py) decide when, and how to compute the copy from all deltas.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco import healing
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.fragments import Fragment, check_identity
from torchtitan_diloco.diloco.gloo_peers import GlooPeers
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.peers import Apply, Peers, Send
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.schedule import is_measured
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
            shard_group: a gloo group of this worker's ranks, if it has several, that nothing else
                uses, over which they sum the norm of a delta.
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
        self.peers = peers = group
        peers.start(model, config)
        self.config = peers.config
        self.fragments = peers.fragments
        self._states = peers.states
        self._meter = peers.meter
        self._healed = 0
        self._reset = set[int]()
        """Fragments that were reset since the last step: work before that is in no delta."""
        self._model = model
        self._optimizer = optimizer

    @property
    def step_count(self) -> int:
        """Inner steps so far."""
        return self.peers.step

    @property
    def workers(self) -> int:
        return self.peers.workers

    @property
    def worker(self) -> int:
        return self.peers.worker

    # --- training ---------------------------------------------------------------------------------

    def step(self, weight: float = 1.0) -> None:
        """Apply and send the fragments that are due. Call it after every inner step.

        `weight`: weight of this inner step in the mean over workers, such as its number of tokens.
        Islands count it, so pass the number of tokens.
        """
        if not 0 <= weight < math.inf:
            raise UserError(
                f"StreamingDiLoCo.step(weight={weight}): pass a finite number of at least 0, such "
                "as the tokens of this worker in this step"
            )
        reset = sorted(self._reset)
        self._reset.clear()
        self._carry_out(self.peers.due_tasks(weight, reset))

    def drain(self) -> None:
        """Wait for the fragments in flight, and apply them in the order of their sends.

        An island finishes the run with the others or, before the end of the run, leaves it after
        sending its work since the last send. At the end, all islands have the same copy.
        """
        self._carry_out(self.peers.remaining_tasks())

    def check(self) -> None:
        """Raise if a worker is lost or an exchange has failed, even before its result is due."""
        self.peers.check()

    def close(self) -> None:
        """End the threads. Needed only before an exit handler that destroys the process group."""
        self.peers.close()

    def _carry_out(self, tasks: Iterable[Send | Apply]) -> None:
        """Carry out each task before the next one is asked for, as peers wait in between."""
        for task in tasks:
            drop_gathered(self._model)
            if isinstance(task, Send):
                self._take(task.round)
            else:
                self._apply(task)

    def _take(self, round_: Round) -> None:
        """Take the delta of a fragment."""
        state = self._states[round_.fragment]
        check_identity(self._model, state.fragment)
        begin = state.moment()
        state.take_delta()
        round_.taken = time.perf_counter()
        self._meter.expose(round_.taken - round_.due, (begin, state.moment()))

    def _apply(self, task: Apply) -> None:
        """Apply the next shared copy of a fragment."""
        round_ = task.round
        state = self._states[round_.fragment]
        round_.applied_step = self.step_count
        measured = is_measured(round_.outer_round, self.config.measure_every)
        begin = state.moment()
        match task.mode:
            case Mode.ADD:
                state.add_change(task.copy)
            case Mode.TAKE_BACK:
                state.add_change(task.copy, takes_back=True)
            case Mode.MIX:
                round_.drift = state.apply(task.copy, task.share, measured=measured)
            case Mode.TAKE | Mode.RESET:
                round_.drift = state.apply(task.copy, 0.0, measured=measured)
        round_.applying = begin, state.moment()
        if task.mode is Mode.RESET:
            self._start_afresh(round_.fragment)
        round_.applied = time.perf_counter()
        self._meter.applied(round_)

    def heal(self, group: dist.ProcessGroup | None = None) -> list[int]:
        """Reset fragments that are not finite to the shared parameters, and return their indices.

        Call it on every rank of a worker after a step whose gradient is not finite, and before a
        save. A fragment is also reset if its inner optimizer state is not finite. `group`: a group
        of the worker's ranks for use in this thread.
        """
        healed = healing.find_broken(self.fragments, self._optimizer, group)
        if healed:
            drop_gathered(self._model)
        for index in healed:
            self._states[index].write_model()
            self._start_afresh(index)
        if healed and (group is None or group.rank() == 0):
            logger.warning(
                f"worker {self.worker}: fragments {healed} are not finite after "
                f"step {self.step_count}; they take the shared parameters, and "
                f"their inner optimizer state is reset ({self._healed} fragments "
                "healed so far)"
            )
        return healed

    def _start_afresh(self, index: int) -> None:
        """Drop the training state of a fragment that was reset to the shared parameters."""
        if self._optimizer is not None:
            for part in self.fragments[index].parts:
                self._optimizer.state.pop(part.parameter, None)
        self._reset.add(index)
        self._healed += 1
        self._meter.healed()

    # --- shared model -----------------------------------------------------------------------------

    def global_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict with the shared parameters in fp32, sharded as they are.

        They are bitwise equal on all workers. Frozen parameters and buffers are this worker's.
        """
        drop_gathered(self._model)
        shared: dict[Tensor, Tensor] = {}
        for state in self._states:
            check_identity(self._model, state.fragment)
            for part, view in zip(state.fragment.parts, state.views(state.outer), strict=True):
                mesh = part.parameter.device_mesh if isinstance(part.parameter, DTensor) else None
                shared[part.parameter] = saving.shaped_like(part.parameter, view.clone(), mesh)
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        state_dict = dict[str, Tensor]()
        for name, value in self._model.state_dict().items():
            if name in parameters and parameters[name] in shared:
                state_dict[name] = shared[parameters[name]]
            else:
                state_dict[name] = value.detach().clone()
        return state_dict

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Return a context manager in which the model holds the shared parameters."""
        drop_gathered(self._model)
        parts = [part for fragment in self.fragments for part in fragment.parts]
        saved = [part.local().clone() for part in parts]
        for state in self._states:
            state.write_model()
        try:
            yield
        finally:
            drop_gathered(self._model)
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
        self.check()
        facts = OuterFacts(
            step=self.step_count,
            progress=self.progress,
            settings=saving.resume_settings(self.config),
            layout=saving.layout_of(self._states),
            healed=self._healed,
        )
        saved = self.peers.save(facts, mesh)
        for index in self._reset:
            saved.facts.fragments[index].weight = 0.0
        return saved.to_dict()

    def load_state_dict(self, saved: SavedState | dict[str, Any]) -> list[str]:
        """Resume from a saved state, dropping fragments in flight. Load the model first.

        Fragments, schedule, codec and outer optimizer may differ from the saved run. Return a line
        for each thing that could not be kept. Saved fragments in flight that do not fit the new
        schedule are applied now, to the model and to the tensors of `saved`.
        """
        saved = saved if isinstance(saved, SavedState) else SavedState.from_dict(saved)
        saving.check_same_model(self._states, saved)
        self.peers.restart()
        drop_gathered(self._model)
        self._reset.clear()
        self.peers.step = saved.facts.step
        self._healed = saved.facts.healed
        return self.peers.load(saved)

    def restart_from_model(self, step: int) -> None:
        """Start over at a step from the model, which must be equal on all workers."""
        self.peers.restart()
        self._reset.clear()
        self.peers.step = step
        for state in self._states:
            state.restart()

    # --- reports ----------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """Completed share of the run, 0 if its length is unknown."""
        return self.peers.progress

    def metrics(self) -> dict[str, float]:
        """Return totals of this rank since the last call.

        `exposed` seconds are those of the training thread, others those of the background thread.
        An exchange counts when its result is applied.
        """
        return self._meter.take() | {"worker/fragments_in_flight": float(len(self.peers.in_flight))}

    @property
    def exposed_seconds(self) -> float:
        """Total seconds that training has spent in the outer loop or waited for it."""
        return self._meter.exposed_seconds

    def rounds(self) -> list[Round]:
        """Return the rounds applied since the last call, at most 256."""
        return self._meter.take_rounds()

    def table(self) -> str:
        """Return a table of the fragments and their slots in the cycle."""
        lines = [f"{'fragment':>8}  {'slot':>5}  {'parameters':>13}  {'MB (fp32)':>9}  modules"]
        for fragment, slot in zip(self.fragments, self.peers.offsets, strict=True):
            sizes = f"{fragment.parameters:>13,}  {fragment.megabytes:>9,.2f}"
            lines.append(f"{fragment.index:>8}  {slot:>5}  {sizes}  {fragment.name}")
        return "\n".join(lines)

    def describe(self) -> list[str]:
        """Describe peers, settings, wire format, memory and fragments for the start of a run."""
        return self.peers.describe()


class DataParallel:
    """The interface of StreamingDiLoCo for `method = "none"`, where nothing is exchanged."""

    fragments: tuple[Fragment, ...] = ()
    exposed_seconds = 0.0

    def __init__(self, model: nn.Module, workers: int = 1) -> None:
        self._model = model
        self._workers = workers

    def step(self, weight: float = 1.0) -> None: ...
    def drain(self) -> None: ...
    def restart_from_model(self, step: int) -> None: ...

    def state_dict(self, _: DeviceMesh | None = None) -> dict[str, Any]:
        """Return nothing: there is no outer loop."""
        return {}

    def heal(self, _: dist.ProcessGroup | None) -> list[int]:
        """Return no fragments: there is no shared copy to heal from."""
        return []

    def global_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        return {}

    def rounds(self) -> list[Round]:
        return []

    def describe(self) -> list[str]:
        text = "gradients are averaged at every step; only workers and link of [diloco] are used"
        return [f"{'outer':<10} none: {text}"] if self._workers > 1 else []

    def load_state_dict(self, saved: SavedState) -> list[str]:
        """Start from the shared parameters of a run with an outer loop."""
        saving.write_shared(self._model, saved)
        return [
            "the run no longer has an outer loop: the model starts from the shared "
            "parameters, and the optimizer from that of worker 0"
        ]


OuterLoop = StreamingDiLoCo | DataParallel
