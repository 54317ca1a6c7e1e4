"""Streaming DiLoCo around any training loop: fragments take turns in being exchanged while training goes on.

outer = StreamingDiLoCo(model, group, DiLoCoConfig(sync_every=100))
for batch in loader:
    loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
    outer.step()
outer.drain()
"""

import copy
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan_diloco.config.schema import DiLoCo as DiLoCoConfig
from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.drops import is_dropped
from torchtitan_diloco.diloco.exchange import Exchange, Traffic, WorkerLostError
from torchtitan_diloco.diloco.fragments import build_fragments, fragment_table
from torchtitan_diloco.diloco.header import DROPPED, NOT_FINITE, Header
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.diloco.startup import agree_on_run, broadcast_from_first, pick_state_device
from torchtitan_diloco.tools.logging import logger


@dataclass(frozen=True)
class Outcome:
    """What the background made of one exchange."""

    participants: int
    """Workers whose delta went into the mean."""
    flags: int
    """This worker's own."""
    seconds: float


@dataclass
class _InFlight:
    step: int
    outcome: "Future[Outcome]"


class StreamingDiLoCo:
    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        config: DiLoCoConfig,
        *,
        seed: int = 0,
        run_id: str = "",
    ) -> None:
        """`group` joins this rank with the same rank of the other workers; None or a group of one is a single worker.
        Every worker starts from worker 0's parameters. `seed` draws the rounds that `link.drop_probability` drops."""
        _drop_gathered(model)
        self.config = config
        self.fragments = build_fragments(model, config.fragments)
        self.schedule = Schedule(config.sync_every, len(self.fragments), config.overlap.delay)
        self.workers = 1 if group is None else group.size()
        self.worker = 0 if group is None else group.rank()
        self.step_count = 0
        self._model, self._seed = model, seed
        self._mixing = config.overlap.mixing
        self._weights = [0.0] * len(self.fragments)
        self._run = agree_on_run(group, config, self.fragments, seed=seed, run_id=run_id)
        if group is not None and self.workers > 1:
            broadcast_from_first(group, model)
        device = pick_state_device(group, self.fragments, config.link)
        self._states = [OuterState(fragment, config.outer_optimizer, device) for fragment in self.fragments]
        self._exchange: Exchange | None = None
        if group is not None and self.workers > 1:
            self._exchange = Exchange(
                group,
                build_codec(config.quantization.codec),
                largest=max(state.values for state in self._states),
                device=device,
                timeout_seconds=config.link.timeout_seconds,
            )
        self._in_flight: dict[int, _InFlight] = {}
        self._background = BackgroundThread("diloco-exchange")
        self._meter = _Meter()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def step(self, weight: float = 1.0) -> None:
        """After every inner step: applies what is due, then sends what is due. `weight` is what this inner step counts in
        the mean over workers, such as its tokens."""
        self.step_count += 1
        self._weights = [total + weight for total in self._weights]
        self._raise_failures()
        if self.schedule.delay:
            self._apply_all(self.schedule.applied_at(self.step_count))
        for fragment in self.schedule.sent_at(self.step_count):
            self._send(fragment)
        if not self.schedule.delay:
            self._apply_all(self.schedule.applied_at(self.step_count))

    def drain(self) -> None:
        """Waits for everything in flight and applies it, in the order it was sent."""
        self._apply_all(list(self._in_flight))

    def _send(self, index: int) -> None:
        started = time.perf_counter()
        state = self._states[index]
        state.take_delta()
        outer_round = self.schedule.outer_round(index, self.step_count)
        flags = 0
        if is_dropped(self.config.link.drop_probability, self._seed, self.worker, index, outer_round):
            flags |= DROPPED
        header = Header(
            flags=flags,
            run=self._run,
            fragment=index,
            outer_round=outer_round,
            step=self.step_count,
            weight=self._weights[index],
            checksum=state.checksum,
        )
        self._weights[index] = 0.0
        self._in_flight[index] = _InFlight(self.step_count, self._background.submit(partial(self._run_exchange, state, header)))
        self._meter.sending_seconds += time.perf_counter() - started

    def _run_exchange(self, state: OuterState, header: Header) -> Outcome:
        """In the background: delta -> mean over workers -> next shared parameters."""
        started = time.perf_counter()
        state.finish_delta()
        norm = state.norm_of_delta()
        flags = header.flags if _is_finite(norm) else header.flags | NOT_FINITE
        weight = 0.0 if flags else header.weight
        header = Header(**{**header.__dict__, "flags": flags, "weight": weight})
        headers = [header] if self._exchange is None else self._exchange.average(state.delta, header)
        participants = sum(one.weight > 0 for one in headers)
        if participants:
            state.advance()
        else:
            state.keep()
        for worker, other in enumerate(headers):
            if other.flags & NOT_FINITE:
                logger.warning(
                    f"fragment {header.fragment}, outer round {header.outer_round}: the parameters of worker {worker} are "
                    f"not finite after its step {other.step}; it is left out of this round and takes the shared ones"
                )
        return Outcome(participants, flags, time.perf_counter() - started)

    def _apply_all(self, fragments: list[int]) -> None:
        for index in fragments:
            flight = self._in_flight.pop(index, None)
            if flight is None:
                continue  # applied early by drain()
            started = time.perf_counter()
            outcome = self._result(index, flight)
            arrived = time.perf_counter()
            self._states[index].apply(self._mixing_for(outcome))
            self._meter.applied(outcome, waiting=arrived - started, merging=time.perf_counter() - arrived)

    def _mixing_for(self, outcome: Outcome) -> float:
        """Parameters that are not finite are no use to mix with; a dropped worker keeps its own."""
        if outcome.flags & NOT_FINITE:
            return 0.0
        return 1.0 if outcome.flags & DROPPED or not outcome.participants else self._mixing

    def _raise_failures(self) -> None:
        """A failed exchange ends the run at the next step, not only when its result is due."""
        for index, flight in self._in_flight.items():
            if flight.outcome.done() and flight.outcome.exception() is not None:
                self._result(index, flight)

    def _result(self, index: int, flight: _InFlight) -> Outcome:
        try:
            return flight.outcome.result()
        except WorkerLostError as error:
            where = f"fragment {index} ({self.fragments[index].name}), sent after step {flight.step}"
            raise WorkerLostError(
                error.workers, f"{error.reason}; seen by worker {self.worker} in the exchange of {where}"
            ) from error

    # --- the shared model -------------------------------------------------------------------------------------------

    def global_state_dict(self) -> dict[str, Tensor]:
        """The shared (outer) parameters in fp32, frozen parameters and buffers as they are, under the model's own names.
        Sharded parameters stay sharded."""
        _drop_gathered(self._model)
        runs: dict[nn.Parameter, dict[int, Tensor]] = {}
        for state in self._states:
            for part, view in zip(state.fragment.parts, state.views(state.outer), strict=True):
                runs.setdefault(part.parameter, {})[part.run] = view
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        result: dict[str, Tensor] = {}
        for name, value in self._model.state_dict().items():
            parameter = parameters.get(name)
            if parameter is None or parameter not in runs:
                result[name] = value.detach().clone()
            else:
                rows = runs[parameter]
                result[name] = _shaped_like(parameter, torch.cat([rows[run] for run in range(len(rows))]))
        return result

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """The model holds the shared parameters inside; the local ones come back at the end."""
        _drop_gathered(self._model)
        saved = [[part.local().clone() for part in state.fragment.parts] for state in self._states]
        for state in self._states:
            state.write_model()
        try:
            yield
        finally:
            _drop_gathered(self._model)
            with torch.no_grad():
                for state, locals_before in zip(self._states, saved, strict=True):
                    for part, before in zip(state.fragment.parts, locals_before, strict=True):
                        part.local().copy_(before)

    # --- restart ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a restart needs beside the model and the inner optimizer. Fragments in flight are waited for, not
        applied: what came back for them is part of the state."""
        fragments = []
        for index, state in enumerate(self._states):
            flight = self._in_flight.get(index)
            outcome = None if flight is None else self._result(index, flight)
            fragments.append(
                {
                    "outer": state.outer.clone(),
                    "slots": [slot.clone() for slot in state.slots],
                    "rounds": state.rounds,
                    "checksum": state.checksum,
                    "weight": self._weights[index],
                    "in_flight": None if flight is None else {"step": flight.step, "next": state.delta.clone()},
                    "outcome": None if outcome is None else dict(outcome.__dict__),
                }
            )
        order = list(self._in_flight)
        return {"step": self.step_count, "fragments": fragments, "in_flight_order": order}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        saved = copy.copy(saved)
        sizes = [entry["outer"].numel() for entry in saved["fragments"]]
        mine = [state.values for state in self._states]
        if sizes != mine:
            raise ValueError(
                f"the saved outer state has fragments of {sizes} values on this rank, the model and diloco.fragments now "
                f"give {mine}: resume with the fragments and ranks it was saved with"
            )
        self.step_count = saved["step"]
        self._in_flight.clear()
        for index, (state, entry) in enumerate(zip(self._states, saved["fragments"], strict=True)):
            state.load(entry["outer"], entry["slots"], entry["rounds"], entry["checksum"])
            self._weights[index] = entry["weight"]
        for index in saved["in_flight_order"]:
            entry = saved["fragments"][index]
            self._states[index].load_next(entry["in_flight"]["next"])
            future: Future[Outcome] = Future()
            future.set_result(Outcome(**entry["outcome"]))
            self._in_flight[index] = _InFlight(entry["in_flight"]["step"], future)

    # --- what happened ----------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Since the last call. Seconds and bytes are this rank's; `exposed` is what the training thread spent or waited,
        `exchange` what went on in the background meanwhile."""
        traffic = Traffic() if self._exchange is None else self._exchange.take_traffic()
        return self._meter.take(traffic)

    @property
    def state_bytes(self) -> int:
        """Memory of this rank's shared parameters, optimizer buffers and deltas."""
        return sum(state.bytes for state in self._states)

    def table(self) -> str:
        """The fragments and when they have their turn."""
        return fragment_table(self.fragments, map(self.schedule.offset, range(len(self.fragments))))


class _Meter:
    def __init__(self) -> None:
        self.sending_seconds = 0.0
        self._waiting = self._merging = self._background = 0.0
        self._participants: list[int] = []

    def applied(self, outcome: Outcome, *, waiting: float, merging: float) -> None:
        self._waiting += waiting
        self._merging += merging
        self._background += outcome.seconds
        self._participants.append(outcome.participants)

    def take(self, traffic: Traffic) -> dict[str, float]:
        result = {
            "diloco/fragments_applied": float(len(self._participants)),
            "diloco/participants": float(sum(self._participants)),
            "diloco/exposed_seconds": self.sending_seconds + self._waiting + self._merging,
            "diloco/exposed_waiting_seconds": self._waiting,
            "diloco/exchange_seconds": self._background,
            "diloco/coding_seconds": traffic.coding_seconds,
            "diloco/transfer_waiting_seconds": traffic.waiting_seconds,
            "diloco/sent_bytes": float(traffic.bytes_sent),
            "diloco/received_bytes": float(traffic.bytes_received),
        }
        self.__init__()  # type: ignore[misc]
        return result


def _is_finite(norm: float) -> bool:
    return norm - norm == 0.0


def _shaped_like(parameter: nn.Parameter, flat: Tensor) -> Tensor:
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return flat.view(value.shape)
    return DTensor.from_local(
        flat.view(value.to_local().shape).to(value.device),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _drop_gathered(model: nn.Module) -> None:
    """FSDP2 may keep full parameters after a forward pass without a backward pass: they hide the sharded ones, and must
    not outlive a change of those."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
