"""An island's peers: a syncer decides what to send and apply, through a store."""

import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.base.background import BackgroundThread
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.settings import check_class
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.agreement import check_shards
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.delta_norms import sum_over_ranks
from torchtitan_diloco.diloco.flags import NOT_FINITE
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.loop import Loop
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.outer_state import build_states
from torchtitan_diloco.diloco.peers import Peers, end_thread
from torchtitan_diloco.diloco.reports import STILL_SECONDS
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.state_dict import SHARED, FragmentFacts, OuterFacts, SavedState
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.islands.config import Islands, checked_count, login_in, own_loop_settings
from torchtitan_diloco.islands.followers import SharedCopies, collect_part
from torchtitan_diloco.islands.founding import Contribution, JobCheckpoint, read_saved, write_saved
from torchtitan_diloco.islands.gauges import STEP_TIMES, Gauges
from torchtitan_diloco.islands.instructions import Instructions, share
from torchtitan_diloco.islands.island_reports import IslandReports
from torchtitan_diloco.islands.layout import Layout, Ranks, shapes_of
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.own_rounds import OwnRounds
from torchtitan_diloco.islands.payload import PartHeader
from torchtitan_diloco.islands.rules import fragment as rules
from torchtitan_diloco.islands.rules import note as notes
from torchtitan_diloco.islands.rules.fields import MOST_TOKENS
from torchtitan_diloco.islands.rules.fragment import Boundary
from torchtitan_diloco.islands.rules.island import ENDED, LEFT, OVER, Island
from torchtitan_diloco.islands.rules.settings import Settings
from torchtitan_diloco.islands.run_settings import in_diloco, overridden_by_run
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.islands.seat import Seat, take_seat
from torchtitan_diloco.islands.waiting import (
    Waiting,
    at_boundary,
    before_start,
    obstacle,
    reason_to_leave_now,
    say_end,
)

RUN_ENDS = ENDED, OVER
"""Why an island is over when the run is."""
CLOSE_SECONDS = 5.0
"""Seconds for which a rank waits at its end for the first one."""


class IslandPeers(Peers):
    """The other islands of a run."""

    reports: IslandReports
    seat: Seat
    """Slot of this island and its first sample, after `join`."""
    took_copies = False
    """Whether `join` has taken newer copies than those of the checkpoint."""
    is_asked_to_leave: Callable[[], bool] = staticmethod(lambda: False)
    """Called on the first rank while a step waits: whether this island is to leave the run."""
    _loop: Loop
    _leaves_without_last_parts = False

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
        corpus: str = "",
        phases: Sequence[float] = (),
        job: JobCheckpoint | None = None,
    ) -> None:
        """Open the store only in `join`.

        Args:
            islands: the run to join.
            total_tokens: number of tokens of all islands together after which the run ends.
            tokens_per_step: maximum number of tokens, and weight, of a step of this island.
            samples_per_step: samples of its slot that this island reads per step.
            ranks: joins the ranks of this island on the CPU.
            liveness: watches these ranks.
            facts: other facts that must be equal on all islands, such as the data.
            corpus: digest in hexadecimal digits of the data of this island, if islands have data of
                their own. It only continues slots of the same corpus.
            phases: shares of `total_tokens` at which streams enter the next phase of the data:
                `entered` says where this one has.
            job: what the checkpoint of a job contains that this island loads, if any.
        """
        check_class(islands, "islands", Islands)
        self.islands = islands
        self.total_tokens = checked_count("total_tokens", total_tokens, MOST_TOKENS)
        self._contribution = Contribution(
            islands,
            total_tokens=self.total_tokens,
            tokens_per_step=checked_count("tokens_per_step", tokens_per_step),
            samples_per_step=checked_count("samples_per_step", samples_per_step),
            facts={name: str(value) for name, value in (facts or {}).items()},
            corpus=corpus,
            phases=tuple(phases),
            job=job,
        )
        self._rank_group = ranks
        self._liveness = liveness or Liveness(None)
        self.gauges = Gauges()
        self._link: Link | None = None
        """Threads of the first rank. The others have `_following`."""
        self._following: BackgroundThread | None = None
        self._followed: Future[None] | None = None
        self._last = Instructions(Boundary(clock=0))
        """The latest ones."""
        self._versions = list[int]()
        self._encoded: list[Future[None]] = []
        self._rounds = OwnRounds(self.gauges)
        self._durations = deque[float](maxlen=STEP_TIMES)
        self._boundary_at = math.nan
        self._used: Settings | None = None
        self.reports = IslandReports(islands, self.gauges)
        self._waiting = Waiting(f"island {islands.name}")

    # --- start and end ----------------------------------------------------------------------------

    def start(
        self, model: nn.Module, config: DiLoCoConfig, optimizer: torch.optim.Optimizer | None = None
    ) -> Loop:
        """Build the buffers. Islands compare their settings when they join."""
        if hasattr(self, "_loop"):
            raise RuntimeError("these peers already belong to an outer loop: create new ones")
        self.islands, config = own_loop_settings(self.islands, config)
        self.reports.islands = self.islands
        self.reports.in_flight = self._rounds.in_flight
        check_shards(model, self._rank_group, "ranks to IslandPeers")
        drop_gathered(model)
        fragments = build_fragments(model, config.fragments)
        states = build_states(fragments, config, has_optimizer=False)
        self._loop = Loop(model, config, fragments, states, optimizer)
        self._ranks = Ranks(self._rank_group)
        self._layouts = [
            Layout(shapes_of(fragment), self._ranks.size, self._ranks.rank)
            for fragment in fragments
        ]
        self._copies = SharedCopies(states, self._layouts, self._ranks)
        self._versions = [0] * len(states)
        self._finalizer = weakref.finalize(self, end_thread, self._loop.background, self._liveness)
        return self._loop

    def join(self) -> Seat:
        """Take a slot, wait for the run to start, and load the shared parameters.

        If the run has ended, load the final ones. `finished` is true then.
        """
        if self._is_open:
            raise RuntimeError("join() was already called: create new peers to join again")
        checksums = self._copies.checksums()
        if self._ranks.is_first:
            self._link = self._open(checksums)
            self._link.start()
        else:
            self._following = BackgroundThread("island-follow")
            self._followed = self._following.submit(self._copies.follow)
        drop_gathered(self._loop.model)
        began = time.monotonic()

        def take(apply: rules.Apply, waited: float) -> None:
            self._take(apply, waited)
            self._say_wait(began, before_start)  # others may train all the time

        while not (self._last.has_begun or self._last.ending):
            self._boundary(take)
            self._last.raise_if_over(self.islands.name)
            self._say_wait(began, before_start)
        self._boundary(self._take)
        for state in self._loop.states:
            state.write_model()
        name = self.islands.name
        seat = None
        if self._link is not None:
            seat = self._link.read(lambda machine: take_seat(name, machine))
            if self._last.ending in RUN_ENDS:
                self._link.read(lambda machine: say_end(machine, self.islands.join))
        self.seat = share(seat, Seat, self._ranks.decisions)
        return self.seat

    def _open(self, checksums: Sequence[str]) -> Link:
        """Open the store, and build the machine of this island. `checksums`: of the copies P."""
        store = self._waiting.open(self.islands.join, writes=f"part/{self.islands.name}/")
        self._contribution.islands = self.islands
        try:
            machine = self._contribution.machine(
                self._loop.config, store.kind, self._loop.fragments, self._layouts, checksums
            )
        except BaseException:
            store.close()
            raise
        link = Link(Run(store, self._loop.config.link.streams), machine, self._copies, checksums)
        self.gauges.site = login_in(self.islands.join)[: notes.MOST_OF_SITE]
        link.gauges = self.reports.own_gauges
        self.reports.link = link
        return link

    def close(self) -> None:
        if self._link is not None:
            self._link.close(deletes_note=self._last.ending in (*RUN_ENDS, LEFT))
            self._link = None
        if self._following is not None:
            self._following.close(timeout=CLOSE_SECONDS)  # the first rank ends it
            self._copies.close()
            self._following = None
        self._finalizer()

    # --- the run ----------------------------------------------------------------------------------

    @property
    def machine(self) -> Island:
        """The rules, on the first rank."""
        assert self._link is not None
        return self._link.machine

    @property
    def _is_open(self) -> bool:
        """Whether this island has joined, and is not closed."""
        return self._link is not None or self._following is not None

    @property
    def left(self) -> bool:
        """Whether this island leaves before the end of the run, or has left."""
        return self._last.is_leaving and self._last.ending not in RUN_ENDS

    @property
    def clock(self) -> int:
        """Tokens of the run so far."""
        return self._last.due.clock

    @property
    def finished(self) -> bool:
        """Whether the run has merged its tokens, or this island was asked to leave.

        It is not if this island has lost its slot: the next call then raises an error.
        """
        return self._last.is_leaving or self._last.ending in (*RUN_ENDS, LEFT)

    @property
    def entered(self) -> list[int]:
        """Positions at which the stream of this island has entered phases of the data. A new one is
        the next sample to read."""
        return list(self._last.entered)

    # --- training thread --------------------------------------------------------------------------

    def due(self, weight: float, reset: Collection[int]) -> None:
        """Do what is due after a step. When the run should have all its tokens, wait until they are
        merged, or continue to train if some are missing."""
        if not self._is_open:
            raise RuntimeError(
                "call join() before the first step, and do not call step() after close()"
            )
        most = self._contribution.tokens_per_step
        if not 0 <= weight <= most or weight != int(weight):
            raise UserError(
                f"the weight of a step is {weight}: give the number of its tokens, at most "
                f"tokens_per_step = {most} of this island"
            )
        self._liveness.finish_step(self._loop.step)
        if not math.isnan(self._boundary_at):
            self._durations.append(time.perf_counter() - self._boundary_at)
        self.check()
        if reset:
            self.reports.flags = NOT_FINITE
        if self._link is not None:
            usual = statistics.median(self._durations or [0.0])
            self._link.finish_step(self._contribution.samples_per_step, int(weight), usual, reset)
            self.gauges.finish_step(self.machine.tokens)
        began = time.monotonic()
        is_over = False
        while not is_over:
            self._boundary(self._apply)
            self._last.raise_if_over(self.islands.name)
            is_over = self.finished or self._last.may_train
            if not is_over:
                self._say_wait(began, at_boundary)
                if self._link is not None and self.is_asked_to_leave():
                    self._link.leave()
        self._boundary_at = time.perf_counter()

    def rest(self) -> None:
        if not self._is_open:
            return
        self._last.raise_if_over(self.islands.name)
        if self._last.ending or self._leaves_without_last_parts:
            return
        if self._link is not None:
            self._link.leave()
        began = time.monotonic()
        while not self._last.ending:
            self._boundary(self._apply)
            self._last.raise_if_over(self.islands.name)
            self._say_wait(began, at_boundary)
            if reason := reason_to_leave_now(self._last):
                self._leaves_without_last_parts = True
                if self._link is not None:
                    name = self.islands.name
                    logger.warning(f"island {name} leaves without its last parts: {reason}")
                return

    def check(self) -> None:
        self._liveness.check(f"seen after step {self._loop.step}")
        with self._naming_lost_ranks():
            if self._link is not None:
                self._link.check()
            if self._followed is not None and self._followed.done():
                self._followed.result()
            for encoded in [encoding for encoding in self._encoded if encoding.done()]:
                self._encoded.remove(encoded)
                encoded.result()

    @contextmanager
    def _naming_lost_ranks(self) -> Iterator[None]:
        """Raise the error of `Liveness` if the body has lost a rank of this island, which knows
        which one it is."""
        try:
            yield
        except WorkerLostError:
            self._liveness.lost_ranks()
            self._liveness.check(f"seen after step {self._loop.step}")
            raise

    def _boundary(self, apply: Callable[[rules.Apply, float], None]) -> None:
        """Do what the rules decide, until there is nothing more to do for now.

        `apply`: applies a version, for which this rank has waited these seconds, and counts them.
        """
        is_done = False
        while not is_done:
            started = time.perf_counter()
            due = self._next_instructions().due
            waited = time.perf_counter() - started
            self.gauges.waited += waited
            self.check()
            for version in due.applies:
                apply(version, waited)
                waited = 0.0
                self._on_applied(version)
            self._loop.meter.waited(waited)
            for send in due.sends:
                self._send(send.part)
            is_done = not due.applies and not due.sends

    def _next_instructions(self) -> Instructions:
        """Return what all ranks do next, which the first one decides."""
        with self._naming_lost_ranks():
            decided = None if self._link is None else self._link.decide()
            if self._link is not None and decided is not None:
                for _ in range(len(decided.entered), decided.due.phases):
                    self._link.enter_phase(self.machine.position)
                decided.entered = list(self.machine.entered)
            self._last = share(decided, Instructions, self._ranks.decisions)
        if self._last.settings is not None:
            self._use(self._last.settings)
        self.reports.progress = min(1.0, self.clock / self.total_tokens)
        return self._last

    def _copy_of(self, apply: rules.Apply) -> Tensor:
        """Return the copy to apply: the P that is there already, or the one that was prepared."""
        state = self._loop.states[apply.fragment]
        return state.outer if apply.source is None else state.delta

    def _on_applied(self, apply: rules.Apply) -> None:
        self._versions[apply.fragment] = apply.version
        if apply.source is not None:
            self._copies.on_taken(apply.fragment)
        if self._link is not None:
            self._link.on_applied(apply)

    def _take(self, apply: rules.Apply, waited: float) -> None:
        """Take a version while this island joins. The model is written at the end."""
        self.took_copies = True
        self._loop.meter.waited(waited)
        self._loop.states[apply.fragment].apply(self._copy_of(apply), Mode.TAKE)

    def _apply(self, apply: rules.Apply, waited: float) -> None:
        """Apply a version to the model."""
        loop = self._loop
        prepared = None if self._link is None else self._link.prepared(apply)
        round_ = self._rounds.end(apply, loop.step, waited=waited, prepared=prepared)
        round_.participants = self._last.participants
        loop.apply(round_, self._copy_of(apply), apply.mode, apply.share)

    def _send(self, part: notes.Part) -> None:
        assert hasattr(self, "seat"), "nothing is sent before the first step"
        loop = self._loop
        round_ = self._rounds.begin(part, loop.step)
        loop.take(round_)
        self._encoded.append(loop.background.submit(partial(self._encode, part, round_)))

    def _say_wait(self, since: float, describe: Callable[[Island], str]) -> None:
        """Log what training waits for, on the first rank."""
        if self._link is None:
            return
        watcher = self.reports.watcher
        if watcher is not None and time.monotonic() - since >= STILL_SECONDS:
            watcher(self.reports.late())
        self._waiting.say(since, obstacle(self._link, self._link.read(describe)))

    def _use(self, settings: Settings) -> None:
        """Use the settings of the run."""
        if settings == self._used:
            return
        if self._used is None and self._link is not None:
            for line in overridden_by_run(self._loop.config, self.total_tokens, settings):
                logger.info(f"island {self.islands.name}: {line}")
        self._used = settings
        self.total_tokens = settings.total_tokens
        self._loop.config = in_diloco(self._loop.config, settings)

    # --- background thread ------------------------------------------------------------------------

    def _encode(self, part: notes.Part, round_: Round) -> None:
        """Encode the delta of a part on all ranks. The first one passes it to the thread that
        stores it."""
        round_.begun = time.perf_counter()
        state = self._loop.states[part.fragment]
        payload = None
        with state.background():
            squared_norm_of_rank = state.finish_delta()
            round_.numbers["round/delta_norm"] = math.sqrt(squared_norm_of_rank)
            squared_norm = sum_over_ranks(squared_norm_of_rank, self._ranks.uploads, 0)
            if math.isfinite(squared_norm):
                block_size = self._loop.config.quantization.block_size
                header = PartHeader(part.codec, block_size, part.ranks)
                layout = self._layouts[part.fragment]
                payload = collect_part(state.delta, header, layout, self._ranks)
            else:
                round_.flags = NOT_FINITE
        self.reports.flags = round_.flags
        round_.traffic.encoded = time.perf_counter()
        if self._link is None:
            return
        if payload is not None:
            round_.traffic.bytes_sent = payload.numel()
            self.gauges.sent += payload.numel()
        self._link.store(part, payload)

    # --- restart ----------------------------------------------------------------------------------

    def save(self, facts: OuterFacts, mesh: DeviceMesh | None) -> SavedState:
        """Save the copies P. The work since the last part is not saved. After a restart, its
        samples are read again."""
        if self._link is not None:
            facts.island = write_saved(self._link.read(Island.save))
        facts.fragments = [FragmentFacts(optimizer_steps=version) for version in self._versions]
        state = SavedState(facts, {})
        for outer_state in self._loop.states:
            outer = outer_state.outer.to("cpu", copy=True)
            state.tensors |= saving.named(SHARED, outer_state, outer, mesh)
        return state

    def load(self, saved: SavedState) -> list[str]:
        """Resume from a saved state, before `join`."""
        loop = self._loop
        self._liveness.wait(loop.background.submit(lambda: None))
        # Only a run without islands has saved fragments in flight.
        mixing = loop.config.overlap.mixing_at(saved.facts.progress)
        saving.apply_early(loop.states, saved, mixing)
        lines = saving.load(loop.states, saved, loop.config, mixing).notes
        self._contribution.saved = read_saved(saved.facts.island)
        if self._contribution.saved is None:
            self._contribution.job = self._contribution.job or JobCheckpoint()
        return lines
