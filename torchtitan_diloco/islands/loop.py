"""Streaming DiLoCo on an island: the log and the rules decide what to send and apply."""

import math
import secrets
import statistics
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.diloco import healing
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.background import BackgroundThread, one_at_a_time
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import DiLoCoConfig, diloco_mistakes
from torchtitan_diloco.diloco.fields import check_class, raise_mistakes
from torchtitan_diloco.diloco.fragments import check_identity, drop_gathered
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.object_collectives import broadcast_object
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.round import InFlight, Round
from torchtitan_diloco.diloco.schedule import is_measured
from torchtitan_diloco.diloco.state_dict import SavedState
from torchtitan_diloco.diloco.streaming import StreamingDiLoCo
from torchtitan_diloco.diloco.transport import NOT_FINITE, OUTLIER
from torchtitan_diloco.islands.config import (
    Islands,
    Join,
    checked_count,
    islands_mistakes,
    own_loop_mistakes,
)
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.copies import Copies, add_change, encode_delta, fingerprints
from torchtitan_diloco.islands.leader import Apply, Boundary, Leader, Seat
from torchtitan_diloco.islands.records import Facts, Part
from torchtitan_diloco.islands.replay import Saved
from torchtitan_diloco.islands.rounds import Mode, Timing
from torchtitan_diloco.islands.shards import Ranks, collect
from torchtitan_diloco.log import UserError, logger

LOOK = 0.05  # seconds between two looks at the log at the end of the run


class IslandDiLoCo(StreamingDiLoCo):
    """Outer loop of one island.

    outer = IslandDiLoCo(model, Islands(join, name), config, total_tokens=...)
    outer.join()                               # start reading at sample outer.seat.position
    while not outer.finished:
        loss(...).backward(); optimizer.step(); optimizer.zero_grad()
        outer.step(weight=tokens)
    outer.drain()
    """

    def __init__(
        self,
        model: nn.Module,
        group: Islands,
        config: DiLoCoConfig,
        *,
        total_tokens: int,
        tokens_per_step: int = 1,
        optimizer: torch.optim.Optimizer | None = None,
        ranks: dist.ProcessGroup | None = None,
        liveness: Liveness | None = None,
        samples_per_step: int = 1,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        """Begin with the parameters of the model. Connect only in `join`.

        Args:
            group: the run to join.
            total_tokens: tokens of all islands together, at which the run ends.
            tokens_per_step: most tokens of a step of this island, the largest weight of `step()`.
            ranks: joins the ranks of this island on the CPU.
            liveness: watches these ranks.
            samples_per_step: samples of its slot that this island reads per step.
            facts: what must be equal on all islands besides settings and model, such as the data.
        """
        total_tokens = checked_count("total_tokens", total_tokens)  # such as 1e9
        self._tokens_per_step = checked_count("tokens_per_step", tokens_per_step)
        self._samples_per_step = checked_count("samples_per_step", samples_per_step)
        check_class(group, "islands", Islands)
        check_class(config, "diloco", DiLoCoConfig)
        begin = group.begin or config.workers
        mistakes = [
            *own_loop_mistakes(group),
            *islands_mistakes(group, begin),
            *diloco_mistakes(config, islands=True),
        ]
        raise_mistakes(mistakes, islands=replace(group, join=""), diloco=config)
        config = replace(config, workers=1, link=replace(config.link, outer_state="device"))
        super().__init__(
            model, None, config, optimizer=optimizer, liveness=liveness, total_steps=total_tokens
        )
        self.islands = replace(group, begin=begin, slots=group.slots or begin)
        self.total_tokens = total_tokens
        self.seat: Seat
        """Slot of this island, and its first sample."""
        self._ranks = Ranks(ranks)
        self._copies = Copies(self._states, self.config, self._ranks)
        self._encode = partial(encode_delta, build_codec(config.quantization))
        self._facts = {name: str(value) for name, value in (facts or {}).items()}
        self._leader: Leader | None = None
        self._follower: BackgroundThread | None = None
        self._following = Future[None]()
        self._sent: dict[int, InFlight] = {}
        """Round of the latest part of each fragment, and the upload of the part."""
        self._durations, self._boundary_at = deque[float](maxlen=16), math.nan
        self._last = Boundary(clock=0)
        self._saved: Saved | None = None

    # --- join and leave ---------------------------------------------------------------------------

    def join(self) -> None:
        """Connect, take a slot, wait for the run to begin, and load the shared parameters."""
        if self._leader is not None or self._follower is not None:
            raise RuntimeError("join() was called before: build another loop to join again")
        seat = None
        if self._ranks.is_first:
            self._leader = self.build_leader()
            seat = self._leader.join(self._saved)
        else:
            self._follower = BackgroundThread("islands")
            self._following = self._follower.submit(self._copies.follow)
        self.seat = seat = broadcast_object(seat, Seat, self._ranks.decisions)
        self.total_tokens, self._last = seat.total_tokens, Boundary(seat.clock)
        self._take_versions(seat.versions)
        logger.info(
            f"island {self.islands.name} has slot {seat.slot} of {seat.slots}, begins at its "
            f"sample {seat.position:,}; the run has merged {seat.clock:,} tokens"
        )

    def build_leader(self) -> Leader:
        """Build the leader, for the first rank. It is not connected yet."""
        chosen = self.islands
        join, incarnation = Join.parse(chosen.join), f"{chosen.name}/{secrets.token_hex(4)}"
        declare = partial(self._copies.run, self._copies.declare)
        facts = Facts(
            run=join.run,
            slots=chosen.slots,
            begin=chosen.begin,
            total_tokens=self.total_tokens,
            cycle=chosen.begin * self.config.sync_every * self._tokens_per_step,
            outer_lr=self.config.outer_optimizer.lr,
            checksums=tuple(declare(one, 0) for one in range(len(self.fragments))),
            block=self._samples_per_step,
            fingerprints=fingerprints(self.config, self._states, self._facts),
        )
        timing = Timing(
            schedule=self.schedule,
            quorum=chosen.quorum,
            floor=chosen.grace_seconds,
            norm_limit=self.config.delta_norm_limit,
        )
        connection = Connection(join, incarnation)
        return Leader(connection, self._copies, facts, timing, incarnation)

    @property
    def left(self) -> bool:
        """Whether this island leaves before the end of the run, or has left."""
        return self._last.leaving

    @property
    def clock(self) -> int:
        """Tokens of the run so far."""
        return self._last.clock

    @property
    def progress(self) -> float:
        return min(1.0, self.clock / self.total_tokens)

    @property
    def finished(self) -> bool:
        """Whether the run has merged its tokens, or this island was asked to leave."""
        return self._last.stopped

    def _take_versions(self, versions: list[int]) -> None:
        """Load these versions of the shared copies into the model."""
        drop_gathered(self._model)
        fragments = zip(self._states, self._copies.fragments, versions, strict=True)
        for state, copy, version in fragments:
            copy.drop_before(version)
            state.outer = copy.versions[version]
            state.write_model()

    def drain(self) -> None:
        """Finish the run with the others or, before its end, leave it.

        The work since the last send is sent first. At the end, all islands have the same copy.
        """
        if self._leader is not None and self._leader.island is not None:
            self._leader.stop()
        while not self._last.over and (self._leader or self._follower):
            self._boundary()
            if not self._last.over:
                self.check()
                time.sleep(LOOK)

    def close(self) -> None:
        if self._leader is not None:
            self._leader.close()
            self._leader = None
        if self._follower is not None:
            self._following.result()
            self._follower.close(timeout=1.0)
            self._follower = None
        super().close()

    # --- training thread --------------------------------------------------------------------------

    @one_at_a_time
    def step(self, weight: float = 1.0) -> None:
        """Apply and send what is due. Call this after every inner step.

        `weight`: tokens of the step, 0 if it was skipped. When the run should have all its tokens,
        wait until they are merged, or return to train on if some are missing.
        """
        if self._leader is None and self._follower is None:
            raise RuntimeError("call join() before the first step, and none after close()")
        most = self._tokens_per_step
        if not 0 <= weight <= most or weight != int(weight):
            reason = f"give its number of tokens, at most tokens_per_step = {most} of this loop"
            raise UserError(f"the weight of a step is {weight}: {reason}")
        self.step_count += 1
        self._liveness.step_done(self.step_count)
        if not math.isnan(self._boundary_at):
            self._durations.append(time.perf_counter() - self._boundary_at)
        self.check()
        if self._leader is not None:
            usual = statistics.median(self._durations) if self._durations else 0.0
            self._leader.finish_step(self._samples_per_step, int(weight), usual)
        self._boundary()
        while self._last.may_train_on:
            time.sleep(LOOK)
            self.check()
            self._boundary()
        self._boundary_at = time.perf_counter()

    def check(self) -> None:
        """Raise if this island has failed, has lost its slot, or has lost a rank."""
        self._liveness.check(f"seen after step {self.step_count}")
        if self._leader is not None:
            self._leader.check()
        for task in [self._following, *(stored for _, stored in self._sent.values())]:
            if task.done():
                task.result()

    def _boundary(self) -> None:
        """Send and apply on all ranks what the first rank decides."""
        started, counted = time.perf_counter(), self._meter.exposed_seconds
        if self.config.overlap.delay:
            self._do_due(applies=True, sends=True)
        else:  # wait for what was sent
            self._do_due(applies=False, sends=True)
            self._do_due(applies=True, sends=False)
        counted -= self._meter.exposed_seconds  # the rounds have counted these seconds
        self._meter.waited(time.perf_counter() - started + counted)

    def _do_due(self, *, applies: bool, sends: bool) -> None:
        mine = None if self._leader is None else self._leader.decide(applies, sends)
        self._last = broadcast_object(mine, Boundary, self._ranks.decisions)
        for one in self._last.applied:
            self._apply_version(one)
        for part in self._last.sent:
            self._send_part(part)

    def _send_part(self, part: Part) -> None:
        state = self._states[part.fragment]
        number, now = part.base + 1, time.perf_counter()
        round_ = Round(part.fragment, number, self.step_count, state.values, due=now)
        check_identity(self._model, state.fragment)
        drop_gathered(self._model)
        state.take_delta()
        round_.taken = time.perf_counter()
        self._meter.expose(round_.taken - round_.due)
        upload = partial(self._upload, state, state.delta, part, round_)
        self._sent[part.fragment] = round_, self._background.submit(upload)

    @torch.no_grad()
    def _apply_version(self, due: Apply) -> None:
        fragment, now = due.fragment, time.perf_counter()
        state, copy = self._states[fragment], self._copies.fragments[fragment]
        round_ = self._round_of(due)
        round_.outer_round, round_.applied_step = due.version, self.step_count
        round_.weight, round_.participants = due.weight, due.participants
        round_.asked, round_.fetched = now - due.waited, now
        if due.own and due.waited > 1e-3:  # the exchange lasted until now
            round_.ready = now
        round_.traffic.bytes_received = due.received
        drop_gathered(self._model)
        new = copy.versions[due.version]
        if due.mode in (Mode.MIX, Mode.MIX_LATE):
            mixing = due.mode.share(self._mixing(0, 1))
            measured = is_measured(due.version, self.config.measure_every)
            old, state.delta = state.delta, new
            round_.drift = state.apply(mixing, measured=measured)
        else:
            old, state.outer = state.outer, new
            if old.is_cuda:  # allocated on the background thread's stream
                old.record_stream(torch.cuda.current_stream())
            if due.mode is Mode.RESET:
                state.write_model()
                self._start_afresh(fragment)
                round_.flags = round_.flags or OUTLIER
            else:
                add_change(state, new, old)
        copy.drop_before(due.version)
        copy.recycle(old)
        round_.applied = time.perf_counter()
        self._meter.applied(round_)

    def _round_of(self, due: Apply) -> Round:
        """Return the round of the own part in an entry, or a new round if it has none."""
        if due.own and due.fragment in self._sent:
            return self._sent[due.fragment][0]
        values, now = self._states[due.fragment].values, time.perf_counter()
        round_ = Round(due.fragment, due.version, self.step_count, values, due=now)
        round_.taken = round_.begun = round_.ready = now
        return round_

    # --- background thread ------------------------------------------------------------------------

    def _upload(self, state: OuterState, delta: Tensor, part: Part, round_: Round) -> None:
        """Encode this rank's delta. The first rank stores the deltas of all ranks."""
        round_.begun = time.perf_counter()
        group = self._ranks.uploads
        with state.background():
            round_.delta_square = state.finish_delta()
            whole = healing.sum_over_ranks(round_.delta_square, group, 0)
            round_.flags = 0 if math.isfinite(whole) else NOT_FINITE
            payload = self._encode(delta)
        round_.traffic.encoded = time.perf_counter()
        sizes = self._copies.payload_sizes(part.fragment, self._ranks.size)
        collected = collect(payload, sizes, group)
        if self._leader is not None:
            if round_.flags:
                part = msgspec.structs.replace(part, weight=0, finite=False)
            round_.traffic.bytes_sent = self._leader.store(part, collected)
        round_.ready = time.perf_counter()

    # --- restart ----------------------------------------------------------------------------------

    @one_at_a_time
    def state_dict(self, mesh: DeviceMesh | None = None) -> dict[str, Any]:
        """Save the newest shared copies, between two records of the log. Each island does so.

        The work since the last part is not saved. After a restart, its samples are read again.
        """
        self.check()
        saved = self._copies.save_soon(partial(self._save, self._facts_now(), mesh))
        while not wait([saved], timeout=LOOK).done:
            self.check()
        return vars(saved.result())

    def _save(self, facts: dict[str, Any], mesh: DeviceMesh | None) -> SavedState:
        copies = self._copies.fragments
        facts["fragments"] = [{"weight": 0.0, "delta_norms": []} for _ in copies]
        if self._leader is not None:
            facts["island"] = vars(self._leader.to_save())
        tensors: dict[str, Tensor] = {}
        for copy in copies:  # sgd has no momentum
            for kind, buffer in zip((saving.SHARED, saving.MOMENTUM), copy.buffers(), strict=False):
                tensors |= saving.named(kind, copy.state, buffer.to("cpu", copy=True), mesh)
        return SavedState(facts, tensors)

    def load_state_dict(self, saved: SavedState | dict[str, Any]) -> list[str]:
        """Resume from a saved state, before `join`."""
        saved = saved if isinstance(saved, SavedState) else SavedState(**saved)
        if saved.facts["in_flight"]:  # of a run without islands; alpha follows its progress
            clock = round(saved.facts.get("progress", 0.0) * self.total_tokens)
            self._last = Boundary(clock)
            saving.apply_early(self._states, saved, self._mixing)
            saved.facts["in_flight"] = []
        notes = super().load_state_dict(saved)
        if "island" in saved.facts:
            self._saved = Saved(**saved.facts["island"])
        return notes

    def describe(self) -> list[str]:
        chosen = self.islands
        line = f"{chosen.begin} begin together; a round waits at least {chosen.grace_seconds:g} s"
        return [f"{'island':<10} {chosen.name}; {line}", *super().describe()]
