"""What the trainer says about the workers while a run goes on, and where a process hangs."""

import faulthandler
import os
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from torchtitan_diloco.base.hardware import GLOO_INTERFACE, write_whole
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.process import STACKS_SIGNAL
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.records import VerdictRecord
from torchtitan_diloco.components.telemetry import Telemetry
from torchtitan_diloco.config.schema import format_value
from torchtitan_diloco.diagnosis.kinds import Verdict
from torchtitan_diloco.diagnosis.verdicts import Judge, Observation, without_short_of_cores
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.data_parallel import OuterLoop
from torchtitan_diloco.diloco.gloo_peers import GlooPeers
from torchtitan_diloco.diloco.reports import Reports
from torchtitan_diloco.diloco.streaming import StreamingDiLoCo
from torchtitan_diloco.diloco.vitals import Report, VerdictKind
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.planner.ladder import settings_that_fit

REPEAT_SECONDS = 60.0
"""Seconds between two lines about a verdict."""
QUIET_SECONDS = 10.0
"""Seconds without a round after which it is asked who is missing."""
STACKS_SECONDS = 60.0
"""Least seconds of a step that has its stacks written down."""
STACKS_STEPS = 20
"""It also takes this multiple of the usual time."""
MISSING = {VerdictKind.STOPPED, VerdictKind.HUNG, VerdictKind.STUCK, VerdictKind.NO_ROOM}
"""Every worker logs them, as the first one may be the culprit."""
LOOPBACKS = {"lo", "lo0"}
"""Names of the interface on Linux and macOS."""
OF_RANKS = {VerdictKind.DATA, VerdictKind.SAVE}
"""What the ranks of a worker have each for itself. The first one's compute contains waits for the
others."""


class Diagnosis:
    """Call `after_step` for every step.

    The first rank judges the workers. The other ranks of its worker judge what they do alone.
    """

    def __init__(
        self,
        outer: OuterLoop,
        world: World,
        telemetry: Telemetry,
        folder: Path,
        *,
        has_mirror: bool,
    ) -> None:
        """Watch the outer loop of this rank.

        `folder`: the folder of the run. `has_mirror`: whether `checkpoint.mirror` is set, which
        the settings in this folder leave out.
        """
        self._outer = outer if isinstance(outer, StreamingDiLoCo) else None
        self._telemetry = telemetry
        self._world = world
        self._folder = folder
        self._has_mirror = has_mirror
        self._has_links = not _is_on_loopback(self._outer)
        self._judge = Judge(has_links=self._has_links)
        self._said = 0.0
        self._judged = time.monotonic()
        self._config: DiLoCoConfig | None = None
        self._rounds = 0
        self._fits = True
        if self._outer is not None:
            self._outer.peers.reports.watcher = self.missing

    def after_step(self, step: int) -> None:
        rank = self._world.rank_in_worker
        outer = self._outer
        if outer is None:
            return
        reports = outer.peers.reports
        reports.vitals = self._telemetry.vitals()
        if rank and self._world.worker:
            return
        now = time.monotonic()
        has_round = bool(self._telemetry.applied)
        if not has_round and now < self._judged + QUIET_SECONDS:
            return
        suffix = f", rank {rank}" if rank else ""
        latest = {name + suffix: report for name, report in reports.latest().items()}
        if has_round:
            self._judged = now
            if self._world.is_first and self._has_links:
                self._check_that_it_fits(latest, outer)
            cycle = outer.config.sync_every * reports.vitals.step
            observed = Observation(latest, step=step, now=now, cycle=cycle)
        else:  # of islands, some may be the reason
            observed = Observation(latest, step=step, now=now)
        for verdict in self._judge.hear(observed):
            if not rank or verdict.cause.kind in OF_RANKS:
                self._say(verdict, step)
        for action in reports.take_actions():
            self._record(
                step,
                since=step,
                what=action.what,
                culprit=action.culprit,
                evidence=action.evidence,
                over=action.over,
            )
        standing = [] if rank else self._tell_others(reports)
        if standing and time.monotonic() > self._said + REPEAT_SECONDS:
            for verdict in standing:
                if verdict.cause.kind is not VerdictKind.LOAD:  # once is enough
                    self._say(verdict)

    def missing(self, reports: Mapping[str, Report]) -> None:
        """Say for whom training waits long (`Reports.watcher`)."""
        assert self._outer is not None
        observed = Observation(reports, step=self._outer.step_count, now=time.monotonic())
        for verdict in self._judge.hear(observed):
            self._say(verdict, observed.step)
        self._tell_others(self._outer.peers.reports)

    def _tell_others(self, reports: Reports) -> list[Verdict]:
        standing = list(self._judge.verdicts.values())
        reports.say([f"{verdict.cause.culprit}: {verdict.cause.kind}" for verdict in standing])
        return standing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Add the standing verdicts to an error, which launchers and their logs show.

        An error for users names its cause, which is not a lack of cores.
        """
        if error is None:
            return
        for verdict in self._judge.verdicts.values():
            if verdict.cause.kind is not VerdictKind.LOAD or not isinstance(error, UserError):
                error.add_note(str(verdict))

    def _check_that_it_fits(self, reports: Mapping[str, Report], outer: StreamingDiLoCo) -> None:
        """Warn if the transfers of a cycle take longer than its steps: at once at the start, and
        again after a change of the settings. What workers that are short of cores have measured
        says nothing about the links."""
        config = outer.config
        fragments = len(outer.fragments)
        if config != self._config:  # what was measured is of the settings before, for two cycles
            self._rounds = 0 if self._config else 2 * fragments
            self._fits = True
            self._config = config
        self._rounds += 1
        known = {name: report.vitals for name, report in reports.items() if report.vitals.step > 0}
        judged = without_short_of_cores(list(reports), known)
        seconds_of = {name: vitals.longest_transfer for name, vitals in judged.items()}
        # Seconds of the transfers of a cycle, as a share of the seconds of its steps.
        shares = {
            name: seconds / config.sync_every / judged[name].step
            for name, seconds in seconds_of.items()
        }
        name = max(shares, key=shares.__getitem__, default="")
        if self._rounds <= 2 * fragments or not self._fits or shares.get(name, 0.0) <= 1:
            return
        self._fits = False
        step = judged[name].step
        fitting = settings_that_fit(config, fragments, transfers=seconds_of[name], step=step)
        logger.warning(
            f"{name} needs {seconds_of[name]:.3g} s to exchange all fragments once, but has only "
            f"{config.sync_every * step:.3g} s of training to hide this behind, so training has "
            f"to wait. These settings fit: {outer.peers.reports.advise(fitting)}"
        )
        if isinstance(outer.peers, GlooPeers):  # islands change their settings while they run
            self._write_settings(fitting)

    def _write_settings(self, settings: Mapping[str, object]) -> None:
        """Write a config with which this run goes on with other settings."""
        folder = self._folder.resolve()
        path = folder / "settings-that-fit.toml"
        with suppress(OSError):  # a full disk
            changes = {"extends": "config.toml", "run.folder": str(folder), **settings}
            lines = [f"{key} = {format_value(value)}\n" for key, value in changes.items()]
            write_whole(path, "".join(lines).encode())
            mirror = " and your --checkpoint.mirror" if self._has_mirror else ""
            logger.warning(
                "to go on with these settings, start again with "
                f"--config {shlex.quote(str(path))}{mirror}"
            )

    def _say(self, verdict: Verdict, step: int | None = None) -> None:
        """Log a verdict, and write a record after the step at which it begins or ends."""
        self._said = time.monotonic()
        world = self._world
        if world.is_first or world.rank_in_worker or verdict.cause.kind in MISSING:
            (logger.info if verdict.over else logger.warning)(str(verdict))
        if step is not None:
            kind, culprit = verdict.cause
            self._record(
                step,
                since=verdict.since,
                what=kind,
                culprit=culprit,
                evidence=verdict.evidence,
                over=verdict.over,
            )

    def _record(
        self, step: int, *, since: int, what: str, culprit: str, evidence: str, over: bool
    ) -> None:
        record = VerdictRecord(
            step,
            time=time.time(),
            what=what,
            culprit=culprit,
            since=since,
            evidence=evidence,
            over=over,
        )
        self._telemetry.files.write(record)


def _is_on_loopback(outer: StreamingDiLoCo | None) -> bool:
    """Return whether the workers of a job exchange inside one machine, where only the cores and the
    memory make a transfer slow."""
    if outer is None or not isinstance(outer.peers, GlooPeers):
        return False
    interface = outer.config.link.interface or os.environ.get(GLOO_INTERFACE, "")
    return interface in LOOPBACKS


class Stacks:
    """Writes the stacks of all threads to a file of this rank if a step hangs, and on SIGUSR2."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Open the file. `folder`: that of the worker. `rank`: the number of this rank in it."""
        self.path = folder / f"stacks-{rank}.txt"
        self._file: IO[str] | None = None
        with suppress(OSError):  # a full disk
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a")
            faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)
        self._written = self._size()

    def _size(self) -> int:  # of the open file, as somebody may delete the path
        return os.fstat(self._file.fileno()).st_size if self._file is not None else 0

    def expect_step(self, usual: float) -> None:
        """Expect the end of a step. `usual`: seconds of a step, 0 if they are not known yet."""
        if self._file is not None and usual:
            limit = max(STACKS_SECONDS, STACKS_STEPS * usual)
            faulthandler.dump_traceback_later(limit, file=self._file)

    def expect_nothing(self) -> None:
        """Expect nothing, as between two steps."""
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None and (size := self._size()) > self._written:
            self._written = size
            logger.warning(f"a step hung, or SIGUSR2 came: the stacks are in {self.path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            if not self._size():
                self.path.unlink(missing_ok=True)
            self._file.close()
