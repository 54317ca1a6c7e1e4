"""Mirror: each finished checkpoint is copied to a store while training goes on.

The first rank of each worker copies the folder of its worker, in a thread. All ranks agree on which
steps are copied, so that each copy gets complete. Islands share a store, which may be that of their
run: each writes below `mirror/NAME/`. A run starts from the mirror if it has a newer
step than `run.folder`. A mirror that fails is named once and at the end, and never stops training.

A run whose folder has no checkpoint may have lost it, or may be another run with a copied config.
The settings in the newest manifest of the mirror decide, before anything is fetched.
"""

import shutil
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

from torchtitan_diloco.base.background import BackgroundThread
from torchtitan_diloco.base.formatting import brief
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.messages import gather_objects
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint_folder import (
    DamagedError,
    Manifest,
    checkpoint_path,
    folder_of_worker,
    step_of,
)
from torchtitan_diloco.components.copies import Copies, Copy, OtherRunError, TakenOverError
from torchtitan_diloco.components.resume import Start, ThisRun, changed_settings, new_identity
from torchtitan_diloco.components.run_folder import lock_folder, set_aside
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.distributed.collectives import on_all_ranks
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.store import StoreError, open_store

PATIENCE_SECONDS = 60.0
"""Time for which each call of the store is tried again."""
RESUME = "checkpoint.resume"
MAY_CHANGE = (
    "training.steps",
    "training.tokens",
    "training.stop_after",
    "training.batch_size",
    "training.global_batch_size",
    "diloco.workers",
    "diloco.link.",
    "parallel.fsdp",
    *({f"checkpoint.{setting.name}" for setting in fields(Checkpoint)} - {RESUME}),
    "metrics.",
    "price.",
    "data.cache_folder",
    "run.preemption",
)
"""Beginnings of the keys that a run may change after it has lost its folder: how long it trains, on
which machines, and what it writes."""
MOST_DIFFERENCES = 8
"""Settings that an error names."""


@dataclass(frozen=True)
class _Seen:
    """What a rank has found in the mirror."""

    run: str = ""
    """Identity of the run whose copies are there."""
    location: str = ""
    problem: str = ""
    """Why the mirror cannot be used, if so."""
    emptiness: str = ""
    """Clause of the log about a location in which nothing was stored before."""
    copies: list[Copy] = field(default_factory=list)


def other_settings(before: str, now: str, resume: str) -> list[str]:
    """Return how settings differ from those of a run that has lost its folder, one line each.

    `before`, `now`: TOML. `resume`: now `checkpoint.resume`, which says where a new run starts.
    """
    ignored = (*MAY_CHANGE, RESUME) if resume == "auto" else MAY_CHANGE
    return changed_settings(before, now, ignored=ignored)


def build_mirror(
    config: Config, world: World, here: ThisRun, toml: str, check: Callable[[Manifest], None]
) -> "Mirror | None":
    """Return the mirror of a run, if it has one. Collective. `here`, `toml`, `check`: as in
    `Mirror`."""
    given = gather_objects(bool(config.checkpoint.mirror), world.control)
    if any(given) and not all(given):
        raise UserError(
            f"checkpoint.mirror is not set on rank {given.index(False)}, but on "
            f"{given.index(True)}: set it on all, to the same place"
        )
    if not config.checkpoint.mirror:
        return None
    each_worker_saves = bool(config.islands.join) or config.diloco.method != "none"
    return Mirror(
        config=config.checkpoint,
        world=world,
        here=here,
        folder=folder_of_worker(Path(config.run.folder).expanduser(), world.worker),
        island=config.islands.name if config.islands.join else "",
        writes=each_worker_saves or world.worker == 0,
        toml=toml,
        check=check,
    )


class Mirror:
    """The mirror of a run: a source of checkpoints at its start (`find`), and a `Copier` of those
    that it saves. Methods that say so are called by all ranks together."""

    def __init__(
        self,
        config: Checkpoint,
        world: World,
        here: ThisRun,
        folder: Path,
        *,
        island: str,
        writes: bool,
        toml: str,
        check: Callable[[Manifest], None],
    ) -> None:
        """Open the mirror.

        Args:
            here: the checkpoints in `run.folder`, where copies are fetched to.
            folder: that of this worker.
            writes: this worker has checkpoints of its own.
            toml: settings of the run.
            check: raises if the run cannot continue from a checkpoint with this manifest.
        """
        self._config = config
        self._toml = toml
        self._check = check
        self._world = world
        self._here = here
        self._folder = folder
        self._prefix = f"mirror/{island}/" if island else ""
        self._is_first = writes and world.rank_in_worker == 0
        self._thread = BackgroundThread("mirror")
        self._copies: Copies | None = None
        self._token = new_identity(world)  # of this start
        self._location = ""
        self._emptiness = ""  # as in `_Seen`
        self._under_way: dict[Path, Future[None]] = {}
        self._begun: Path | None = None
        self._offered: Path | None = None
        self._skipped = 0
        self._failed = 0
        self._problem = ""
        self._is_said = False
        self._is_claimed = False
        self._taken_over = False
        self._lacking: Path | None = None  # checkpoint of this start, which the mirror lacks
        self._newest = -1  # step that was copied last
        self._run = ""
        """Identity of the run."""

    # --- the start --------------------------------------------------------------------------------

    def find(self, start: Start, /) -> Start:
        """Return what the run starts from: `start`, which `run.folder` has, or a newer copy in the
        mirror. It makes the store, if there is none, but writes no copies there and takes nothing
        over, as this start may still be refused. Collective."""
        world = self._world
        self._run = start.run
        group = world.saving
        adopts = not start.goes_on
        # The first rank of the run looks first, and its answer names the run. Then the first ranks
        # of the other workers look whether they see the copies of this run.
        answer = on_all_ranks(group, lambda: self._look(adopts) if world.is_first else _Seen())
        seen = gather_objects(answer, group)[0]
        self._run = seen.run
        self._location = seen.location
        self._emptiness = seen.emptiness
        looks = self._is_first and not world.is_first and not seen.problem
        answer = on_all_ranks(group, lambda: self._look(adopts=False) if looks else _Seen())
        of_others = gather_objects(answer, group)
        problems = [other.problem for other in of_others if other.problem]
        if problem := seen.problem or next(iter(problems), ""):
            if not start.goes_on:
                raise UserError(
                    f"checkpoint.mirror cannot be used: {problem}. run.folder has no checkpoint "
                    "either: make the mirror reachable, or remove the setting"
                )
            self._note_failure(problem, logs=world.is_first)
            return start
        start = self._newer(start, seen.copies)
        known = start.goes_on and start.manifest and Copy.of(start.manifest) in seen.copies
        if start.goes_on and not known:
            self._lacking = start.checkpoint
        return start

    def log_new_run(self) -> None:
        """Log that the run begins anew, as there is no checkpoint that it could go on from."""
        if self._world.is_first:
            # The mirror may have some on a disk that is not mounted.
            logger.info(
                f"mirror: {self._location}{self._emptiness} has no checkpoints, and run.folder has "
                "none: the run begins anew"
            )

    def claim(self) -> None:
        """Let this start, which is about to train, be the one that writes to the mirror, and copy
        the checkpoint that it goes on from, if the mirror lacks it. Collective."""
        on_all_ranks(self._world.saving, self._take_over)
        if self._lacking is not None:
            self._submit(self._lacking)

    def _take_over(self) -> None:
        if not self._is_first or self._copies is None:  # the next save opens the mirror
            return
        try:
            self._copies.take_over(self._token)
        except StoreError as error:
            self._note_failure(str(error))
        else:
            self._is_claimed = True

    def _look(self, adopts: bool) -> _Seen:
        """Open the mirror. `adopts`: as in `_open`."""
        try:
            self._copies = self._open(adopts)
            copies = self._copies
            whole = copies.whole()
            emptiness = ""
            if copies.has_other_files:
                emptiness = ", which had only other files,"
            elif copies.is_new_store:
                emptiness = ", which was just made or was empty,"
            return _Seen(self._run, copies.location, emptiness=emptiness, copies=whole)
        except StoreError as error:
            return _Seen(self._run, problem=str(error))

    def _open(self, adopts: bool = False) -> Copies:
        """Open the store. Raise if the copies of another run are there.

        `adopts`: this run has no checkpoint, and may be the one whose copies are there.
        """
        store = open_store(
            self._config.mirror, patience=PATIENCE_SECONDS, writes=self._prefix, quiet=True
        )
        copies = Copies(store, self._prefix)
        try:
            newest = copies.newest_manifest()
            if newest is not None and newest.run != self._run:
                if not adopts:
                    raise OtherRunError(
                        f"checkpoint.mirror: {copies.location} has the checkpoints of another run "
                        f"({newest.run}) than this worker's ({self._run}): give each run a place "
                        "of its own, the same for all its workers"
                    )
                self._check_same_run(newest, copies.location)
                self._run = newest.run
        except BaseException:
            copies.close()
            raise
        return copies

    def _check_same_run(self, newest: Manifest, location: str) -> None:
        """Raise unless this run may continue from copies of a run with this manifest."""
        self._check(newest)
        differences = other_settings(newest.config, self._toml, self._config.resume)
        if self._config.adopt or not differences:
            return
        shown = "; ".join(differences[:MOST_DIFFERENCES])
        unshown = len(differences) - MOST_DIFFERENCES
        others = f"; and {unshown} more" if unshown > 0 else ""
        other_name, own_name = (
            tomllib.loads(toml)["run"]["name"] for toml in (newest.config, self._toml)
        )
        raise OtherRunError(
            f'checkpoint.mirror: {location} has step {newest.step} of the run "{other_name}" '
            f'({newest.run}), and the settings of this run "{own_name}" in {self._folder.parent} '
            f"differ: {shown}{others}. Give this run a mirror of its own, "
            "or set checkpoint.adopt = true to continue that one with these settings"
        )

    def _newer(self, start: Start, copies: list[Copy]) -> Start:
        """Take the newest copy that is newer than `start` and can be used, or what workers that
        have lost their disks lack of the same one. Collective."""
        tried = False
        own_copy = Copy.of(start.manifest) if start.goes_on and start.manifest else None
        for copy in sorted(copies, reverse=True):
            workers = {*range(min(copy.workers, self._world.workers))}  # that lack this copy
            if copy == own_copy:
                workers -= {*start.holders}
            if not workers or (
                own_copy is not None and copy != own_copy and copy.step <= own_copy.step
            ):
                continue
            tried = True
            started = time.monotonic()
            problem = self._fetch_all(copy, workers)
            if not problem:
                if self._world.worker in workers:  # its checksums have just been compared
                    self._here.verified.add(checkpoint_path(self._folder, copy.step))
                if self._world.is_first:
                    duration = brief(time.monotonic() - started)
                    logger.info(f"step {copy.step} was taken from {self._location} in {duration}")
                adopted_from = "" if start.goes_on else self._location
                return replace(self._here.find(start), adopted_from=adopted_from)
            if self._world.is_first:
                logger.warning(f"{problem}: continuing from an older step")
        if tried and not start.goes_on:
            raise UserError(
                f"checkpoint.mirror: no copy in {self._location} can be used: give another mirror "
                "to start over"
            )
        return self._here.find(start) if tried else start

    def _fetch_all(self, copy: Copy, workers: set[int]) -> str:
        """Fetch a copy on these workers. Return why not, if so. Collective."""
        path = checkpoint_path(self._folder, copy.step)
        wanted = self._is_first and self._world.worker in workers

        def fetch() -> str:
            if not wanted:
                return ""
            assert self._copies is not None
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with lock_folder(self._folder) as lock:
                    if path.exists():
                        logger.warning(f"{path} is kept as {set_aside(path)}")
                    only = frozenset[Path]() if lock.problem else None
                    self._copies.fetch(copy, self._world.worker, path, only)
            except (StoreError, DamagedError) as error:
                return str(error)
            except OSError as error:
                raise UserError(f"run.folder: {path} cannot be written ({error})") from error
            return ""

        group = self._world.saving
        problem = next(filter(None, gather_objects(on_all_ranks(group, fetch), group)), "")
        if problem and wanted:  # on all workers or on none
            shutil.rmtree(path, ignore_errors=True)
        return problem

    # --- while the run trains ---------------------------------------------------------------------

    @property
    def held(self) -> set[Path]:
        """Checkpoints that are being copied, or are about to be, and must stay."""
        return {path for path, copying in [*self._under_way.items()] if not copying.done()}

    def offer(self, path: Path) -> None:
        """Copy a checkpoint that all workers have completed, unless one waits. Collective.

        If a worker is behind, none copies it: each copy gets complete.
        """
        self._offered = path
        waits = any(held != self._begun for held in self.held)
        if not any(gather_objects(waits, self._world.saving)):
            self._submit(path)
        else:
            self._skipped += 1

    def _submit(self, path: Path) -> None:
        if self._is_first and not self._taken_over:
            self._under_way = {held: self._under_way[held] for held in self.held}
            self._under_way[path] = self._thread.submit(partial(self._copy, path))

    def _copy(self, path: Path) -> None:
        """Copy a checkpoint, in the thread of the mirror. Log a failure instead of raising it."""
        self._begun = path
        started = time.monotonic()
        step = step_of(path)
        worker = self._world.worker
        try:
            if self._copies is None:
                self._copies = self._open()
                self._location = self._copies.location
            if not self._is_claimed:
                self._copies.take_over(self._token)
                self._is_claimed = True
            size = self._copies.save(path, worker, self._token)
            self._newest = step
            self._prune(self._copies, step)
        except Exception as error:  # whatever it is, training goes on
            self._taken_over = isinstance(error, TakenOverError)
            self._failed += 1
            reason = str(error) if isinstance(error, ValueError | OSError) else repr(error)
            self._note_failure(f"step {step} of worker {worker} was not copied: {reason}")
        else:
            again = " again" if self._is_said else ""
            self._problem = ""
            self._is_said = False
            seconds = brief(time.monotonic() - started)
            logger.info(f"mirror: step {step}, {size / 1e6:,.1f} MB in {seconds}{again}")

    def _prune(self, copies: Copies, step: int) -> None:
        copies.prune(
            self._world.worker,
            step,
            keep_latest=self._config.keep_latest,
            keep_every=self._config.keep_every,
            workers=self._world.workers,
        )

    def _note_failure(self, problem: str, *, logs: bool = True) -> None:
        self._problem = problem
        if logs and not self._is_said:
            then = "nothing more is copied" if self._taken_over else "the next save tries again"
            logger.warning(f"mirror: {problem}; training continues, and {then}")
        self._is_said = True

    # --- the end ----------------------------------------------------------------------------------

    def finish(self, most_seconds: Callable[[], float]) -> None:
        """Wait for the copy of the last checkpoint, and say what is not copied. Collective.

        `most_seconds`: returns how long this rank may wait. That of the machine that goes away
        first counts.
        """
        gather_objects("", self._world.saving)  # the time until the last rank is here has passed
        seconds = min(gather_objects(most_seconds(), self._world.saving))
        last = self._offered
        if last is not None and last not in self._under_way:  # it was skipped, on all workers
            self._submit(last)
        unfinished = [self._under_way[path] for path in self.held]
        if unfinished:
            aim = "for the last checkpoint to reach the mirror"
            logger.info(f"waiting up to {seconds:.0f} s {aim}")
        late = wait(unfinished, seconds).not_done
        problem = self._problem
        if late:
            problem = f"the last checkpoint was not copied within {seconds:.0f} s"
        is_behind = self._is_first and last is not None and self._newest < step_of(last)
        if is_behind and not problem:
            problem = "it is behind"
        reports = gather_objects(problem, self._world.saving)
        ranks = self._world.ranks_per_worker
        problems = {n // ranks: report for n, report in enumerate(reports) if report}
        if problems and self._world.is_first:
            for worker, report in problems.items():
                logger.warning(
                    f"mirror: the last checkpoint of worker {worker} is only in run.folder: "
                    f"{report} ({self._failed} failed, {self._skipped} skipped while it was busy)"
                )
        elif not problems and self._is_first and self._copies is not None and last is not None:
            try:  # now that this copy is whole
                self._prune(self._copies, step_of(last))
            except StoreError as error:
                logger.warning(f"mirror: old copies were not deleted: {error}")

    def close(self) -> None:
        """Stop copying."""
        if self._copies is not None:
            self._copies.close()
        self._thread.close(timeout=0.0)
