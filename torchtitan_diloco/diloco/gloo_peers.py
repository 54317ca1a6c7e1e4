"""The workers of one job: a fixed schedule, and an exchange of deltas over a gloo group."""

import hashlib
import secrets
import time
import weakref
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.base.messages import broadcast_object
from torchtitan_diloco.base.settings import check_class, flat_settings, raise_mistakes
from torchtitan_diloco.base.tensors import local_of
from torchtitan_diloco.diloco import arithmetic, delta_norms
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.agreement import agree, check_group, check_model
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import MAY_DIFFER, DiLoCoConfig, diloco_mistakes
from torchtitan_diloco.diloco.exchange import Exchange, bytes_from_each
from torchtitan_diloco.diloco.first_weights import take_from_first_worker
from torchtitan_diloco.diloco.flags import DROPPED, WENT_WRONG
from torchtitan_diloco.diloco.fragments import describe_layout
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.peers import Apply, Peers, Send, close, local_share
from torchtitan_diloco.diloco.round import InFlight, Round
from torchtitan_diloco.diloco.schedule import is_dropped, is_measured
from torchtitan_diloco.diloco.state_dict import OuterFacts, SavedState
from torchtitan_diloco.diloco.transport import Header
from torchtitan_diloco.diloco.witness import GlooWitness


class GlooPeers(Peers):
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        shard_group: dist.ProcessGroup | None = None,
        witness: GlooWitness | None = None,
        total_steps: int = 0,
        seed: int = 0,
        streams: int = 1,
    ) -> None:
        """
        Args:
            group, shard_group, total_steps, seed: as in `StreamingDiLoCo`.
            witness: with the liveness of all workers. Default: a new one, whose liveness has a gloo
                group of its own.
            streams: TCP connections that the group has to each other worker.
        """
        self._group = group
        self._shard_group = shard_group
        self._given_witness = witness
        self._streams = streams
        self._total_steps = total_steps
        self._seed = seed
        self.in_flight: dict[int, InFlight] = {}
        """Exchanges in flight by fragment, in the order of their sends."""

    # --- start and end ----------------------------------------------------------------------------

    def check_settings(self, config: DiLoCoConfig) -> DiLoCoConfig:
        group = self._group
        check_group(group)
        check_class(config, "diloco", DiLoCoConfig)
        if group is not None:
            self.workers = group.size()
            self.worker = group.rank()
        mistakes = list(diloco_mistakes(config))
        if config.method == "none":
            mistakes.append(("diloco.method", '"none" needs no StreamingDiLoCo: do not build one'))
        needs_length = {
            "diloco.overlap.mixing_end": config.overlap.mixing_end is not None,
            "diloco.beginning.length": 0 < config.beginning.length < 1,
        }
        reason = (
            "needs the length of the run: pass total_steps to StreamingDiLoCo, "
            "or remove this setting"
        )
        given = [key for key, is_set in needs_length.items() if is_set and not self._total_steps]
        mistakes += [(key, reason) for key in given]
        if config.workers not in (1, self.workers):
            reason = f"must be {self.workers}, the size of the group: change it, or remove it"
            mistakes.append(("diloco.workers", reason))
        if self.workers > 1 and "cpu:gloo" not in str(dist.get_backend_config(group)).split(","):
            reason = 'cannot send from host memory: pass dist.new_group(ranks, backend="gloo")'
            mistakes.append(("group", reason))
        raise_mistakes(mistakes, diloco=config)
        check_model(self.model, group)
        return replace(config, beginning=config.beginning.in_steps(self._total_steps))

    def agree(self, device: torch.device) -> None:
        config = self.config
        parts = [part for fragment in self.fragments for part in fragment.parts]
        codec = config.quantization.codec
        optimizer = config.outer_optimizer.name
        # Where the model is, as a CPU is slow; but fp32 is sent as it is.
        self._coder = device if codec == "fp32" else parts[0].local().device
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        shapes = [f"{name} {tuple(local_of(value).shape)} {value.dtype}" for name, value in tensors]
        layout = describe_layout(self.fragments) + shapes
        settings = flat_settings(config, "diloco.")
        mine = {key: str(value) for key, value in settings.items() if key not in MAY_DIFFER}
        mine |= {
            "total_steps": str(self._total_steps),
            "seed": str(self._seed),
            "model": hashlib.sha256("\n".join(layout).encode()).hexdigest()[:16],
            # Determines the size of messages.
            "device that encodes (run.device, diloco.link.outer_state)": self._coder.type,
        }
        results = arithmetic.Results()
        if self._group is not None:
            results |= arithmetic.compute(codec, self._coder)
            results |= arithmetic.compute(optimizer, device)
        agree(mine, self._group, "worker", results=results)
        # Worker 0's random part distinguishes two runs of one configuration.
        token = broadcast_object(secrets.token_hex(8), str, self._group)
        name = "/".join([*mine.values(), token])
        self._run = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        take_from_first_worker(self.model, self._group, config.link.timeout_seconds)

    def prepare_to_send(self) -> None:
        link = self.config.link
        codec = build_codec(self.config.quantization)
        self._witness = self._given_witness or GlooWitness(Liveness.between(self._group))
        self._liveness = self._witness.liveness
        self._left_out = delta_norms.LeftOut(self.workers, len(self.states))
        self._weights = [0.0] * len(self.states)
        sizes = [state.values for state in self.states]
        self._exchanger: Exchange | None = None
        if self._group is not None and self.workers > 1:
            self._exchanger = Exchange(
                self._group,
                codec,
                largest=max(sizes),
                device=self._coder,
                timeout_seconds=link.timeout_seconds,
                streams=self._streams,
            )
            if self._coder.type == "cuda":
                self._exchanger.warm_up(sizes)
            self._witness.look_at(
                self._exchanger.transport,
                cycle_bytes=bytes_from_each(sum(sizes), self.workers, codec),
            )
        self._finalizer = weakref.finalize(
            self,
            close,
            self.background,
            self._exchanger,
            self._liveness,
            owns_liveness=self._given_witness is None,
        )

    def close(self) -> None:
        self._finalizer()

    @property
    def witness(self) -> GlooWitness:
        return self._witness

    # --- training thread --------------------------------------------------------------------------

    def due_tasks(self, weight: float, reset: Collection[int]) -> Iterator[Send | Apply]:
        self.step += 1
        self._liveness.finish_step(self.step)
        for index in reset:
            self._weights[index] = 0.0
        self._weights = [before + weight for before in self._weights]
        self.check()
        applied = self.schedule.applied_at(self.step)
        yield from self._arrived(applied)
        for index in self.schedule.sent_at(self.step):
            round_ = Round(
                index,
                outer_round=self.schedule.outer_round(index, self.step),
                sent_step=self.step,
                values=self.states[index].values,
                weight=self._weights[index],
                due=time.perf_counter(),
            )
            yield Send(round_)
            self._weights[index] = 0.0
            exchanged = self.background.submit(partial(self._exchange, round_))
            self.in_flight[index] = round_, exchanged
        yield from self._arrived(applied)  # those that were just sent and have no delay

    def remaining_tasks(self) -> Iterator[Send | Apply]:
        yield from self._arrived(list(self.in_flight))

    def _arrived(self, fragments: Collection[int]) -> Iterator[Apply]:
        """Wait for these fragments if they are in flight, in the order of their sends."""
        for index in [sent for sent in self.in_flight if sent in fragments]:
            round_, exchanged = self.in_flight[index]
            round_.asked = time.perf_counter()
            self._wait(round_, exchanged)
            del self.in_flight[index]
            round_.fetched = time.perf_counter()
            average = self.schedule.is_average(round_.sent_step)
            usual = 0.0 if average else self.config.overlap.mixing_at(self.progress)
            share = local_share(usual, round_.flags, round_.participants)
            state = self.states[index]
            mode = Mode.MIX
            if round_.flags & WENT_WRONG:
                mode = Mode.RESET
            elif state.sent is not None and share < 1:
                mode = Mode.TAKE_BACK
            yield Apply(round_, state.delta, mode, share)

    def check(self) -> None:
        self._liveness.check(f"seen by worker {self.worker} after its step {self.step}")
        for round_, exchanged in self.in_flight.values():
            if exchanged.done() and exchanged.exception() is not None:
                self._wait(round_, exchanged)

    def _wait(self, round_: Round, exchanged: "Future[None]") -> None:
        index = round_.fragment
        step = round_.sent_step
        name = self.states[index].fragment.name
        where = f"in the exchange of fragment {index} ({name}), sent after step {step}"
        where = f"seen by worker {self.worker} {where}"
        self._liveness.wait(exchanged, step, where=where, onlooker=self._witness)

    @property
    def progress(self) -> float:
        return self.step / self._total_steps if self._total_steps else 0.0

    # --- background thread ------------------------------------------------------------------------

    def _exchange(self, round_: Round) -> None:
        """Turn this worker's delta into the next shared copy."""
        round_.begun = time.perf_counter()
        state = self.states[round_.fragment]
        measured = is_measured(round_.outer_round, self.config.measure_every)
        average = self.schedule.is_average(round_.sent_step)
        dropped = is_dropped(
            self.config.link.drop_probability,
            seed=self._seed,
            worker=self.worker,
            fragment=round_.fragment,
            outer_round=round_.outer_round,
        )
        with state.background():
            round_.delta_square = state.finish_delta()
            whole = delta_norms.sum_over_ranks(round_.delta_square, self._shard_group, self.worker)
            # In the beginning, rounds have another length, so their norms are not comparable.
            norms = delta_norms.DeltaNorms() if average else state.norms
            flags = norms.judge(whole, self.config.delta_norm_limit)
            if dropped:
                flags |= DROPPED
            header = Header(
                flags=flags,
                run=self._run,
                fragment=round_.fragment,
                outer_round=round_.outer_round,
                step=round_.sent_step,
                weight=round_.weight,
                checksum=state.checksum,
                vitals=self._witness.measured_vitals(),
            )
            if self._exchanger is None:
                headers = delta_norms.settle_weights([header])
            else:
                headers, round_.traffic = self._exchanger.average(
                    state.delta, header, measured=measured
                )
        self._witness.note_round(headers, round_.traffic)
        round_.weight = headers[self.worker].weight
        round_.flags = headers[self.worker].flags
        round_.participants = sum(header.weight > 0 for header in headers)
        with state.background():
            if round_.participants:
                round_.mean_square = state.advance(average=average, measured=measured)
            else:
                state.keep_copy()
        round_.ready = time.perf_counter()
        self._left_out.note(headers, self.config.delta_norm_limit)

    # --- restart ----------------------------------------------------------------------------------

    def save(self, facts: OuterFacts, mesh: DeviceMesh | None) -> SavedState:
        started = time.perf_counter()
        for round_, exchanged in self.in_flight.values():
            self._wait(round_, exchanged)
        self.meter.waited(time.perf_counter() - started)
        rounds = {index: round_ for index, (round_, _) in self.in_flight.items()}
        return saving.save(self.states, self._weights, in_flight=rounds, facts=facts, mesh=mesh)

    def load(self, saved: SavedState) -> list[str]:
        share = partial(local_share, self.config.overlap.mixing_at(self.progress))
        facts, in_flight, notes = saving.load(self.states, saved, self.config, mixing=share)
        self._weights = [fragment.weight for fragment in facts]
        for index in in_flight:
            fragment = facts[index]
            round_ = Round.loaded(
                index,
                self.schedule.outer_round(index, fragment.sent_step),
                self.states[index].values,
                sent_step=fragment.sent_step,
                participants=fragment.participants,
                flags=fragment.flags,
            )
            self.in_flight[index] = round_, self.background.submit(lambda: None)
        return notes

    def restart(self) -> None:
        self._liveness.wait(self.background.submit(lambda: None), onlooker=self._witness)
        self.in_flight.clear()
        self._weights = [0.0] * len(self.states)
