"""Streaming DiLoCo around any training loop: fragments take turns in being exchanged while training goes on.

outer = StreamingDiLoCo(model, group, DiLoCoConfig(sync_every=100))
for batch in loader:
    loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
    outer.step()
outer.drain()
"""

import math
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.background_round import BackgroundRound, Outcome
from torchtitan_diloco.diloco.codecs import build_codec, build_gather_codec
from torchtitan_diloco.diloco.config import DiLoCo as DiLoCoConfig
from torchtitan_diloco.diloco.drops import is_dropped
from torchtitan_diloco.diloco.exchange import Exchange
from torchtitan_diloco.diloco.fragments import build_fragments, check_identity, fragment_table
from torchtitan_diloco.diloco.header import DROPPED, NOT_FINITE, Header
from torchtitan_diloco.diloco.messages import WorkerLostError
from torchtitan_diloco.diloco.meter import Meter, exchange_sums, total
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.restart import (
    Frozen,
    apply_early,
    by_name,
    check_same_model,
    copy_out,
    fill,
    freeze,
    layout_of,
    saved_records,
)
from torchtitan_diloco.diloco.round import Round, unknown_round
from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.diloco.shared_model import (
    drop_gathered,
    lend_shared_parameters,
    shared_state_dict,
)
from torchtitan_diloco.diloco.state_dict import SavedState, from_dict, to_dict
from torchtitan_diloco.diloco.startup import (
    agree_on_run,
    broadcast_from_first,
    check_settings,
    pick_state_device,
)


@dataclass
class _InFlight:
    facts: Round
    outcome: "Future[Outcome]"


class StreamingDiLoCo:
    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        config: DiLoCoConfig,
        *,
        shard_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        run_id: str = "",
    ) -> None:
        """`group` joins this rank with the same rank of the other workers; None or a group of one is a single worker.
        Every worker starts from worker 0's parameters: build this before weights are loaded for a restart.

        `shard_group` joins the ranks of this worker, where a worker has several: a gloo group that nothing else uses, in
        which shards agree that a delta is not finite. `seed` draws the rounds that `link.drop_probability` drops,
        and the directions of stochastic rounding."""
        check_settings(config, group)
        drop_gathered(model)
        self.config = config
        self.fragments = build_fragments(model, config.fragments)
        self.fragment_names = [fragment.name for fragment in self.fragments]
        self.schedule = Schedule(config.sync_every, len(self.fragments), config.overlap.delay)
        self.workers = 1 if group is None else group.size()
        self.worker = 0 if group is None else group.rank()
        self.step_count = 0
        self._model, self._seed = model, seed
        self._mixing = config.overlap.mixing
        self._weights = [0.0] * len(self.fragments)
        self._run = agree_on_run(group, config, self.fragments, seed=seed, run_id=run_id)
        if group is not None and self.workers > 1:
            broadcast_from_first(group, model, config.link)
        device = pick_state_device(group, self.fragments, config.link)
        feedback = config.quantization.error_feedback
        self._states = [
            OuterState(fragment, config.outer_optimizer, device, feedback)
            for fragment in self.fragments
        ]
        exchange = None
        if group is not None and self.workers > 1:
            exchange = Exchange(
                group,
                build_codec(config.quantization),
                build_gather_codec(config.quantization),
                largest=max(state.values for state in self._states),
                device=device,
                timeout_seconds=config.link.timeout_seconds,
            )
        self._round = BackgroundRound(exchange, self.worker, seed, shard_group)
        self._in_flight: dict[int, _InFlight] = {}
        self._background = BackgroundThread("diloco-exchange")
        threads = torch.get_num_threads()
        self._background.submit(partial(_use_threads, config.quantization.threads)).result()
        torch.set_num_threads(threads)  # or all that begin later had that thread's number
        self._meter = Meter()
        weakref.finalize(
            self, _close, self._background, self._round
        )  # when it is dropped, or Python exits

    # --- the loop ---------------------------------------------------------------------------------------------------

    def step(self, weight: float = 1.0) -> None:
        """After every inner step: applies what is due, then sends what is due. `weight` is what this inner step counts in
        the mean over workers, such as its tokens."""
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"the weight of a step is {weight}: give a number from 0 up, such as the step's tokens"
            )
        self.step_count += 1
        self._weights = [total + weight for total in self._weights]
        self.check()
        sent, applied = (
            self.schedule.sent_at(self.step_count),
            self.schedule.applied_at(self.step_count),
        )
        if sent or applied:
            drop_gathered(self._model)
        if self.schedule.delay:
            self._apply_all(applied)
        for fragment in sent:
            self._send(fragment)
        if not self.schedule.delay:
            self._apply_all(applied)

    def drain(self) -> None:
        """Waits for everything in flight and applies it, in the order it was sent."""
        drop_gathered(self._model)
        self._apply_all(list(self._in_flight))

    def close(self, timeout: float = 5.0) -> None:
        """Ends the background thread once it has finished what is in flight. Called by itself when this object is dropped, and
        when Python exits: a thread that is still in torch then would take the process down. A program whose own exit handlers
        take the process group down calls it first."""
        _close(self._background, self._round, timeout)

    def _send(self, index: int) -> None:
        state = self._states[index]
        outer_round = self.schedule.outer_round(index, self.step_count)
        facts = Round(index, outer_round, self.step_count, state.values, due=time.perf_counter())
        check_identity(self._model, state.fragment)
        state.take_delta()
        dropped = is_dropped(
            self.config.link.drop_probability, self._seed, self.worker, index, outer_round
        )
        header = Header(
            flags=DROPPED if dropped else 0,
            run=self._run,
            fragment=index,
            outer_round=outer_round,
            step=self.step_count,
            weight=self._weights[index],
            checksum=state.checksum,
        )
        self._weights[index] = 0.0
        facts.taken = time.perf_counter()
        self._meter.sent(facts)
        self._in_flight[index] = _InFlight(
            facts, self._background.submit(partial(self._round, state, header, facts))
        )

    def _apply_all(self, fragments: list[int]) -> None:
        for index in fragments:
            flight = self._in_flight.pop(index, None)
            if flight is None:
                continue  # applied early by drain()
            facts = flight.facts
            facts.applied_step, facts.asked = self.step_count, time.perf_counter()
            outcome = self._result(index, flight)
            facts.fetched = time.perf_counter()
            facts.drift = self._states[index].apply(self._mixing_for(outcome))
            facts.applied = time.perf_counter()
            self._meter.applied(facts)

    def _mixing_for(self, outcome: Outcome) -> float:
        """Parameters that are not finite are no use to mix with; a dropped worker keeps its own."""
        if outcome.flags & NOT_FINITE:
            return 0.0
        return 1.0 if outcome.flags & DROPPED or not outcome.participants else self._mixing

    def check(self) -> None:
        """Raises what an exchange in the background has failed with. Every step() does it, so that a run ends then and not
        only when the result is due; for those who wait for something else meanwhile."""
        for index, flight in self._in_flight.items():
            if flight.outcome.done() and flight.outcome.exception() is not None:
                self._result(index, flight)

    def _result(self, index: int, flight: _InFlight) -> Outcome:
        try:
            return flight.outcome.result()
        except WorkerLostError as error:
            where = f"fragment {index} ({self.fragments[index].name}), sent after step {flight.facts.sent_step}"
            raise WorkerLostError(
                error.workers,
                f"{error.reason}; seen by worker {self.worker} in the exchange of {where}",
            ) from error

    # --- the shared model -------------------------------------------------------------------------------------------

    def global_state_dict(self) -> dict[str, Tensor]:
        """The shared (outer) parameters in fp32, the same bits on every worker, under the model's own names; frozen
        parameters and this worker's buffers as they are. Sharded parameters stay sharded."""
        return shared_state_dict(self._model, self._states)

    def global_parameters(self) -> AbstractContextManager[None]:
        """The model holds the shared parameters inside; the local ones come back at the end."""
        return lend_shared_parameters(self._model, self._states)

    # --- restart ----------------------------------------------------------------------------------------------------

    def state_dict(self, mesh: DeviceMesh | None = None) -> dict[str, Any]:
        """All that a restart needs beside the model and the inner optimizer, in host memory, by the names of the parameters.
        Fragments in flight are waited for, not applied: what came back for them is part of the state."""
        return to_dict(self.start_state_dict(mesh).result())

    def start_state_dict(self, mesh: DeviceMesh | None = None) -> "Future[Any]":
        """The state as it is now, copied in the background while training goes on; what is in flight is waited for there.
        `mesh`: a mesh of this worker's ranks on the CPU, for models that are sharded over GPUs."""
        self.check()
        frozen = []
        for index, state in enumerate(self._states):
            flight = self._in_flight.get(index)
            under_way = None if flight is None else {"step": flight.facts.sent_step}
            record = {"weight": self._weights[index], "in_flight": under_way}
            frozen.append(freeze(state, record, in_flight=flight is not None))
        flights = [
            (index, flight, flight.facts.counted) for index, flight in self._in_flight.items()
        ]
        facts = {
            "step": self.step_count,
            "settings": self._restart_settings(),
            "layout": layout_of(self._states),
            "in_flight_order": list(self._in_flight),
        }
        return self._background.submit(partial(self._finish_state, frozen, flights, facts, mesh))

    def _finish_state(
        self,
        frozen: "list[Frozen]",
        flights: "list[tuple[int, _InFlight, bool]]",
        facts: dict[str, Any],
        mesh: DeviceMesh | None,
    ) -> SavedState:
        copies = [copy_out(state, one) for state, one in zip(self._states, frozen, strict=True)]
        for index, flight, _ in flights:
            known = flight.outcome.result()
            copies[index].record["in_flight"] |= {
                "participants": known.participants,
                "flags": known.flags,
            }
        uncounted = total(
            exchange_sums(flight.facts) for _, flight, counted in flights if not counted
        )

        def named(pick: Callable[[Frozen], Tensor | None]) -> dict[str, Tensor]:
            return by_name(self._states, [pick(copy) for copy in copies], mesh)

        outer = [copy.outer for copy in copies]
        slots = [
            by_name(self._states, [copy.slots[number] for copy in copies], mesh)
            for number in range(len(copies[0].slots))
        ]
        return from_dict(
            facts
            | {
                "exchanged": uncounted,  # for who keeps totals: a load does not read it
                "fragments": [copy.record for copy in copies],
                "outer": named(lambda copy: copy.outer),
                "next": by_name(
                    self._states, [copy.next for copy in copies], mesh, otherwise=outer
                ),
                "slots": slots,
                "residual": named(lambda copy: copy.residual),
            }
        )

    def load_state_dict(self, saved: Any) -> list[str]:
        """After it, the run goes on as the one that was saved; what is in flight here is waited for and given up. Other
        fragments, another schedule, codec or outer optimizer are taken over as far as they can be: returns, one line each, what
        could not. Load the model first: fragments whose turn has changed are applied to it."""
        if isinstance(saved, SavedState):
            saved = to_dict(saved)
        check_same_model(self._states, saved["outer"])
        self._give_up_flights()
        drop_gathered(self._model)
        notes, before, now = [], saved["settings"], self._restart_settings()
        turns = ("diloco.sync_every", "diloco.overlap.delay")
        flying = list(saved["in_flight_order"])
        if flying and (
            saved["layout"] != layout_of(self._states)
            or any(before[key] != now[key] for key in turns)
        ):
            notes.append(
                f"{len(flying)} fragments were under way and are applied now, as their turns have changed"
            )
            apply_early(self._states, saved, lambda record: self._mixing_for(_outcome(record)))
            flying = []
        fill(self._states, [state.outer for state in self._states], saved["outer"])
        optimizer = "diloco.outer_optimizer.name"
        if before[optimizer] == now[optimizer]:
            for number, slot in enumerate(saved["slots"]):
                fill(self._states, [state.slots[number] for state in self._states], slot)
        else:
            notes.append(
                f"{optimizer} was {before[optimizer]} and is {now[optimizer]}: its memory starts from zero"
            )
        residuals = [state.residual for state in self._states if state.residual is not None]
        if residuals and saved["residual"]:
            fill(self._states, residuals, saved["residual"])
        elif residuals or saved["residual"]:
            lost = "is given up" if saved["residual"] else "starts from zero"
            notes.append(
                f"diloco.quantization.error_feedback has changed: what encoding lost {lost}"
            )
        self.step_count = saved["step"]
        for index, (state, record) in enumerate(
            zip(self._states, saved_records(self._states, saved), strict=True)
        ):
            if index in flying:
                fill([state], [state.delta], saved["next"])
            state.loaded(record["rounds"], in_flight=index in flying)
            self._weights[index] = record["weight"]
        for index in flying:
            record = saved["fragments"][index]["in_flight"]
            future: Future[Outcome] = Future()
            future.set_result(_outcome(record))
            outer_round = self.schedule.outer_round(index, record["step"])
            facts = unknown_round(
                index,
                outer_round,
                record["step"],
                self._states[index].values,
                record["participants"],
            )
            self._in_flight[index] = _InFlight(facts, future)
        return notes

    def restart_from_model(self, step: int) -> None:
        """Begins anew after so many steps, with what the model holds now, which is the same on every worker, as shared copy."""
        self._give_up_flights()
        self.step_count = step
        self._weights = [0.0] * len(self.fragments)
        for state in self._states:
            state.restart()

    def _give_up_flights(self) -> None:
        """What is in flight is waited for and forgotten. A state that is still being copied is that of before."""
        for flight in self._in_flight.values():
            flight.outcome.exception()
        self._in_flight.clear()
        self._background.submit(lambda: None).result()

    def _restart_settings(self) -> dict[str, Any]:
        """What a saved state depends on."""
        return {
            "diloco.sync_every": self.config.sync_every,
            "diloco.overlap.delay": self.config.overlap.delay,
            "diloco.outer_optimizer.name": self.config.outer_optimizer.name,
        }

    # --- what happened ----------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Since the last call. Seconds and bytes are this rank's; `exposed` is what the training thread spent or waited,
        `exchange` what went on in the background meanwhile."""
        for flight in self._in_flight.values():
            if flight.outcome.done():
                self._meter.exchanged(flight.facts)
        return self._meter.take(len(self._in_flight))

    @property
    def exposed_seconds(self) -> float:
        """That the training thread has spent or waited in the outer loop so far."""
        return self._meter.exposed_seconds

    def rounds(self) -> list[Round]:
        """The rounds that were applied since the last call, the latest 256 at most: how each fragment fared."""
        return self._meter.take_rounds()

    @property
    def state_bytes(self) -> int:
        """Memory of this rank's shared parameters, optimizer buffers and deltas."""
        return sum(state.bytes for state in self._states)

    def describe(self) -> list[str]:
        from torchtitan_diloco.planner.summary import outer_line, wire_line

        lines = [outer_line(self.config), wire_line(self.config)]
        return [f"outer      {lines[0]}", f"wire       {lines[1]}", self.table()]

    def table(self) -> str:
        """The fragments and when they have their turn."""
        return fragment_table(self.fragments, map(self.schedule.offset, range(len(self.fragments))))


def _outcome(record: dict[str, Any]) -> Outcome:
    return Outcome(record["participants"], record["flags"])


def _use_threads(number: int) -> None:
    """Of this thread. The first question makes torch give it the number of all; without it, the first large operation would."""
    torch.get_num_threads()
    torch.set_num_threads(number)


def _close(background: BackgroundThread, round_: BackgroundRound, timeout: float = 5.0) -> None:
    background.close(timeout)
    round_.close()
