"""An island's peers: the log and the rules decide what to send and apply."""

import math
import secrets
import statistics
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import cache, partial

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.base.background import BackgroundThread
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.messages import broadcast_object
from torchtitan_diloco.base.settings import check_class
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco import delta_norms, modes
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.agreement import PLACES, agree, code_fingerprint
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.flags import NOT_FINITE, OUTLIER
from torchtitan_diloco.diloco.liveness import LATE_SECONDS, Liveness
from torchtitan_diloco.diloco.peers import Apply, Peers, Send, close, local_share
from torchtitan_diloco.diloco.round import InFlight, Round
from torchtitan_diloco.diloco.schedule import build_schedule
from torchtitan_diloco.diloco.state_dict import SHARED, SLOTS, FragmentFacts, OuterFacts, SavedState
from torchtitan_diloco.diloco.vitals import Action, Report
from torchtitan_diloco.diloco.witness import STILL_SECONDS, Witness
from torchtitan_diloco.islands.changes import TOTAL_TOKENS, with_settings
from torchtitan_diloco.islands.config import (
    Islands,
    Join,
    change_commands,
    checked_count,
    own_loop_settings,
)
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.copies import Copies, arithmetic_of, encode_delta, fingerprints
from torchtitan_diloco.islands.joining import StaleError
from torchtitan_diloco.islands.layout import Ranks, collect
from torchtitan_diloco.islands.leader import Leader, Seat
from torchtitan_diloco.islands.ledger import Boundary, Due, Mode
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import Gauges
from torchtitan_diloco.islands.records import Facts, Part
from torchtitan_diloco.islands.rounds import Timing

LOOK = 0.05  # seconds between two looks at the log at the end of the run


class IslandPeers(Peers, Witness):
    """The other islands of a run whose islands share a log."""

    seat: Seat
    """Slot of this island and its first sample, after `join`."""

    def __init__(
        self,
        islands: Islands,
        *,
        total_tokens: int,
        tokens_per_step: int = 1,
        samples_per_step: int = 1,
        ranks: dist.ProcessGroup | None = None,
        liveness: Liveness | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        """Connect only in `join`.

        Args:
            islands: the run to join.
            total_tokens: number of tokens of all islands together after which the run ends.
            tokens_per_step: maximum number of tokens, and weight, of a step of this island.
            samples_per_step: samples of its slot that this island reads per step.
            ranks: joins the ranks of this island on the CPU.
            liveness: watches these ranks.
            facts: other facts that must be equal on all islands, such as the data.
        """
        check_class(islands, "islands", Islands)
        self.islands = islands
        self.total_tokens = checked_count("total_tokens", total_tokens)  # such as 1e9
        self._tokens_per_step = checked_count("tokens_per_step", tokens_per_step)
        self._samples_per_step = checked_count("samples_per_step", samples_per_step)
        self._given, self._liveness = ranks, liveness or Liveness(None)
        self._facts = {name: str(value) for name, value in (facts or {}).items()}
        self.gauges = Gauges()
        self._leader: Leader | None = None
        self._follower: BackgroundThread | None = None
        self._following = Future[None]()
        self._sent: dict[int, InFlight] = {}  # the latest part of each fragment, and its upload
        self._durations, self._boundary_at = deque[float](maxlen=16), math.nan
        self._last = Boundary(clock=0)
        self._said = 0.0, 0.0  # since when training waited, and for how long, when it was said
        self._saved: State | None = None  # state of the log in the checkpoint that was loaded

    # --- start and end ----------------------------------------------------------------------------

    def check_settings(self, config: DiLoCoConfig) -> DiLoCoConfig:
        self.islands, config = own_loop_settings(self.islands, config)
        return config

    def prepare_to_send(self) -> None:
        self._ranks = Ranks(self._given)
        agree({}, self._ranks.copies, "rank", results=arithmetic_of(self.config))
        self._copies = Copies(self.states, self.config, self._ranks)
        self._codec, self._encode = cache(self._copies.build_codec), encode_delta
        self._finalizer = weakref.finalize(
            self, close, self.background, None, self._liveness, False
        )

    def join(self) -> Seat:
        """Connect, take a slot, wait for the run to start, and load the shared parameters."""
        if self._leader or self._follower:
            raise RuntimeError("join() was already called: create new IslandPeers to join again")
        seat = self._join() if self._ranks.is_first else None
        if seat is None:
            self._follower = BackgroundThread("islands")
            self._following = self._follower.submit(self._copies.follow)
        self.seat = seat = broadcast_object(seat, Seat, self._ranks.decisions)
        self.total_tokens, self._last = seat.total_tokens, Boundary(seat.clock)
        drop_gathered(self.model)
        self._copies.write_model(seat.versions)
        copy = f"takes the newest shared copy, of {seat.clock:,} tokens, and " * (seat.clock > 0)
        place = f"slot {seat.slot} of {seat.slots}, {copy}starts at its sample {seat.position:,}"
        logger.info(f"island {self.islands.name} has {place}")
        return seat

    def _join(self) -> Seat:
        self._leader = self.build_leader()
        try:
            return self._leader.join(self._saved)
        except StaleError as error:
            logger.warning(f"{error}: this island takes the shared copies of another one")
            self._leader.close()
            self._leader = self.build_leader()
            return self._leader.join(None)

    def build_leader(self) -> Leader:
        """Build the leader, for the first rank. It is not connected yet."""
        chosen, config = self.islands, self.config
        join, incarnation = Join.parse(chosen.join), f"{chosen.name}/{secrets.token_hex(4)}"
        declare = partial(self._copies.run, self._copies.declare)
        last = self._saved if self._saved and self._saved.run != join.run else None
        before = last.facts if last else None
        facts = Facts(
            run=join.run,
            clocks=last.clocks if last else (),
            positions=last.positions if last else (),
            slots=max(chosen.slots, before.slots if before else 0),
            streams=before.streams if before else 0,
            begin=chosen.begin,
            quorum=chosen.quorum,
            total_tokens=self.total_tokens,
            cycle=chosen.begin * config.sync_every * self._tokens_per_step,
            outer_lr=config.outer_optimizer.lr,
            checksums=tuple(declare(one, 0) for one in range(len(self.states))),
            block=self._samples_per_step,
            fingerprints=fingerprints(config, self.states, self._facts),
            code=code_fingerprint(*PLACES),
        )
        limit = config.delta_norm_limit
        timing = Timing(self.schedule, chosen.grace_seconds, limit, chosen.action)
        connection = Connection(join, incarnation, chosen.slot_seconds, streams=config.link.streams)
        return Leader(connection, self._copies, facts, timing, incarnation, self.gauges)

    def close(self) -> None:
        if self._leader is not None:
            self._leader.close()
            self._copies.run(self._copies.stop)
            self._leader = None
        if self._follower is not None:
            self._following.result()
            self._follower.close(timeout=1.0)
            self._follower = None
        self._finalizer()

    # --- the run ----------------------------------------------------------------------------------

    @property
    def left(self) -> bool:
        """Whether this island leaves before the end of the run, or has left."""
        return self._last.leaving

    @property
    def clock(self) -> int:
        """Tokens of the run so far."""
        return self._last.clock

    @property
    def finished(self) -> bool:
        """Whether the run has merged its tokens, or this island was asked to leave."""
        return self._last.stopped

    @property
    def progress(self) -> float:
        return min(1.0, self.clock / self.total_tokens)

    @property
    def witness(self) -> Witness:
        return self

    def late(self) -> Mapping[str, Report]:
        return {name: report for name, report in self.reports().items() if report.absent}

    def reports(self) -> Mapping[str, Report]:
        return {} if self._leader is None else self._leader.reports()

    def say(self, verdicts: Sequence[str]) -> None:
        self.gauges.says = tuple(one[:100] for one in verdicts[:8])

    def take_actions(self) -> list[Action]:
        return [] if self._leader is None else self._leader.take_actions()

    def advise(self, settings: Mapping[str, object]) -> str:
        return change_commands(self.islands, settings)

    def describe(self) -> list[str]:
        chosen = self.islands
        line = f"{chosen.begin} start together; a round waits at least {chosen.grace_seconds:g} s"
        return [f"{'island':<10} {chosen.name}; {line}", *super().describe()]

    # --- training thread --------------------------------------------------------------------------

    def due_tasks(
        self,
        weight: float,
        reset: Collection[int],  # noqa: ARG002 - islands count all their tokens
    ) -> Iterator[Send | Apply]:
        """When the run should have all its tokens, wait until they are merged, or continue to train
        if some are missing."""
        if self._leader is None and self._follower is None:
            raise RuntimeError(
                "call join() before the first step, and do not call step() after close()"
            )
        most = self._tokens_per_step
        if not 0 <= weight <= most or weight != int(weight):
            reason = (
                f"give the number of its tokens, at most tokens_per_step = {most} of this island"
            )
            raise UserError(f"the weight of a step is {weight}: {reason}")
        self.step += 1
        self._liveness.finish_step(self.step)
        if not math.isnan(self._boundary_at):
            self._durations.append(time.perf_counter() - self._boundary_at)
        self.check()
        if self._leader is not None:
            usual, self.gauges.vitals = statistics.median(self._durations or [0.0]), self.vitals
            self._leader.finish_step(self._samples_per_step, int(weight), usual)
        yield from self._boundary()
        while self._last.may_train_on:
            time.sleep(LOOK)
            self.check()
            yield from self._boundary()
        self._boundary_at = time.perf_counter()

    def remaining_tasks(self) -> Iterator[Send | Apply]:
        if self._leader is not None:
            self._leader.stop()
        while not self._last.over and (self._leader or self._follower):
            yield from self._boundary()
            if not self._last.over:
                self.check()
                time.sleep(LOOK)

    def check(self) -> None:
        self._liveness.check(f"seen after step {self.step}")
        if self._leader is not None:
            self._leader.check()
        for task in [self._following, *(stored for _, stored in self._sent.values())]:
            if task.done():
                task.result()

    def _boundary(self) -> Iterator[Send | Apply]:
        """Yield the decisions of the first rank on all ranks."""
        waits, began = True, time.perf_counter()
        while waits:
            started = time.perf_counter()
            mine = None if self._leader is None else self._leader.decide()
            before = self._last.settings
            self._last = last = broadcast_object(mine, Boundary, self._ranks.decisions)
            if last.settings != before:
                self._use(last.settings)
            waits = last.waits_until is not None
            if waits:
                self._miss_others(began)
            counted = sum(one.waited for one in last.applied)  # by their rounds
            self.meter.waited(time.perf_counter() - started - counted)
            for due in last.applied:
                yield from self._apply(due)
            for part in last.sent:
                values, now = self.states[part.fragment].values, time.perf_counter()
                round_ = Round(part.fragment, part.base + 1, self.step, values, due=now)
                yield Send(round_)
                stored = self.background.submit(partial(self._upload, part, round_))
                self._sent[part.fragment] = round_, stored

    def _miss_others(self, since: float) -> None:
        """Report which islands are missing, including this one, and then what training waits
        for."""
        if self._leader is not None and (waited := time.perf_counter() - since) > STILL_SECONDS:
            if self.watcher is not None:
                self.watcher.missing(self.late())
            limit = 2 * self._said[1] if since == self._said[0] else LATE_SECONDS
            if waited >= limit:
                self._said = since, limit
                logger.warning(f"waiting since {waited:.0f} s for {self._leader.describe_wait()}")

    def _use(self, settings: Mapping[str, str]) -> None:
        """Use the settings of the run."""
        self.total_tokens = int(settings[TOTAL_TOKENS])
        self.config = with_settings(self.config, settings)
        self.schedule = build_schedule(self.config, len(self.fragments))

    def _apply(self, due: Due) -> Iterator[Apply]:
        fragment, now = due.fragment, time.perf_counter()
        copy, old = self._copies.fragments[fragment], self.states[fragment].outer
        round_ = self._round_of(due)
        round_.outer_round = due.version
        round_.weight, round_.participants = due.own.weight if due.own else 0, due.participants
        round_.asked, round_.fetched = now - due.waited, now
        if due.own and due.waited > 1e-3:  # the exchange lasted until now
            round_.ready = now
        round_.traffic.bytes_received = due.received
        share = due.mode.share(self.config.overlap.mixing_at(self.progress))
        mode = modes.Mode.MIX
        if due.mode is Mode.ADD:
            mode = modes.Mode.ADD
        elif due.mode is Mode.RESET:
            round_.flags = round_.flags or OUTLIER
            mode = modes.Mode.RESET
        elif self.states[fragment].sent is not None and share < 1:
            mode = modes.Mode.TAKE_BACK
        yield Apply(round_, copy.versions[due.version], mode, share)
        if old.is_cuda:  # allocated on the background thread's stream
            old.record_stream(torch.cuda.current_stream())
        copy.drop_before(due.version)
        copy.recycle(old)

    def _round_of(self, due: Due) -> Round:
        """Return the round of this island's part in an entry, or a new round if it has none."""
        if due.own and due.fragment in self._sent:
            return self._sent[due.fragment][0]
        values, now = self.states[due.fragment].values, time.perf_counter()
        round_ = Round(due.fragment, due.version, self.step, values, due=now)
        round_.taken = round_.begun = round_.ready = now
        return round_

    # --- background thread ------------------------------------------------------------------------

    def _upload(self, part: Part, round_: Round) -> None:
        """Encode this rank's delta. The first rank stores the deltas of all ranks."""
        round_.begun, state = time.perf_counter(), self.states[part.fragment]
        group = self._ranks.uploads
        with state.background():
            round_.delta_square = state.finish_delta()
            whole = delta_norms.sum_over_ranks(round_.delta_square, group, 0)
            round_.flags = 0 if math.isfinite(whole) else NOT_FINITE
            payload = self._encode(self._codec(part.codec), state.delta)
        round_.traffic.encoded = time.perf_counter()
        sizes = self._copies.payload_sizes(part.fragment, self._ranks.size, part.codec)
        collected = collect(payload, sizes, group)
        if self._leader is not None:
            if round_.flags:
                part = msgspec.structs.replace(part, weight=0, finite=False)
            round_.traffic.bytes_sent = self._leader.store(part, collected)
        round_.ready = time.perf_counter()

    # --- restart ----------------------------------------------------------------------------------

    def save(self, facts: OuterFacts, mesh: DeviceMesh | None) -> SavedState:
        """Save the newest shared copies, between two records of the log.

        The work since the last part is not saved. After a restart, its samples are read again.
        """
        if self._leader is None and self._follower is None:
            raise RuntimeError("call state_dict() after join() and before close()")
        asked = time.perf_counter()
        saved = self._copies.save_soon(partial(self._save, facts, mesh))
        while not wait([saved], LOOK).done:
            self.check()
            self._miss_others(asked)
        begun, state = saved.result()
        self.meter.waited(begun - asked)
        return state

    def _save(self, facts: OuterFacts, mesh: DeviceMesh | None) -> tuple[float, SavedState]:
        """Also return the start time, because the reading thread may have waited for parts
        before."""
        begun, copies, tensors = time.perf_counter(), self._copies.fragments, dict[str, Tensor]()
        facts.fragments = [FragmentFacts(outer_steps=copy.newest) for copy in copies]
        if self._leader is not None:
            facts.island = self._leader.state.encode().decode()
        for copy in copies:  # sgd has no slots
            for kind, buffer in zip((SHARED, *SLOTS), copy.buffers(), strict=False):
                tensors |= saving.named(kind, copy.state, buffer.to("cpu", copy=True), mesh)
        return begun, SavedState(facts, tensors)

    def load(self, saved: SavedState) -> list[str]:
        """Resume from a saved state, before `join`."""
        if saved.facts.in_flight:  # of a run without islands; alpha follows its progress
            alpha = self.config.overlap.mixing_at(saved.facts.progress)
            saving.apply_early(self.states, saved, partial(local_share, alpha))
            saved.facts.in_flight = []
        *_, notes = saving.load(self.states, saved, self.config, partial(local_share, 0.0))
        if saved.facts.island:
            self._saved = State.decode(saved.facts.island.encode())
        return notes

    def restart(self) -> None:
        self._liveness.wait(self.background.submit(lambda: None))
