"""Jobs of the syncer with tensors and transfers, each in a thread of its own."""

import hashlib
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.layout import Layout, Shapes, hexadecimal
from torchtitan_diloco.islands.merging import (
    apply_version,
    merge,
    outer_optimizer,
    read_copy,
    read_outer,
)
from torchtitan_diloco.islands.payload import HEADER_BYTES, check_part
from torchtitan_diloco.islands.rules.decision import Decision, Fate
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.jobs import (
    Adopt,
    DeleteObjects,
    Fetch,
    Job,
    Load,
    MergeParts,
    Record,
    Settle,
    Snapshot,
    Upload,
)
from torchtitan_diloco.islands.rules.names import (
    COPY,
    OUTER,
    VERSION,
    Object,
    founding_name,
    history_name,
    part_name,
)
from torchtitan_diloco.islands.rules.note import Part
from torchtitan_diloco.islands.rules.settings import Settings
from torchtitan_diloco.islands.rules.syncer import Syncer
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.islands.scratch import FragmentState, Scratch
from torchtitan_diloco.islands.spares import Spares
from torchtitan_diloco.islands.transfers import AGAIN_SECONDS, UNREADABLE_SECONDS
from torchtitan_diloco.store import AwayError, DamagedObjectError, FullError

VISIBILITY_LOOKS = 10
"""Number of attempts to find an object that is not visible yet."""
LOOK_SECONDS = 0.3
"""Seconds between these attempts."""
NOTICED_SECONDS = 5.0
"""Seconds after which a syncer knows that it is superseded."""
SPARE_PARTS = 8
"""Number of parts whose memory is kept for other parts."""
SPARE_BYTES = 4096
"""Bytes of an object in addition to its values."""

Sleep: TypeAlias = Callable[[float], None]
Result = TypeVar("Result")


class Deliver(Protocol):
    """Calls a function with the machine, and returns its result. Raises an OverError if the term is
    over."""

    def __call__(self, call: Callable[[Syncer], Result], /) -> Result: ...


class OverError(Exception):
    """The term is over: its tasks end."""


def patiently(run: Run, call: Callable[[], Result], sleep: Sleep) -> Result:
    """Repeat a transfer until the store is there, and has room."""
    while True:
        try:
            return call()
        except AwayError:
            sleep(AGAIN_SECONDS)  # the store says so
        except FullError as error:
            run.say_full(error)
            sleep(AGAIN_SECONDS)


class FragmentTasks:
    """Loads and merges fragments. The tasks of a fragment run in order."""

    def __init__(self, run: Run, folder: Path, deliver: Deliver, sleep: Sleep) -> None:
        self._run = run
        self._folder = folder
        self._deliver = deliver
        self._sleep = sleep
        self._lock = threading.Lock()
        self._scratch: Scratch | None = None
        self._settled = dict[int, FragmentState]()
        """States of the versions that count."""
        self._merged = dict[int, FragmentState]()
        """States of versions that do not count yet."""
        self._versions = dict[int, int]()  # of the newest state of each fragment
        self._parts = dict[tuple[str, Part], memoryview]()
        self._spares = Spares(SPARE_PARTS)
        self._contents = dict[tuple[str, int, int], tuple[memoryview, FragmentState]]()
        """Contents to upload by kind, fragment and version, with the state of the version, whose
        memory they may be."""

    def open(self, run: str, shapes: list[Shapes], settings: Settings) -> Scratch:
        """Open the scratch folder of a run."""
        with self._lock:
            if self._scratch is None:
                slots = len(outer_optimizer(settings).rule.slots)
                name = hashlib.sha256(run.encode()).hexdigest()[:16]
                self._scratch = Scratch(self._folder / name, shapes, slots)
            return self._scratch

    @property
    def scratch(self) -> Scratch:
        """Return the scratch folder of the run. The first task opens it, which may be the fetch of
        a part: a new syncer reads notes while it loads the fragments."""
        if self._scratch is not None:
            return self._scratch
        decision = self._deliver(_state_of)
        shapes: list[Shapes] = [shared.shapes for shared in decision.fragments]
        return self.open(decision.run, shapes, decision.settings)

    def layout(self, fragment: int) -> Layout:
        return self.scratch.layouts[fragment]

    def settings(self) -> Settings:
        """Return the settings of the run now."""
        return self._deliver(lambda machine: _state_of(machine).settings)

    def do(self, job: Job) -> None:
        match job:
            case Load():
                self._load(job)
            case MergeParts():
                self._merge(job)
            case Settle():
                self._settle(job)
            case Snapshot():
                self._snapshot(job)

    # --- begin ------------------------------------------------------------------------------------

    def adopt(self, job: Adopt) -> None:
        """Read the copies of a founder."""
        founding = job.founding
        scratch = self.open(founding.run, list(founding.shapes), founding.settings)
        states = list[FragmentState]()
        is_whole = self._are_stored(job)
        for fragment, checksum in enumerate(founding.checksums if is_whole else []):
            states.append(scratch.take(fragment))
            name = founding_name(job.incarnation, fragment)
            is_whole = self._read_founding(name, states[-1], scratch.layouts[fragment]) == checksum
            if not is_whole:
                break
        if is_whole:
            for fragment, state in enumerate(states):
                scratch.keep(state, fragment, 0)
                scratch.hold(state)
                self._settled[fragment] = state
                self._versions[fragment] = 0
                self._contents[COPY, fragment, 0] = state.copy_content(), state
        else:
            self._scratch = None  # another founder may have other fragments
        self._deliver(lambda machine: machine.on_adopted(job.incarnation, founding, is_whole))

    def _are_stored(self, job: Adopt) -> bool:
        """Return whether all copies of a founder are listed. Until then, none is read: at a
        provider, each look would cost the traffic of those that are there."""
        names = {
            founding_name(job.incarnation, number) for number in range(len(job.founding.shapes))
        }
        prefix = founding_name(job.incarnation)
        listed = patiently(self._run, lambda: self._run.store.list(prefix), self._sleep)
        return names <= {entry.name for entry in listed}

    def _read_founding(self, name: str, state: FragmentState, layout: Layout) -> str:
        """Read a copy of a founder, and return its checksum, or nothing if there is none."""
        most = HEADER_BYTES + 4 * layout.values
        try:
            content = patiently(self._run, lambda: self._run.large.get(name, most), self._sleep)
            if content is None:
                return ""
            read_copy(content, state.published)
        except (DamagedObjectError, MalformedError):
            return ""
        state.theta.copy_(state.published)
        for slot in state.slots:
            slot.zero_()
        state.complete(steps=0)
        return hexadecimal(layout.checksum(state.published))

    def _load(self, job: Load) -> None:
        """Load the newest version, from the files of this machine or from the store."""
        scratch = self.scratch
        version = job.versions[-1].version if job.versions else job.copy.version
        state = scratch.find(job.fragment, version, job.checksum)
        if state is None:
            try:
                state = self._load_objects(job, version)
            except (DamagedObjectError, MalformedError) as error:
                # One that is superseded, whose objects the other one deletes, learns of it with its
                # next decision, which is due each second.
                self._sleep(NOTICED_SECONDS)
                raise UserError(
                    f"fragment {job.fragment} of the run is damaged ({error}): put back a copy of "
                    "the store, or begin at an empty location from the newest checkpoint of an "
                    "island, with --islands.found true"
                ) from error
            scratch.keep(state, job.fragment, version)
        scratch.drop_others(job.fragment, version)
        self._settled[job.fragment] = state
        self._versions[job.fragment] = version
        self._deliver(lambda machine: machine.on_loaded(job.fragment))

    def _load_objects(self, job: Load, version: int) -> FragmentState:
        state = self.scratch.take(job.fragment)
        layout = self.layout(job.fragment)
        most = SPARE_BYTES + 4 * layout.values
        read_copy(self._get(job.copy, most), state.published)
        for stored in job.versions:
            apply_version(state.published, self._get(stored, most))
        if hexadecimal(layout.checksum(state.published)) != job.checksum:
            raise MalformedError(f"version {version} has other bits")
        state.theta.copy_(state.published)
        for slot in state.slots:
            slot.zero_()
        steps = 0
        if job.outer is not None:
            content = self._get(job.outer, most * (1 + len(state.slots)))
            steps = read_outer(content, state)
            if job.outer.version != version:  # the momentum is older, the residual is lost
                state.theta.copy_(state.published)
        state.complete(steps)
        return state

    def _get(self, stored: Object, most: int) -> bytearray:
        """Return a content that a decision names. Raise a MalformedError if it is missing."""
        for _ in range(VISIBILITY_LOOKS):
            content = patiently(
                self._run, lambda: self._run.large.get(stored.name, most), self._sleep
            )
            if content is not None:
                return content
            self._sleep(LOOK_SECONDS)
        raise MalformedError(f"{stored.name} is no longer stored")

    # --- merge ------------------------------------------------------------------------------------

    def memory_for(self, part: Part) -> memoryview:
        """Return memory for a part, as far as the size that its note declares is possible."""
        most = SPARE_BYTES + 4 * self.layout(part.fragment).values
        return self._spares.take(min(part.size, most))

    def keep_part(self, incarnation: str, part: Part, content: memoryview) -> None:
        """Keep a part until it is merged. `content`: in memory from `memory_for`."""
        with self._lock:
            self._parts[incarnation, part] = content

    def give_back(self, content: memoryview) -> None:
        """Let the memory of a part that was read be used for others."""
        self._spares.give(content)

    def forget_parts(self, needed: Collection[tuple[str, Part]]) -> None:
        """Forget all parts except those that wait or are being merged."""
        with self._lock:
            for key in [key for key in self._parts if key not in needed]:
                self._spares.give(self._parts.pop(key))

    def _merge(self, job: MergeParts) -> None:
        fragment = job.fragment
        scratch = self.scratch
        assert fragment not in self._merged, "two versions beside the one that counts"
        before = self._settled[fragment]
        after = scratch.take(fragment)
        with self._lock:
            parts = [
                (self._parts[waiting_part.incarnation, waiting_part.part], waiting_part.part.weight)
                for waiting_part in job.parts
            ]
        merged = merge(
            before,
            after,
            self.layout(fragment),
            parts,
            self.settings(),
            weight_of_all=job.weight_of_all,
            clock=job.clock,
        )
        if not self._deliver(lambda machine: machine.on_norms(fragment, merged.norms)):
            scratch.release(after)  # they are merged again without those that must not count
            return
        if merged.content is None:
            scratch.release(after)
            self._deliver(lambda machine: machine.on_merged(fragment, job.version, None))
            return
        checksum = hexadecimal(self.layout(fragment).checksum(after.published))
        scratch.keep(after, fragment, job.version)
        self._merged[fragment] = after
        self._versions[fragment] = job.version
        scratch.hold(after)
        with self._lock:
            self._contents[VERSION, fragment, job.version] = merged.content, after
        self._deliver(lambda machine: machine.on_merged(fragment, job.version, checksum))

    def _settle(self, job: Settle) -> None:
        """Make the newest version the one to go on from, as it counts."""
        assert self._versions[job.fragment] == job.version
        before = self._settled[job.fragment]
        self._settled[job.fragment] = self._merged.pop(job.fragment)
        self.scratch.release(before)

    def _snapshot(self, job: Snapshot) -> None:
        """Keep copy and outer state until they are uploaded."""
        state = self._merged.get(job.fragment, self._settled[job.fragment])
        assert self._versions[job.fragment] == job.version
        # Once for the copy, once for the outer state.
        self.scratch.hold(state)
        self.scratch.hold(state)
        with self._lock:
            self._contents[COPY, job.fragment, job.version] = state.copy_content(), state
            self._contents[OUTER, job.fragment, job.version] = state.outer_content(), state
        self._deliver(lambda machine: machine.on_snapshot(job.fragment, job.version))

    # --- contents to upload -----------------------------------------------------------------------

    def content_of(self, stored: Object) -> memoryview:
        with self._lock:
            return self._contents[stored.kind, stored.fragment, stored.version][0]

    def forget_content(self, stored: Object) -> None:
        with self._lock:
            _, state = self._contents.pop((stored.kind, stored.fragment, stored.version))
        self.scratch.release(state)


def _state_of(machine: Syncer) -> Decision:
    assert machine.state is not None
    return machine.state


def _listened(machine: Syncer) -> float:
    return machine.presence.listened


class TransferTasks:
    """Fetches parts, and uploads objects."""

    def __init__(
        self,
        run: Run,
        fragments: FragmentTasks,
        deliver: Deliver,
        sleep: Sleep,
        supersede: Callable[[], None],
    ) -> None:
        self._run = run
        self._fragments = fragments
        self._deliver = deliver
        self._sleep = sleep
        self._supersede = supersede

    def fetch(self, job: Fetch) -> None:
        """Fetch a part and judge its bytes."""
        part = job.part
        name = part_name(job.incarnation, part.fragment, part.number)
        fate = Fate.UNREADABLE
        give_up_at = self._deliver(_listened) + UNREADABLE_SECONDS

        def sleep_or_give_up(seconds: float) -> None:
            self._sleep(seconds)
            if self._deliver(_listened) > give_up_at:  # it is not the store that is away
                raise DamagedObjectError(f"{name} cannot be read")

        try:
            for _ in range(VISIBILITY_LOOKS):
                content = patiently(self._run, partial(self._get, name, part), sleep_or_give_up)
                if content is not None:
                    fate = self._judge(job, content)
                    break
                self._sleep(LOOK_SECONDS)
        except DamagedObjectError:
            pass
        self._deliver(lambda machine: machine.on_part(job.incarnation, part, fate))

    def _get(self, name: str, part: Part) -> memoryview | None:
        """Return the content of a part. Each attempt has memory of its own, as chunks of one that
        has failed may still be on their way."""
        return self._run.large.get(name, into=self._fragments.memory_for(part))

    def _judge(self, job: Fetch, content: memoryview) -> Fate:
        part = job.part
        layout = self._fragments.layout(part.fragment)
        try:
            check_part(content, part, layout, self._fragments.settings().block_size)
        except MalformedError:
            self._fragments.give_back(content)
            return Fate.MALFORMED
        self._fragments.keep_part(job.incarnation, part, content)
        return Fate.NONE

    def upload(self, job: Upload) -> None:
        stored = job.stored
        content = self._fragments.content_of(stored)
        create = partial(self._run.large.create, stored.name, content)
        if not patiently(self._run, create, self._sleep):
            self._supersede()
            return
        self._fragments.forget_content(stored)
        self._deliver(lambda machine: machine.on_uploaded(stored))

    def do(self, job: Job) -> None:
        match job:
            case Record():
                name = history_name(job.number)
                patiently(self._run, lambda: self._run.store.create(name, job.content), self._sleep)
                self._deliver(lambda machine: machine.on_recorded(job.number))
            case DeleteObjects():
                for name in job.names:
                    patiently(self._run, partial(self._run.large.delete, name), self._sleep)
