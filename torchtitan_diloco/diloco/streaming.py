"""Streaming DiLoCo for any training loop: workers exchange one fragment at a time.

outer = StreamingDiLoCo(model, group, DiLoCoConfig(sync_every=100))
for batch in loader:
    loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
    outer.step()
outer.drain()

In the training thread, `_send` takes the delta of a fragment and `_apply` merges the next shared
copy into the model. In between, `_exchange` computes it from the delta in a background thread.
"""

import math
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.diloco import healing, startup
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.background import alone, one_at_a_time
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.fragments import (
    build_fragments,
    check_identity,
    drop_gathered,
    fragment_table,
)
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.round import InFlight, Meter, Round
from torchtitan_diloco.diloco.schedule import build_schedule, is_dropped, is_measured
from torchtitan_diloco.diloco.state_dict import Facts, SavedState, Snapshot
from torchtitan_diloco.diloco.transport import DROPPED, WENT_WRONG, Header
from torchtitan_diloco.log import UserError, logger


class StreamingDiLoCo:
    def __new__(cls, model: Any = None, group: Any = None, *_: Any, **__: Any) -> Any:
        """Create an `IslandDiLoCo` if `group` is an `Islands`."""
        del model  # for the signature only
        if isinstance(group, type):
            raise TypeError(f"group: give {group.__name__}(...), not the class")
        loop: type[StreamingDiLoCo] = getattr(group, "outer_loop", cls)
        if cls is not StreamingDiLoCo and not issubclass(cls, loop):
            raise TypeError(f"{cls.__name__}: derive it from {loop.__name__} to join islands")
        return super().__new__(loop if cls is StreamingDiLoCo else cls)

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        config: DiLoCoConfig,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        shard_group: dist.ProcessGroup | None = None,
        liveness: Liveness | None = None,
        total_steps: int = 0,
        seed: int = 0,
    ) -> None:
        """Start from worker 0's parameters. For a restart, load weights after this.

        Call methods from one thread at a time, `metrics` and `rounds` from the one that trains.

        Args:
            group: a gloo group of this rank and its peers on the other workers. None: one worker.
            optimizer: the inner optimizer. Its state is dropped for fragments that are reset to the
                shared parameters.
            shard_group: a gloo group of this worker's ranks, if it has several, that nothing else
                uses. They sum the norm of a delta over it.
            liveness: watches all workers. Default: a new one with a gloo group of its own.
            total_steps: length of the run, for `overlap.mixing_end`.
            seed: for the rounds that `link.drop_probability` drops.
        """
        startup.check_settings(model, group, config, total_steps)
        drop_gathered(model)
        self.config = config
        self.fragments = build_fragments(model, config.fragments)
        self.fragment_names = tuple(fragment.name for fragment in self.fragments)
        self.schedule = build_schedule(config, len(self.fragments))
        self.workers, self.worker = (1, 0) if group is None else (group.size(), group.rank())
        self.step_count, self._total_steps = 0, total_steps
        self._model, self._seed, self._shard_group = model, seed, shard_group
        self._optimizer, self._healed = optimizer, 0
        self._watch = healing.Watch(self.workers, len(self.fragments))
        self._weights = [0.0] * len(self.fragments)
        device = startup.pick_state_device(self.fragments, config)
        self._run = startup.agree_on_run(
            group, config, self.fragments, device, total_steps, seed=seed
        )
        startup.broadcast_from_first(group, model)
        self._liveness = liveness or Liveness.between(group)
        self._states = startup.build_states(config, self.fragments, device)
        self._exchanger = startup.build_exchange(group, config, self._states, device)
        self._in_flight: dict[int, InFlight] = {}
        self.in_use = threading.RLock()
        self._meter = Meter()
        self._background = startup.start_background(config.quantization.threads)
        self._finalizer = weakref.finalize(
            self, startup.close, self._background, self._exchanger, self._liveness, liveness is None
        )

    # --- training thread --------------------------------------------------------------------------

    @one_at_a_time
    def step(self, weight: float = 1.0) -> None:
        """Apply and send the fragments that are due. Call it after every inner step.

        `weight`: of this inner step in the mean over workers, such as its number of tokens.
        """
        if not 0 <= weight < math.inf:
            raise UserError(f"the weight of a step is {weight}: give a number from 0 up")
        self.step_count += 1
        self._liveness.step_done(self.step_count)
        self._weights = [before + weight for before in self._weights]
        self.check()
        sent = self.schedule.sent_at(self.step_count)
        applied = self.schedule.applied_at(self.step_count)
        if sent or applied:
            drop_gathered(self._model)
        self._apply([fragment for fragment in self._in_flight if fragment in applied])
        for fragment in sent:
            self._send(fragment)
        self._apply(applied)  # those that were just sent and have no delay

    @one_at_a_time
    def drain(self) -> None:
        """Wait for the fragments in flight, and apply them in the order of their sends."""
        drop_gathered(self._model)
        self._apply(list(self._in_flight))

    def check(self) -> None:
        """Raise if a worker is lost or an exchange has failed, even before its result is due."""
        self._liveness.check(f"seen by worker {self.worker} after its step {self.step_count}")
        for round_, exchanged in self._in_flight.values():
            if exchanged.done() and exchanged.exception() is not None:
                self._wait(round_, exchanged)

    def close(self) -> None:
        """End the threads. Needed only before an exit handler that destroys the process group."""
        self._finalizer()

    def _send(self, index: int) -> None:
        state, step, weight = self._states[index], self.step_count, self._weights[index]
        outer_round, now = self.schedule.outer_round(index, step), time.perf_counter()
        round_ = Round(index, outer_round, step, state.values, weight=weight, due=now)
        check_identity(self._model, state.fragment)
        begin = state.moment()
        state.take_delta()
        self._weights[index], round_.taken = 0.0, time.perf_counter()
        self._meter.expose(round_.taken - round_.due, (begin, state.moment()))
        exchanged = self._background.submit(partial(self._exchange, state, round_))
        self._in_flight[index] = round_, exchanged

    def _apply(self, fragments: list[int]) -> None:
        for index in [one for one in fragments if one in self._in_flight]:  # or drain() applied it
            round_, exchanged = self._in_flight[index]
            round_.applied_step, round_.asked = self.step_count, time.perf_counter()
            self._wait(round_, exchanged)
            del self._in_flight[index]
            round_.fetched = time.perf_counter()
            measured = is_measured(round_.outer_round, self.config.measure_every)
            average = self.schedule.is_average(round_.sent_step)
            mixing = self._mixing(round_.flags, round_.participants, average=average)
            state = self._states[index]
            begin = state.moment()
            round_.drift = state.apply(mixing, measured=measured)
            round_.applying = begin, state.moment()
            if round_.flags & WENT_WRONG:
                self._start_afresh(index)
            round_.applied = time.perf_counter()
            self._meter.applied(round_)

    def _mixing(self, flags: int, participants: int, *, average: bool = False) -> float:
        """Return the weight of local parameters: 0 if they went wrong, 1 for dropped workers."""
        if flags & WENT_WRONG:
            return 0.0
        if flags & DROPPED or not participants:
            return 1.0
        return 0.0 if average else self.config.overlap.mixing_at(self.progress)

    @one_at_a_time
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
            if group is None or group.rank() == 0:
                logger.warning(
                    f"worker {self.worker}: fragments {healed} are not finite after step "
                    f"{self.step_count}; they take the shared parameters, and the inner optimizer "
                    f"starts afresh for them ({self._healed} fragments healed so far)"
                )
        return healed

    def _start_afresh(self, index: int) -> None:
        """Drop the training state of a fragment that was reset to the shared parameters."""
        healing.forget_moments(self._states[index].fragment, self._optimizer)
        self._weights[index] = 0.0
        self._healed += 1
        self._meter.healed()

    def _wait(self, round_: Round, exchanged: "Future[None]") -> None:
        name, step = self.fragments[round_.fragment].name, round_.sent_step
        which = f"the exchange of fragment {round_.fragment} ({name}), sent after step {step}"
        late = tuple if self._exchanger is None else self._exchanger.late
        self._liveness.wait(exchanged, step, f"seen by worker {self.worker} in {which}", late)

    # --- background thread ------------------------------------------------------------------------

    def _exchange(self, state: OuterState, round_: Round) -> None:
        """Turn this worker's delta into the next shared copy."""
        round_.begun = time.perf_counter()
        turn, step = (round_.fragment, round_.outer_round), round_.sent_step
        measured = is_measured(round_.outer_round, self.config.measure_every)
        average = self.schedule.is_average(step)
        dropped = is_dropped(self.config.link.drop_probability, self._seed, self.worker, *turn)
        with state.background():
            round_.delta_square = state.finish_delta()
            whole = healing.sum_over_ranks(round_.delta_square, self._shard_group, self.worker)
            norms = healing.DeltaNorms() if average else state.norms  # other lengths: not judged
            flags = dropped * DROPPED | norms.judge(whole, self.config.delta_norm_limit)
            header = Header(flags, self._run, *turn, step, round_.weight, state.checksum)
            if self._exchanger is None:
                headers = healing.settle_weights([header])
            else:
                headers, round_.traffic = self._exchanger.average(
                    state.delta, header, state.residual, measured=measured
                )
        round_.weight, round_.flags = headers[self.worker].weight, headers[self.worker].flags
        round_.participants = sum(one.weight > 0 for one in headers)
        with state.background():
            if round_.participants:
                squares = state.advance(average=average, measured=measured)
                round_.mean_square, round_.update_square = squares
            else:
                state.keep()
        round_.ready = time.perf_counter()
        self._watch.note(headers, self.config.delta_norm_limit)

    # --- shared model -----------------------------------------------------------------------------

    @one_at_a_time
    def global_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict with the shared parameters in fp32, sharded as they are.

        They are bitwise equal on all workers. Frozen parameters and buffers are this worker's.
        """
        return saving.shared_state_dict(self._model, self._states)

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Return a context manager in which the model holds the shared parameters."""
        with (
            alone(self.in_use, "StreamingDiLoCo.global_parameters"),
            saving.holding_shared(self._model, self._states),
        ):
            yield

    # --- restart ----------------------------------------------------------------------------------

    def state_dict(self, mesh: DeviceMesh | None = None) -> dict[str, Any]:
        """Return what a restart needs besides the model and inner optimizer, in host memory.

        Fragments in flight are waited for but not applied: their results are part of the state.
        """
        last_sent = max((one.sent_step for one, _ in self._in_flight.values()), default=0)
        return vars(self._liveness.wait(self.start_state_dict(mesh), last_sent))

    @one_at_a_time
    def start_state_dict(
        self, mesh: DeviceMesh | None = None, *, shared: bool = True
    ) -> "Future[SavedState]":
        """Copy the current state in the background, after the exchanges in flight.

        `mesh`: a CPU mesh of this worker's ranks, for models that are sharded over GPUs. `shared`:
        include what is equal on all workers, which only one of them saves.
        """
        self.check()
        snapshots, facts = self._take_snapshots(shared=shared), self._facts_now()
        return self._background.submit(partial(saving.save, snapshots, facts, mesh))

    def _take_snapshots(self, *, shared: bool = True) -> list[Snapshot]:
        return [
            Snapshot(state, weight, self._in_flight.get(index), shared=shared)
            for index, (state, weight) in enumerate(zip(self._states, self._weights, strict=True))
        ]

    def _facts_now(self) -> Facts:
        """Return the part of `SavedState.facts` that is known already."""
        return {
            "step": self.step_count,
            "progress": self.progress,
            "healed": self._healed,
            "settings": saving.resume_settings(self.config),
            "layout": saving.layout_of(self._states),
            "in_flight": list(self._in_flight),
        }

    def load_state_dict(self, saved: SavedState | dict[str, Any]) -> list[str]:
        """Resume from a saved state, dropping fragments in flight. Load the model first.

        Fragments, schedule, codec and outer optimizer may differ from the saved run. Return a line
        for each thing that could not be kept. Saved fragments in flight that do not fit the new
        schedule are applied now, to the model and to the tensors of `saved`.
        """
        saved = saved if isinstance(saved, SavedState) else SavedState(**saved)
        saving.check_same_model(self._states, saved)
        self._give_up_in_flight()
        drop_gathered(self._model)
        self.step_count, self._healed = saved.facts["step"], saved.facts["healed"]
        facts, in_flight, notes = saving.load(self._states, saved, self.config, self._mixing)
        self._weights = [record["weight"] for record in facts]
        for index in in_flight:
            outer_round = self.schedule.outer_round(index, facts[index]["sent_step"])
            round_ = Round.loaded(index, outer_round, self._states[index].values, facts[index])
            self._in_flight[index] = round_, self._background.submit(lambda: None)
        return notes

    def restart_from_model(self, step: int) -> None:
        """Start over at a step from the model, which must be equal on all workers."""
        self._give_up_in_flight()
        self.step_count = step
        self._weights = [0.0] * len(self.fragments)
        for state in self._states:
            state.restart()

    def _give_up_in_flight(self) -> None:
        """Wait for exchanges and saves in flight, and drop their results."""
        self._liveness.wait(self._background.submit(lambda: None))
        self._in_flight.clear()

    # --- reports ----------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """Completed share of the run, 0 if its length is unknown."""
        return self.step_count / self._total_steps if self._total_steps else 0.0

    def metrics(self) -> dict[str, float]:
        """Return totals of this rank since the last call.

        `exposed` seconds are those of the training thread, others those of the background thread.
        An exchange counts when its result is applied.
        """
        return self._meter.take() | {"worker/fragments_in_flight": float(len(self._in_flight))}

    @property
    def exposed_seconds(self) -> float:
        """Total seconds that training has spent in the outer loop or waited for it."""
        return self._meter.exposed_seconds

    def rounds(self) -> list[Round]:
        """Return the rounds applied since the last call, at most 256."""
        return self._meter.take_rounds()

    def table(self) -> str:
        """Return a table of the fragments and their slots in the cycle."""
        return fragment_table(self.fragments, map(self.schedule.offset, range(len(self.fragments))))

    def describe(self) -> list[str]:
        """Describe settings, memory and fragments in lines for the start of a run."""
        return [*startup.describe_settings(self.config, self._states), self.table()]
