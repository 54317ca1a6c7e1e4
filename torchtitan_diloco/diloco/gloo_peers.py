"""The workers of one job: a fixed schedule, and an exchange of deltas over a gloo group."""

import hashlib
import math
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.base.background import BackgroundThread
from torchtitan_diloco.base.messages import broadcast_object
from torchtitan_diloco.base.settings import check_class, flat_settings, raise_mistakes
from torchtitan_diloco.base.tensors import drop_gathered, local_of
from torchtitan_diloco.diloco import arithmetic, delta_norms
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.agreement import agree, check_group, check_model, check_shards
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import MAY_DIFFER, DiLoCoConfig, Link, diloco_mistakes
from torchtitan_diloco.diloco.exchange import Exchange, bytes_from_each
from torchtitan_diloco.diloco.first_weights import take_from_first_worker
from torchtitan_diloco.diloco.flags import DROPPED
from torchtitan_diloco.diloco.fragments import Fragment, build_fragments, describe_layout
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.loop import Loop
from torchtitan_diloco.diloco.outer_state import build_states, mode_after, pick_state_device
from torchtitan_diloco.diloco.peers import Peers, end_thread
from torchtitan_diloco.diloco.reports import GlooReports
from torchtitan_diloco.diloco.round import InFlight, Round
from torchtitan_diloco.diloco.schedule import is_dropped, is_measured
from torchtitan_diloco.diloco.state_dict import OuterFacts, SavedState
from torchtitan_diloco.diloco.transport import Header


class GlooPeers(Peers):
    reports: GlooReports
    _loop: Loop

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        shard_group: dist.ProcessGroup | None = None,
        reports: GlooReports | None = None,
        total_steps: int = 0,
        scheduled_step: Callable[[int], float] = int,
        step_at: Callable[[float], int] = int,
        seed: int = 0,
        streams: int | None = None,
    ) -> None:
        """Keep the arguments until `start`.

        Args:
            group, shard_group, total_steps, seed: as in `StreamingDiLoCo`.
            reports: with the liveness of all workers. Default: new ones, whose liveness has a gloo
                group of its own.
            scheduled_step: returns the place of a step in a run of `total_steps` steps, for what
                changes with the progress of the run. Default: the step itself.
            step_at: returns the last step with at most this place.
            streams: TCP connections that the group has to each other worker. Default: 1, of a
                group that was made without `link.interface` and `link.streams`, which must not be
                set then.
        """
        self._group = group
        self._shard_group = shard_group
        self._given_reports = reports
        self._streams = streams or 1
        self._is_made_elsewhere = streams is None
        self._total_steps = total_steps
        self._scheduled_step = scheduled_step
        self._step_at = step_at
        self._seed = seed
        self._in_flight: dict[int, InFlight] = {}
        """Exchanges in flight by fragment, in the order of their sends."""

    # --- start and end ----------------------------------------------------------------------------

    def start(
        self, model: nn.Module, config: DiLoCoConfig, optimizer: torch.optim.Optimizer | None = None
    ) -> Loop:
        if hasattr(self, "_loop"):
            raise RuntimeError("these peers already belong to an outer loop: create new ones")
        config = self._checked(config)
        check_model(model, self._group)
        check_shards(model, self._shard_group, "shard_group to StreamingDiLoCo")
        drop_gathered(model)
        fragments = build_fragments(model, config.fragments)
        coder = self._agree(model, fragments, config)
        take_from_first_worker(model, self._group, config.link.timeout_seconds)
        states = build_states(fragments, config)
        self._loop = Loop(model, config, fragments, states, optimizer)
        self._prepare_to_send(coder)
        return self._loop

    def _checked(self, config: DiLoCoConfig) -> DiLoCoConfig:
        """Raise an error for settings that do not fit, and return the settings to train with."""
        group = self._group
        check_group(group)
        check_class(config, "diloco", DiLoCoConfig)
        workers = 1 if group is None else group.size()
        mistakes = list(diloco_mistakes(config))
        if config.method == "none":
            mistakes.append(("diloco.method", '"none" needs no StreamingDiLoCo: do not build one'))
        needs_length = {
            "diloco.overlap.mixing_end": config.overlap.mixing_end is not None,
            "diloco.beginning.length": 0 < config.beginning.length < 1,
            "diloco.outer_optimizer.warmup": 0 < config.outer_optimizer.warmup < 1,
        }
        reason = (
            "needs the length of the run: pass total_steps to StreamingDiLoCo, "
            "or remove this setting"
        )
        given = [key for key, is_set in needs_length.items() if is_set and not self._total_steps]
        mistakes += [(key, reason) for key in given]
        if config.workers not in (1, workers):
            reason = f"must be {workers}, the size of the group: change it, or remove it"
            mistakes.append(("diloco.workers", reason))
        if workers > 1 and self._is_made_elsewhere:
            mistakes += link_mistakes(config.link)
        if workers > 1 and "cpu:gloo" not in str(dist.get_backend_config(group)).split(","):
            reason = 'cannot send from host memory: pass dist.new_group(ranks, backend="gloo")'
            mistakes.append(("group", reason))
        raise_mistakes(mistakes, diloco=config)
        return config.in_steps(self._total_steps, self._step_at)

    def _agree(
        self, model: nn.Module, fragments: Sequence[Fragment], config: DiLoCoConfig
    ) -> torch.device:
        """Raise an error if workers differ. Return the device on which deltas are encoded."""
        codec = config.quantization.codec
        optimizer = config.outer_optimizer.name
        device = pick_state_device(fragments, config)
        # Where the model is, as a CPU is slow; but fp32 is sent as it is.
        coder = device if codec == "fp32" else fragments[0].parts[0].local().device
        tensors = (*model.named_parameters(), *model.named_buffers())
        shapes = [f"{name} {tuple(local_of(value).shape)} {value.dtype}" for name, value in tensors]
        layout = describe_layout(fragments) + shapes
        settings = flat_settings(config, "diloco.")
        mine = {key: str(value) for key, value in settings.items() if key not in MAY_DIFFER}
        mine |= {
            "total_steps": str(self._total_steps),
            "seed": str(self._seed),
            "model": hashlib.sha256("\n".join(layout).encode()).hexdigest()[:16],
            # Determines the size of messages.
            "device that encodes (run.device, diloco.link.outer_state)": coder.type,
        }
        results = arithmetic.Results()
        if self._group is not None:
            results |= arithmetic.compute(codec, coder)
            results |= arithmetic.compute(optimizer, device)
        agree(mine, self._group, "worker", results=results)
        # Worker 0's random part distinguishes two runs of one configuration.
        token = broadcast_object(secrets.token_hex(8), str, self._group)
        name = "/".join([*mine.values(), token])
        self._run = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        return coder

    def _prepare_to_send(self, coder: torch.device) -> None:
        """Build the codec, the reports and the exchange. `coder`: device on which deltas are
        encoded."""
        loop = self._loop
        link = loop.config.link
        codec = build_codec(loop.config.quantization)
        self.reports = self._given_reports or GlooReports(Liveness.between(self._group))
        self.reports.in_flight = self._in_flight.keys()
        if self._group is not None:
            self.reports.workers = self._group.size()
            self.reports.worker = self._group.rank()
        self._liveness = self.reports.liveness
        self._left_out = delta_norms.LeftOut(self.reports.workers, len(loop.states))
        self._weights = [0.0] * len(loop.states)
        sizes = [state.values for state in loop.states]
        self._exchanger: Exchange | None = None
        if self._group is not None and self.reports.workers > 1:
            self._exchanger = Exchange(
                self._group,
                codec,
                largest=max(sizes),
                device=coder,
                timeout_seconds=link.timeout_seconds,
                streams=self._streams,
            )
            if coder.type == "cuda":
                self._exchanger.warm_up(sizes)
            self.reports.observe(
                self._exchanger.transport,
                cycle_bytes=bytes_from_each(sum(sizes), self.reports.workers, codec),
            )
        self._finalizer = weakref.finalize(
            self,
            _close,
            loop.background,
            self._exchanger,
            self._liveness,
            owns_liveness=self._given_reports is None,
        )

    def close(self) -> None:
        self._finalizer()

    # --- training thread --------------------------------------------------------------------------

    def due(self, weight: float, reset: Collection[int]) -> None:
        loop = self._loop
        self._note_progress()
        self._liveness.finish_step(loop.step)
        self._note_reset(reset)
        for index in reset:
            self._weights[index] = 0.0
        self._weights = [before + weight for before in self._weights]
        self.check()
        applied = loop.schedule.applied_at(loop.step)
        self._apply_in_flight(applied)
        for index in loop.schedule.sent_at(loop.step):
            self._send(index)
        self._apply_in_flight(applied)  # those that were just sent and have no delay

    def rest(self) -> None:
        self._note_reset(self._loop.reset)
        self._apply_in_flight(list(self._in_flight))

    def _note_progress(self) -> None:
        if self._total_steps:
            self.reports.progress = self._scheduled_step(self._loop.step) / self._total_steps

    def _note_reset(self, reset: Collection[int]) -> None:
        """Note which fragments in flight no longer have in the model what they have sent, as they
        were reset since then."""
        for index, (round_, _) in self._in_flight.items():
            if index in reset:
                round_.is_in_model = False

    def _send(self, index: int) -> None:
        """Take the delta of a fragment, and start its exchange."""
        loop = self._loop
        round_ = Round(
            index,
            outer_round=loop.schedule.outer_round(index, loop.step),
            sent_step=loop.step,
            weight=self._weights[index],
            due=time.perf_counter(),
        )
        loop.take(round_)
        self._weights[index] = 0.0
        exchanged = loop.background.submit(partial(self._exchange, round_))
        self._in_flight[index] = round_, exchanged

    def _apply_in_flight(self, fragments: Collection[int]) -> None:
        """Wait for these fragments if they are in flight, and apply them in the order of their
        sends."""
        loop = self._loop
        for index in [sent for sent in self._in_flight if sent in fragments]:
            round_, exchanged = self._in_flight[index]
            round_.asked = time.perf_counter()
            self._wait(round_, exchanged)
            del self._in_flight[index]
            round_.fetched = time.perf_counter()
            mixing = loop.config.overlap.mixing_at(self.reports.progress)
            if loop.schedule.is_average(round_.sent_step):
                mixing = 0.0
            state = loop.states[index]
            mode, share = mode_after(
                round_.flags,
                participants=round_.participants,
                mixing=mixing,
                is_sparse=state.sent is not None,
                is_in_model=round_.is_in_model,
            )
            loop.apply(round_, state.delta, mode, share)

    def check(self) -> None:
        self._liveness.check(
            f"seen by worker {self.reports.worker} after its step {self._loop.step}"
        )
        for round_, exchanged in self._in_flight.values():
            if exchanged.done() and exchanged.exception() is not None:
                self._wait(round_, exchanged)

    def _wait(self, round_: Round, exchanged: "Future[None]") -> None:
        index = round_.fragment
        step = round_.sent_step
        name = self._loop.fragments[index].name
        where = f"in the exchange of fragment {index} ({name}), sent after step {step}"
        where = f"seen by worker {self.reports.worker} {where}"
        self._liveness.wait(exchanged, step, where=where, onlooker=self.reports.waiting)

    # --- background thread ------------------------------------------------------------------------

    def _exchange(self, round_: Round) -> None:
        """Turn this worker's delta into the next shared copy."""
        round_.begun = time.perf_counter()
        loop = self._loop
        worker = self.reports.worker
        state = loop.states[round_.fragment]
        measured = is_measured(round_.outer_round, loop.config.measure_every)
        average = loop.schedule.is_average(round_.sent_step)
        dropped = is_dropped(
            loop.config.link.drop_probability,
            seed=self._seed,
            worker=worker,
            fragment=round_.fragment,
            outer_round=round_.outer_round,
        )
        with state.background():
            square = state.finish_delta()
            round_.numbers["round/delta_norm"] = math.sqrt(square)
            whole = delta_norms.sum_over_ranks(square, self._shard_group, worker)
            # In the beginning, rounds have another length, so their norms are not comparable.
            norms = delta_norms.DeltaNorms() if average else state.norms
            flags = norms.judge(whole, loop.config.delta_norm_limit)
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
                vitals=self.reports.measured_vitals(),
            )
            if self._exchanger is None:
                headers = delta_norms.settle_weights([header])
            else:
                headers, round_.traffic = self._exchanger.average(
                    state.delta, header, measured=measured
                )
        self.reports.note_round(headers, round_.traffic)
        round_.weight = headers[worker].weight
        round_.flags = headers[worker].flags
        round_.participants = sum(header.weight > 0 for header in headers)
        lr = None if average else self._outer_lr(round_.sent_step)
        with state.background():
            if round_.participants:
                round_.numbers |= state.advance(lr, measured=measured)
            else:
                state.keep_copy()
        round_.ready = time.perf_counter()
        self._left_out.note(headers, loop.config.delta_norm_limit)

    def _outer_lr(self, step: int) -> float:
        """Return the outer learning rate for deltas that are taken after this step, which is past
        the beginning."""
        config = self._loop.config
        begun = self._scheduled_step(int(config.beginning.length))
        return config.outer_optimizer.lr_after(self._scheduled_step(step) - begun)

    # --- restart ----------------------------------------------------------------------------------

    def save(self, facts: OuterFacts, mesh: DeviceMesh | None) -> SavedState:
        loop = self._loop
        self._note_reset(loop.reset)
        started = time.perf_counter()
        for round_, exchanged in self._in_flight.values():
            self._wait(round_, exchanged)
        loop.meter.waited(time.perf_counter() - started)
        rounds = {index: round_ for index, (round_, _) in self._in_flight.items()}
        return saving.save(loop.states, self._weights, in_flight=rounds, facts=facts, mesh=mesh)

    def load(self, saved: SavedState) -> list[str]:
        loop = self._loop
        self._liveness.wait(loop.background.submit(lambda: None), onlooker=self.reports.waiting)
        self._in_flight.clear()
        self._note_progress()
        mixing = loop.config.overlap.mixing_at(self.reports.progress)
        loaded = saving.load(loop.states, saved, loop.config, mixing)
        self._weights = [fragment.weight for fragment in loaded.fragments]
        for fragment in loop.fragments:
            if any(part.name in loaded.reset for part in fragment.parts):
                loop.start_afresh(fragment.index)
        for index in loaded.in_flight:
            facts = loaded.fragments[index]
            round_ = Round.loaded(
                index,
                loop.schedule.outer_round(index, facts.sent_step),
                sent_step=facts.sent_step,
                participants=facts.participants,
                flags=facts.flags,
                is_in_model=facts.is_in_model,
            )
            self._in_flight[index] = round_, loop.background.submit(lambda: None)
        return loaded.notes


def link_mistakes(link: Link) -> list[tuple[str, str]]:
    """Return the settings that the connections of a group do not have, as it was made before."""
    mistakes = list[tuple[str, str]]()
    if link.interface:
        reason = (
            "does not apply to a group that you have made: set GLOO_SOCKET_IFNAME before "
            "dist.init_process_group, and remove this setting"
        )
        mistakes.append(("diloco.link.interface", reason))
    if link.streams != Link().streams:
        reason = "does not apply to a group that you have made, which has one stream: remove it"
        mistakes.append(("diloco.link.streams", reason))
    return mistakes


def _close(
    background: BackgroundThread, exchange: Exchange | None, liveness: Liveness, owns_liveness: bool
) -> None:
    """End the threads of these peers. `owns_liveness`: whether they created `liveness`
    themselves."""
    end_thread(background, liveness)
    if exchange is not None:
        exchange.close()
    if owns_liveness:
        liveness.close()
