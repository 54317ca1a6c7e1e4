"""The workers of one job: a fixed schedule, and an exchange of deltas over a gloo group."""

import math
import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.diloco import healing, startup
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.peers import Apply, Peers, Send, local_share
from torchtitan_diloco.diloco.round import InFlight, Round, Traffic
from torchtitan_diloco.diloco.schedule import is_dropped, is_measured
from torchtitan_diloco.diloco.state_dict import Facts, SavedState
from torchtitan_diloco.diloco.transport import Header
from torchtitan_diloco.diloco.vitals import DROPPED, WENT_WRONG, Report
from torchtitan_diloco.log import UserError


class GlooPeers(Peers):
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        shard_group: dist.ProcessGroup | None = None,
        liveness: Liveness | None = None,
        total_steps: int = 0,
        seed: int = 0,
    ) -> None:
        """The arguments are those of `StreamingDiLoCo`."""
        self._group, self._shard_group, self._liveness = group, shard_group, liveness
        self._total_steps, self._seed = total_steps, seed
        self.in_flight: dict[int, InFlight] = {}
        """By fragment, in the order of their sends."""

    # --- start and end ----------------------------------------------------------------------------

    def check_settings(self, config: DiLoCoConfig) -> DiLoCoConfig:
        startup.check_settings(self.model, self._group, config, self._total_steps)
        if self._group is not None:
            self.workers, self.worker = self._group.size(), self._group.rank()
        return replace(config, beginning=config.beginning.in_steps(self._total_steps))

    def agree(self, device: torch.device) -> None:
        self._run = startup.agree_on_run(
            self._group, self.config, self.fragments, device, self._total_steps, seed=self._seed
        )
        startup.broadcast_from_first(self._group, self.model)

    def open(self) -> None:
        watching = self._liveness or Liveness.between(self._group)
        own, self._watching = self._liveness is None, watching
        self._watch = healing.Watch(self.workers, len(self.states))
        self._weights, self._last = [0.0] * len(self.states), Traffic()
        self._reports = dict[str, Report]()
        whole = sum(state.values for state in self.states)
        hops = 1.0 if self.workers < 3 else 2 / self.workers  # of slices
        self._bytes = hops * build_codec(self.config.quantization).wire_bytes(whole)
        self._exchanger = startup.build_exchange(self._group, self.config, self.states)
        self._finalizer = weakref.finalize(
            self, startup.close, self.background, self._exchanger, watching, own
        )

    def close(self) -> None:
        self._finalizer()

    # --- training thread --------------------------------------------------------------------------

    def check_weight(self, weight: float) -> None:
        if not 0 <= weight < math.inf:
            raise UserError(f"the weight of a step is {weight}: give a number from 0 up")

    def due(self, weight: float) -> Iterator[Send | Apply]:
        self._watching.step_done(self.step)
        self._weights = [before + weight for before in self._weights]
        self.check()
        applied = self.schedule.applied_at(self.step)
        yield from self._arrived(applied)
        for index in self.schedule.sent_at(self.step):
            number, values = self.schedule.outer_round(index, self.step), self.states[index].values
            now = time.perf_counter()
            round_ = Round(index, number, self.step, values, weight=self._weights[index], due=now)
            yield Send(round_)
            self._weights[index] = 0.0
            exchanged = self.background.submit(partial(self._exchange, round_))
            self.in_flight[index] = round_, exchanged
        yield from self._arrived(applied)  # those that were just sent and have no delay

    def rest(self) -> Iterator[Send | Apply]:
        yield from self._arrived(list(self.in_flight))

    def _arrived(self, fragments: Collection[int]) -> Iterator[Apply]:
        """Wait for these fragments if they are in flight, in the order of their sends."""
        for index in [one for one in self.in_flight if one in fragments]:
            round_, exchanged = self.in_flight[index]
            round_.asked = time.perf_counter()
            self._wait(round_, exchanged)
            del self.in_flight[index]
            round_.fetched = time.perf_counter()
            average = self.schedule.is_average(round_.sent_step)
            usual = 0.0 if average else self.config.overlap.mixing_at(self.progress)
            share = local_share(usual, round_.flags, round_.participants)
            copy, resets = self.states[index].delta, bool(round_.flags & WENT_WRONG)
            yield Apply(round_, copy, share=share, resets=resets)

    def check(self) -> None:
        self._watching.check(f"seen by worker {self.worker} after its step {self.step}")
        for round_, exchanged in self.in_flight.values():
            if exchanged.done() and exchanged.exception() is not None:
                self._wait(round_, exchanged)

    def _wait(self, round_: Round, exchanged: "Future[None]") -> None:
        index, step = round_.fragment, round_.sent_step
        name = self.states[index].fragment.name
        where = f"in the exchange of fragment {index} ({name}), sent after step {step}"
        self._watching.wait(
            exchanged, step, f"seen by worker {self.worker} {where}", self._describe_late
        )

    def _describe_late(self) -> str:
        """Describe the workers that are waited for, from what they have said before."""
        late, lines = self._exchanger.late() if self._exchanger else {}, list[str]()
        missing = dict[str, Report]()
        for worker, (why, what) in late.items():
            said = self._reports.get(f"worker {worker}", Report())
            usual = f", whose steps took {said.vitals.step:.3g} s" if said.vitals.step else ""
            lines.append(f"worker {worker}{usual}: {what}")
            if why:
                missing[f"worker {worker}"] = said._replace(absent=why, evidence=what)
        self.miss(missing)
        return " and for ".join(lines)

    def forget(self, fragment: int) -> None:
        self._weights[fragment] = 0.0

    def reports(self) -> Mapping[str, Report]:
        return self._reports

    @property
    def progress(self) -> float:
        return self.step / self._total_steps if self._total_steps else 0.0

    # --- background thread ------------------------------------------------------------------------

    def _exchange(self, round_: Round) -> None:
        """Turn this worker's delta into the next shared copy."""
        round_.begun, state = time.perf_counter(), self.states[round_.fragment]
        turn, step = (round_.fragment, round_.outer_round), round_.sent_step
        measured = is_measured(round_.outer_round, self.config.measure_every)
        average = self.schedule.is_average(step)
        dropped = is_dropped(self.config.link.drop_probability, self._seed, self.worker, *turn)
        with state.background():
            round_.delta_square = state.finish_delta()
            whole = healing.sum_over_ranks(round_.delta_square, self._shard_group, self.worker)
            norms = healing.DeltaNorms() if average else state.norms  # other lengths: not judged
            flags = dropped * DROPPED | norms.judge(whole, self.config.delta_norm_limit)
            about = flags, self._run, *turn, step, round_.weight, state.checksum
            header = Header(*about, self._last.with_transfers(self.vitals(), self._bytes))
            if self._exchanger is None:
                headers = healing.settle_weights([header])
            else:
                headers, round_.traffic = self._exchanger.average(
                    state.delta, header, measured=measured
                )
        self._last = round_.traffic
        self._reports = {
            f"worker {worker}": Report(one.vitals, one.flags) for worker, one in enumerate(headers)
        }
        round_.weight, round_.flags = headers[self.worker].weight, headers[self.worker].flags
        round_.participants = sum(one.weight > 0 for one in headers)
        with state.background():
            if round_.participants:
                round_.mean_square = state.advance(average=average, measured=measured)
            else:
                state.keep()
        round_.ready = time.perf_counter()
        self._watch.note(headers, self.config.delta_norm_limit)

    # --- restart ----------------------------------------------------------------------------------

    def save(self, facts: Facts, mesh: DeviceMesh | None) -> SavedState:
        started = time.perf_counter()
        for round_, exchanged in self.in_flight.values():
            self._wait(round_, exchanged)
        self.meter.waited(time.perf_counter() - started)
        rounds = {index: round_ for index, (round_, _) in self.in_flight.items()}
        facts["in_flight"] = list(rounds)
        return saving.save(self.states, self._weights, rounds, facts, mesh)

    def load(self, saved: SavedState) -> list[str]:
        share = partial(local_share, self.config.overlap.mixing_at(self.progress))
        facts, in_flight, notes = saving.load(self.states, saved, self.config, share)
        self._weights = [record["weight"] for record in facts]
        for index in in_flight:
            number = self.schedule.outer_round(index, facts[index]["sent_step"])
            round_ = Round.loaded(index, number, self.states[index].values, facts[index])
            self.in_flight[index] = round_, self.background.submit(lambda: None)
        return notes

    def restart(self) -> None:
        self._watching.wait(self.background.submit(lambda: None))
        self.in_flight.clear()
        self._weights = [0.0] * len(self.states)
