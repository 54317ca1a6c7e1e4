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

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.base.background import BackgroundThread
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.settings import check_class
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.delta_norms import sum_over_ranks
from torchtitan_diloco.diloco.flags import NOT_FINITE
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.peers import Apply, Peers, Send, close, local_share
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.schedule import build_schedule
from torchtitan_diloco.diloco.state_dict import SHARED, FragmentFacts, OuterFacts, SavedState
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.diloco.witness import STILL_SECONDS, Witness
from torchtitan_diloco.islands.config import (
    Islands,
    change_commands,
    checked_count,
    login_in,
    own_loop_settings,
)
from torchtitan_diloco.islands.followers import SharedCopies, collect_part
from torchtitan_diloco.islands.founding import (
    Contribution,
    JobCheckpoint,
    read_saved,
    write_saved,
)
from torchtitan_diloco.islands.gauges import STEP_TIMES, Gauges
from torchtitan_diloco.islands.instructions import Instructions, share
from torchtitan_diloco.islands.layout import Layout, Ranks, shapes_of
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.own_rounds import OwnRounds
from torchtitan_diloco.islands.payload import Header
from torchtitan_diloco.islands.rules import fragment as rules
from torchtitan_diloco.islands.rules import note as notes
from torchtitan_diloco.islands.rules.fragment import Boundary
from torchtitan_diloco.islands.rules.island import ENDED, LEFT, Island
from torchtitan_diloco.islands.rules.settings import Settings
from torchtitan_diloco.islands.run_settings import in_diloco
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.islands.seat import Seat, take_seat
from torchtitan_diloco.islands.waiting import (
    Waiting,
    at_boundary,
    before_start,
    obstacle,
    raise_if_ended,
)
from torchtitan_diloco.islands.witness import IslandWitness

CLOSE_SECONDS = 5.0
"""Seconds for which a rank waits at its end for the first one."""
AWAY_SECONDS, UNDECIDED_SECONDS = 10.0, 25.0
"""Seconds without the store, and without a decision, after which an island that leaves gives up.
Another syncer takes over after ten seconds."""


class IslandPeers(Peers):
    """The other islands of a run."""

    makes_outer_steps = False
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
        self.total_tokens = checked_count("total_tokens", total_tokens)  # such as 1e9
        self._brings = Contribution(
            islands,
            total_tokens=self.total_tokens,
            tokens_per_step=checked_count("tokens_per_step", tokens_per_step),
            samples_per_step=checked_count("samples_per_step", samples_per_step),
            facts={name: str(value) for name, value in (facts or {}).items()},
            corpus=corpus,
            phases=tuple(phases),
            job=job,
        )
        self._given = ranks
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
        self._witness = IslandWitness(islands.name, self.gauges)
        self._waiting = Waiting(f"island {islands.name}")

    # --- start and end ----------------------------------------------------------------------------

    def check_settings(self, config: DiLoCoConfig) -> DiLoCoConfig:
        self.islands, config = own_loop_settings(self.islands, config)
        return config

    def prepare_to_send(self) -> None:
        self._ranks = Ranks(self._given)
        size, rank = self._ranks.size, self._ranks.rank
        self._layouts = [Layout(shapes_of(one), size, rank) for one in self.fragments]
        self._copies = SharedCopies(self.states, self._layouts, self._ranks)
        self._versions = [0] * len(self.states)
        self._finalizer = weakref.finalize(
            self, close, self.background, None, self._liveness, False
        )

    def join(self) -> Seat:
        """Take a slot, wait for the run to start, and load the shared parameters."""
        if self._is_open:
            raise RuntimeError("join() was already called: create new peers to join again")
        checksums = self._copies.checksums()
        if self._ranks.is_first:
            self._link = self._open(checksums)
            self._link.start()
        else:
            self._following = BackgroundThread("island-follow")
            self._followed = self._following.submit(self._copies.follow)
        drop_gathered(self.model)
        began = time.monotonic()

        def take(apply: rules.Apply) -> None:
            self._take(apply)
            self._say_wait(began, before_start)  # others may train all the time

        while not self._last.has_begun:
            for _ in self._boundary(applies=take):
                raise AssertionError("nothing is sent before the run has begun")
            self._last.raise_if_over(self.islands.name)
            if self._link is not None:
                raise_if_ended(self.machine, self.islands.join)
            self._say_wait(began, before_start)
        for _ in self._boundary(applies=self._take):
            raise AssertionError("nothing is sent before the first step")
        for state in self.states:
            state.write_model()
        name = self.islands.name
        seat = None if self._link is None else take_seat(name, self._link.machine, self.clock)
        self.seat = share(seat, Seat, self._ranks.decisions)
        return self.seat

    def _open(self, checksums: Sequence[str]) -> Link:
        """Open the store, and build the machine of this island. `checksums`: of the copies P."""
        store = self._waiting.open(self.islands.join, writes=f"part/{self.islands.name}/")
        self._brings.islands = self.islands
        machine = self._brings.machine(
            self.config, store.kind, self.fragments, self._layouts, checksums
        )
        link = Link(Run(store, self.config.link.streams), machine, self._copies, checksums)
        self.gauges.site = login_in(self.islands.join)[: notes.MOST_OF_SITE]
        link.gauges = self._witness.own_gauges
        self._witness.link = link
        return link

    def close(self) -> None:
        if self._link is not None:
            self._link.close(deletes_note=self._last.ending in (ENDED, LEFT))
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
        return self._last.is_leaving and self._last.ending != ENDED

    @property
    def clock(self) -> int:
        """Tokens of the run so far."""
        return self._last.due.clock

    @property
    def finished(self) -> bool:
        """Whether the run has merged its tokens, or this island was asked to leave.

        It is not if this island has lost its slot: the next call then raises an error.
        """
        return self._last.is_leaving or self._last.ending in (ENDED, LEFT)

    @property
    def entered(self) -> list[int]:
        """Positions at which the stream of this island has entered phases of the data. A new one is
        the next sample to read."""
        return list(self._last.entered)

    @property
    def progress(self) -> float:
        return min(1.0, self.clock / self.total_tokens)

    @property
    def witness(self) -> Witness:
        return self._witness

    def advise(self, settings: Mapping[str, object]) -> str:
        return change_commands(self.islands, settings)

    def describe(self) -> list[str]:
        chosen = self.islands
        line = f"{chosen.begin} start together; a round waits at least {chosen.grace_seconds:g} s"
        return [f"{'island':<10} {chosen.name}; {line}", *super().describe()]

    # --- training thread --------------------------------------------------------------------------

    def due_tasks(self, weight: float, reset: Collection[int]) -> Iterator[Send | Apply]:
        """When the run should have all its tokens, wait until they are merged, or continue to train
        if some are missing."""
        if not self._is_open:
            raise RuntimeError(
                "call join() before the first step, and do not call step() after close()"
            )
        most = self._brings.tokens_per_step
        if not 0 <= weight <= most or weight != int(weight):
            raise UserError(
                f"the weight of a step is {weight}: give the number of its tokens, at most "
                f"tokens_per_step = {most} of this island"
            )
        self.step += 1
        self._liveness.finish_step(self.step)
        if not math.isnan(self._boundary_at):
            self._durations.append(time.perf_counter() - self._boundary_at)
        self.check()
        if reset:
            self._witness.flags = NOT_FINITE
        if self._link is not None:
            usual = statistics.median(self._durations or [0.0])
            self._link.finish_step(self._brings.samples_per_step, int(weight), usual, reset)
            self.gauges.finish_step(self.machine.tokens)
        began = time.monotonic()
        is_over = False
        while not is_over:
            yield from self._boundary()
            self._last.raise_if_over(self.islands.name)
            is_over = self.finished or self._last.may_train
            if not is_over:
                self._say_wait(began, at_boundary)
        self._boundary_at = time.perf_counter()

    def remaining_tasks(self) -> Iterator[Send | Apply]:
        if not self._is_open:
            return
        self._last.raise_if_over(self.islands.name)
        if self._last.ending:
            return
        if self._link is not None:
            self._link.leave()
        began = time.monotonic()
        while not self._last.ending:
            yield from self._boundary()
            self._last.raise_if_over(self.islands.name)
            self._say_wait(began, at_boundary)
            reason = ""
            if self._last.away_seconds > AWAY_SECONDS:
                reason = f"its store cannot be reached since {AWAY_SECONDS:g} s"
            elif self._last.undecided_seconds > UNDECIDED_SECONDS:
                reason = f"no syncer has decided for {UNDECIDED_SECONDS:g} s"
            if reason:
                if self._link is not None:
                    name = self.islands.name
                    logger.warning(f"island {name} leaves without its last parts: {reason}")
                return

    def check(self) -> None:
        self._liveness.check(f"seen after step {self.step}")
        with self._naming_lost_ranks():
            if self._link is not None:
                self._link.check()
            if self._followed is not None and self._followed.done():
                self._followed.result()
            for encoded in [one for one in self._encoded if one.done()]:
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
            self._liveness.check(f"seen after step {self.step}")
            raise

    def _boundary(
        self, applies: Callable[[rules.Apply], None] | None = None
    ) -> Iterator[Send | Apply]:
        """Yield what the rules decide until there is nothing more to do for now.

        `applies`: called with what is to be applied, instead of yielding it.
        """
        while True:
            started = time.perf_counter()
            due = self._next_instructions().due
            waited = time.perf_counter() - started
            self.gauges.waited += waited
            self.check()
            for apply in due.applies:
                if applies is not None:
                    applies(apply)
                else:
                    yield self._apply(apply, waited)
                    waited = 0.0  # counted with that round
                self._on_applied(apply)
            self.meter.waited(waited)
            for send in due.sends:
                yield from self._send(send.part)
            if not due.applies and not due.sends:
                return

    def _next_instructions(self) -> Instructions:
        """Return what all ranks do next, which the first one decides."""
        with self._naming_lost_ranks():
            mine = None if self._link is None else self._link.decide()
            if self._link is not None and mine is not None:
                for _ in range(len(mine.entered), mine.due.phases):
                    self._link.enter_phase(self.machine.position)
                mine.entered = list(self.machine.entered)
            self._last = share(mine, Instructions, self._ranks.decisions)
        if self._last.settings is not None:
            self._use(self._last.settings)
        return self._last

    def _copy_of(self, apply: rules.Apply) -> Tensor:
        """Return the copy to apply: the P that is there already, or the one that was prepared."""
        state = self.states[apply.fragment]
        return state.outer if apply.source is None else state.delta

    def _on_applied(self, apply: rules.Apply) -> None:
        self._versions[apply.fragment] = apply.version
        if apply.source is not None:
            self._copies.on_taken(apply.fragment)
        if self._link is not None:
            self._link.on_applied(apply)

    def _take(self, apply: rules.Apply) -> None:
        """Take a version while this island joins. The model is written at the end."""
        self.states[apply.fragment].apply(self._copy_of(apply), 0.0)

    def _apply(self, apply: rules.Apply, waited: float) -> Apply:
        """`waited`: seconds for which training has waited for it."""
        prepared = None if self._link is None else self._link.prepared(apply)
        values = self.states[apply.fragment].values
        round_ = self._rounds.end(apply, self.step, values, waited=waited, prepared=prepared)
        round_.participants = self._last.participants
        return Apply(round_, self._copy_of(apply), apply.mode, apply.share)

    def _send(self, part: notes.Part) -> Iterator[Send]:
        round_ = self._rounds.begin(part, self.step, self.states[part.fragment].values)
        yield Send(round_)
        self._encoded.append(self.background.submit(partial(self._encode, part, round_)))

    def _say_wait(self, since: float, describe: Callable[[Island], str]) -> None:
        """Log what training waits for, on the first rank."""
        if self._link is None:
            return
        watcher = self._witness.watcher
        if watcher is not None and time.monotonic() - since >= STILL_SECONDS:
            watcher.missing(self._witness.late())
        self._waiting.say(since, obstacle(self._link, describe(self.machine)))

    def _use(self, settings: Settings) -> None:
        """Use the settings of the run."""
        if settings == self._used:
            return
        self._used = settings
        self.total_tokens = settings.total_tokens
        self.config = in_diloco(self.config, settings)
        self.schedule = build_schedule(self.config, len(self.fragments))

    # --- background thread ------------------------------------------------------------------------

    def _encode(self, part: notes.Part, round_: Round) -> None:
        """Encode the delta of a part on all ranks. The first one passes it to the thread that
        stores it."""
        round_.begun = time.perf_counter()
        state = self.states[part.fragment]
        payload = None
        with state.background():
            round_.delta_square = state.finish_delta()
            square = sum_over_ranks(round_.delta_square, self._ranks.uploads, 0)
            if math.isfinite(square):
                block_size = self.config.quantization.block_size
                header = Header(part.codec, block_size, part.ranks)
                layout = self._layouts[part.fragment]
                payload = collect_part(state.delta, header, layout, self._ranks)
            else:
                round_.flags = NOT_FINITE
        self._witness.flags = round_.flags
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
            facts.island = write_saved(self.machine.save())
        facts.fragments = [FragmentFacts(outer_steps=version) for version in self._versions]
        state = SavedState(facts, {})
        for one in self.states:
            state.tensors |= saving.named(SHARED, one, one.outer.to("cpu", copy=True), mesh)
        return state

    def load(self, saved: SavedState) -> list[str]:
        """Resume from a saved state, before `join`."""
        if saved.facts.in_flight:  # of a run without islands
            alpha = self.config.overlap.mixing_at(saved.facts.progress)
            saving.apply_early(self.states, saved, partial(local_share, alpha))
            saved.facts.in_flight = []
        *_, lines = saving.load(self.states, saved, self.config, partial(local_share, 0.0))
        self._brings.saved = read_saved(saved.facts.island)
        if self._brings.saved is None:
            self._brings.job = self._brings.job or JobCheckpoint()
        return lines

    def restart(self) -> None:
        self._liveness.wait(self.background.submit(lambda: None))
