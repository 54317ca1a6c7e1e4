"""An island's peers: a syncer decides what to send and apply, through a store.

(The name of this file is temporary: it becomes `peers.py` when the peers with a log go.)
"""

import math
import secrets
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.settings import check_class
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.base.user import UserError, command_line
from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.flags import NOT_FINITE, OUTLIER
from torchtitan_diloco.diloco.liveness import LATE_SECONDS, Liveness
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.peers import Apply, Peers, Send, close, local_share
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.schedule import build_schedule
from torchtitan_diloco.diloco.state_dict import SHARED, FragmentFacts, OuterFacts, SavedState
from torchtitan_diloco.diloco.vitals import Report
from torchtitan_diloco.diloco.witness import STILL_SECONDS, Witness
from torchtitan_diloco.islands.config import (
    Islands,
    change_commands,
    checked_count,
    own_loop_settings,
)
from torchtitan_diloco.islands.founding import (
    JobCheckpoint,
    checked_corpus,
    checked_phases,
    facts_of,
    new_founding,
    read_saved,
    settings_of,
    write_saved,
)
from torchtitan_diloco.islands.gauges import STEP_TIMES, Gauges
from torchtitan_diloco.islands.layout import Layout, shapes_of
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.payload import Header, encode
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.islands.seat import Seat, raise_if_ended, raise_if_over, seat_of
from torchtitan_diloco.islands.store_changes import in_diloco
from torchtitan_diloco.islands_store import fragment as rules
from torchtitan_diloco.islands_store import note as notes
from torchtitan_diloco.islands_store.checkpoint import Saved
from torchtitan_diloco.islands_store.island import ENDED, LEFT, Island
from torchtitan_diloco.islands_store.settings import Settings
from torchtitan_diloco.store import open_store

AWAY_SECONDS = 10.0
"""Seconds without the store after which an island that leaves gives up."""


class StorePeers(Peers, Witness):
    """The other islands of a run in a store."""

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
        self._tokens_per_step = checked_count("tokens_per_step", tokens_per_step)
        self._samples_per_step = checked_count("samples_per_step", samples_per_step)
        if ranks is not None and ranks.size() > 1:
            raise UserError("islands in a store have one rank each: start each GPU as an island")
        self._liveness = liveness or Liveness(None)
        self._facts = {name: str(value) for name, value in (facts or {}).items()}
        self._corpus = checked_corpus(corpus)
        self._phases = checked_phases(phases)
        if self._phases:
            self._facts["phases"] = ",".join(f"{share:g}" for share in self._phases)
        self._job = job
        self.gauges = Gauges()
        self._link: Link | None = None
        self._machine: Island | None = None
        self._saved: Saved | None = None
        self._encoded: list[Future[None]] = []
        self._sent = dict[int, Round]()
        """Rounds of the latest parts, by fragment."""
        self._durations = deque[float](maxlen=STEP_TIMES)
        self._boundary_at = math.nan
        self._may_train = False
        self._used: Settings | None = None
        self._said_seconds = 0.0

    # --- start and end ----------------------------------------------------------------------------

    def check_settings(self, config: DiLoCoConfig) -> DiLoCoConfig:
        self.islands, config = own_loop_settings(self.islands, config)
        if config.quantization.codec == "topk":
            raise UserError(
                'diloco.quantization.codec = "topk" does not work with islands in a store: use '
                "fp4_e3m0"
            )
        return config

    def prepare_to_send(self) -> None:
        self._layouts = [Layout(shapes_of(fragment)) for fragment in self.fragments]
        self._finalizer = weakref.finalize(
            self, close, self.background, None, self._liveness, False
        )

    def join(self) -> Seat:
        """Take a slot, wait for the run to start, and load the shared parameters."""
        if self._link is not None:
            raise RuntimeError("join() was already called: create new peers to join again")
        self._link = link = self._open()
        self._machine = link.machine
        link.start()
        drop_gathered(self.model)
        began = time.monotonic()

        def take(apply: rules.Apply) -> None:
            self._take(apply)
            self._say_wait(began, link.machine.missing())  # others may train all the time

        while not link.machine.is_training:
            for _ in self._boundary(applies=take):
                raise AssertionError("nothing is sent before the run has begun")
            raise_if_over(link.machine, self.islands)
            raise_if_ended(link.machine, self.islands)
            self._say_wait(began, link.machine.missing())
        for _ in self._boundary(applies=self._take):
            raise AssertionError("nothing is sent before the first step")
        for state in self.states:
            state.write_model()
        self.seat = seat = seat_of(link.machine)
        copy = f"takes the newest shared copy, of {self.clock:,} tokens, and " * (self.clock > 0)
        logger.info(
            f"island {self.islands.name} has slot {seat.slot} of {seat.slots} in run {seat.run}, "
            f"{copy}starts at its sample {seat.position:,}"
        )
        return self.seat

    def _open(self) -> Link:
        """Open the store, and build the machine of this island."""
        name = self.islands.name
        store = open_store(self.islands.join, writes=f"part/{name}/")
        facts = facts_of(self.fragments, self._facts)
        settings = settings_of(
            self.config,
            self.islands,
            store.kind,
            total_tokens=self.total_tokens,
            tokens_per_step=self._tokens_per_step,
            samples_per_step=self._samples_per_step,
            phases=self._phases,
            facts=facts,
        )
        founding = new_founding(self.states, settings)
        saved = self._saved
        if saved is None and self._job is not None:
            saved = self._job.saved(len(self.states), self.islands.slots, self._corpus)
        if saved is not None:
            founding = saved.found(founding)
            if saved.fragments:
                saved = saved.with_checksums(founding.checksums)
        machine = Island(
            f"{name}/{secrets.token_hex(4)}",
            facts=facts,
            shapes=founding.shapes,
            founds=founding if saved is None or self.islands.found else None,
            saved=saved,
            corpus=self._corpus,
        )
        link = Link(Run(store, self.config.link.streams), machine, self.states, self._layouts)
        link.gauges = partial(self.gauges.read, self)
        return link

    def close(self) -> None:
        if self._link is not None:
            self._link.close(deletes_note=self._link.machine.ending in (ENDED, LEFT))
            self._link = None
        self._finalizer()

    # --- the run ----------------------------------------------------------------------------------

    @property
    def machine(self) -> Island:
        if self._machine is None:
            raise RuntimeError("call join() before the first step")
        return self._machine

    @property
    def left(self) -> bool:
        """Whether this island leaves before the end of the run, or has left."""
        machine = self._machine
        return machine is not None and machine.is_leaving and machine.ending != ENDED

    @property
    def clock(self) -> int:
        """Tokens of the run so far."""
        return 0 if self._machine is None else self._machine.clock

    @property
    def finished(self) -> bool:
        """Whether the run has merged its tokens, or this island was asked to leave.

        It is not if this island has lost its slot: the next call then raises an error.
        """
        machine = self._machine
        return machine is not None and (machine.is_leaving or machine.ending in (ENDED, LEFT))

    @property
    def entered(self) -> list[int]:
        """Positions at which the stream of this island has entered phases of the data. A new one is
        the next sample to read."""
        return [] if self._machine is None else list(self._machine.entered)

    @property
    def progress(self) -> float:
        return min(1.0, self.clock / self.total_tokens)

    @property
    def witness(self) -> Witness:
        return self

    def reports(self) -> Mapping[str, Report]:
        return {}

    def say(self, verdicts: Sequence[str]) -> None: ...

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
        machine = self.machine
        if self._link is None:
            raise RuntimeError("do not call step() after close()")
        most = self._tokens_per_step
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
        usual = statistics.median(self._durations or [0.0])
        self._link.finish_step(self._samples_per_step, int(weight), usual, reset)
        self.gauges.finish_step(machine.tokens)
        began = time.monotonic()
        is_over = False
        while not is_over:
            yield from self._boundary()
            raise_if_over(self.machine, self.islands)
            is_over = bool(machine.ending) or machine.is_leaving or self._may_train
            if not is_over:
                self._say_wait(began, "the other islands or the syncer")
        self._boundary_at = time.perf_counter()

    def remaining_tasks(self) -> Iterator[Send | Apply]:
        if self._link is None:
            return
        raise_if_over(self.machine, self.islands)
        if self.machine.ending:
            return
        self._link.leave()
        began = time.monotonic()
        while not self.machine.ending:
            yield from self._boundary()
            raise_if_over(self.machine, self.islands)
            self._say_wait(began, "its last parts to be merged")
            if self._link.away_seconds > AWAY_SECONDS:
                logger.warning(
                    f"island {self.islands.name} leaves without its last parts: "
                    f"{self._link.run.location} cannot be reached since {AWAY_SECONDS:g} s"
                )
                return

    def check(self) -> None:
        self._liveness.check(f"seen after step {self.step}")
        if self._link is not None:
            self._link.check()
        for encoded in [one for one in self._encoded if one.done()]:
            self._encoded.remove(encoded)
            encoded.result()

    def _boundary(
        self, applies: Callable[[rules.Apply], None] | None = None
    ) -> Iterator[Send | Apply]:
        """Yield what the rules decide until there is nothing more to do for now.

        `applies`: called with what is to be applied, instead of yielding it.
        """
        link = self._link
        assert link is not None
        while True:
            started = time.perf_counter()
            due = link.decide()
            waited = time.perf_counter() - started
            self.gauges.waited += waited
            self.check()
            self._may_train = due.is_training and due.waits_until is None
            if link.machine.decision is not None and link.machine.decision.fragments:
                self._use(link.machine.settings)
            for _ in range(len(link.machine.entered), due.phases):
                link.enter_phase(link.machine.position)
            for apply in due.applies:
                if applies is not None:
                    applies(apply)
                else:
                    yield self._apply(apply, waited)
                    waited = 0.0  # counted with that round
                link.on_applied(apply)
            self.meter.waited(waited)
            for send in due.sends:
                yield from self._send(send)
            if not due.applies and not due.sends:
                return

    def _take(self, apply: rules.Apply) -> None:
        """Take a version while this island joins. The model is written at the end."""
        assert self._link is not None
        state = self.states[apply.fragment]
        copy, _ = self._link.copy_for(apply)
        state.apply(copy, 0.0)

    def _apply(self, apply: rules.Apply, waited: float) -> Apply:
        """`waited`: seconds for which training has waited for it."""
        assert self._link is not None
        copy, prepared = self._link.copy_for(apply)
        fragment = apply.fragment
        now = time.perf_counter()
        round_ = self._sent.pop(fragment, None) if apply.mode is Mode.MIX else None
        if round_ is None:
            round_ = Round(fragment, apply.version, self.step, self.states[fragment].values)
            round_.due = round_.taken = round_.begun = round_.ready = now
        round_.outer_round = apply.version
        round_.asked = now - waited
        round_.fetched = now
        if prepared is not None:
            round_.ready = max(prepared.at, round_.begun)
            round_.traffic.bytes_received = prepared.size
            self.gauges.received += prepared.size
        decision = self.machine.decision
        assert decision is not None
        round_.participants = len(decision.ready)
        if apply.mode is Mode.RESET:
            round_.flags = round_.flags or OUTLIER
        return Apply(round_, copy, apply.mode, apply.share)

    def _send(self, send: rules.Send) -> Iterator[Send]:
        part = send.part
        values = self.states[part.fragment].values
        round_ = Round(part.fragment, part.base + 1, self.step, values, due=time.perf_counter())
        round_.weight = part.weight
        yield Send(round_)
        self._sent[part.fragment] = round_
        self._encoded.append(self.background.submit(partial(self._encode, part, round_)))

    def _say_wait(self, since: float, what: str) -> None:
        """Log what training waits for, at growing intervals."""
        waited = time.monotonic() - since
        if waited < STILL_SECONDS:
            self._said_seconds = 0.0
        elif waited > max(LATE_SECONDS, 2 * self._said_seconds):
            self._said_seconds = waited
            assert self._link is not None
            away = self._link.away_seconds
            place = self._link.run.location
            if away > STILL_SECONDS:
                what = f"the store {place}, which cannot be reached since {away:.0f} s"
            elif time.monotonic() - self.machine.heard_at > STILL_SECONDS:
                command = f"{command_line('islands')} sync {place}"
                what = f"a syncer: start `{command}`, if none is running"
            logger.warning(f"island {self.islands.name}: waiting since {waited:.0f} s for {what}")

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
        """Encode the delta of a part, and pass it to the thread that stores it."""
        assert self._link is not None
        round_.begun = time.perf_counter()
        state = self.states[part.fragment]
        payload = None
        with state.background():
            round_.delta_square = state.finish_delta()
            if math.isfinite(round_.delta_square):
                block_size = self.config.quantization.block_size
                payload = encode(state.delta, Header(part.codec, block_size))
            else:
                round_.flags = NOT_FINITE
        round_.traffic.encoded = time.perf_counter()
        if payload is not None:
            round_.traffic.bytes_sent = payload.numel()
            self.gauges.sent += payload.numel()
        self._link.store(part, payload)

    # --- restart ----------------------------------------------------------------------------------

    def save(self, facts: OuterFacts, mesh: DeviceMesh | None) -> SavedState:
        """Save the copies P. The work since the last part is not saved. After a restart, its
        samples are read again."""
        saved = self.machine.save()
        facts.island = write_saved(saved)
        versions = [one.applied for one in self.machine.fragments]
        facts.fragments = [FragmentFacts(outer_steps=max(0, version)) for version in versions]
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
        self._saved = read_saved(saved.facts.island)
        if self._saved is None:
            self._job = self._job or JobCheckpoint()
        return lines

    def restart(self) -> None:
        self._liveness.wait(self.background.submit(lambda: None))
