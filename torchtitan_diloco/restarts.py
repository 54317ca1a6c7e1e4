"""Starting a crashed run again, from its latest checkpoint."""

from pathlib import Path

from torchtitan_diloco.components.checkpoint_folders import complete_checkpoints, step_of
from torchtitan_diloco.config.schema import Checkpoint

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 60.0


class NotRestartedError(Exception):
    """A crashed run is not started again, for the reason in the message."""


class Restarts:
    """Decides after each crash whether and where the run goes on.

    `limit` is `run.restarts`. `note` is the file in which training processes write the run folder.
    """

    def __init__(self, limit: int, checkpoint: Checkpoint, note: Path) -> None:
        self._limit, self._config, self._note = limit, checkpoint, note
        self._started_from: int | None = None  # step of a checkpoint, or 0 for the beginning
        self._in_a_row = 0  # crashes since the last new checkpoint
        self._reasons: list[str] = []
        self.pause_seconds = 0.0
        """Seconds before the next start: a machine that has failed may need some time."""
        self.announcement = self.summary = ""
        """Line on what comes next, and on how often and why the run was started again so far."""

    def after_crash(self, reason: str) -> list[str]:
        """Return the arguments that resume the run, or raise NotRestartedError."""
        if not (self._config.every or self._config.every_minutes):
            raise NotRestartedError("it saves no checkpoints while it trains")
        if not (folder := self._folder()):
            raise NotRestartedError("it had not begun to train")
        latest = self.latest_checkpoint()
        if latest is None and self._config.resume not in ("auto", "strict"):
            raise NotRestartedError("it had saved no checkpoint")
        step = 0 if latest is None else step_of(latest)
        origin = f"the checkpoint of step {step}" if step else "the beginning"
        self._in_a_row = self._in_a_row + 1 if step == self._started_from else 1
        self._started_from = step
        if self._in_a_row > self._limit:
            times = f"{self._limit} restarts" if self._limit > 1 else "a restart"
            raise NotRestartedError(f"{times} from {origin} brought no new checkpoint")
        pause = FIRST_PAUSE_SECONDS * 2.0 ** (self._in_a_row - 1)
        self.pause_seconds = min(pause, LONGEST_PAUSE_SECONDS)
        self.announcement = (
            f"starting again from {origin} in {self.pause_seconds:g} s "
            f"(restart {self._in_a_row} of {self._limit} without a new checkpoint)"
        )
        self._reasons.append(reason)
        times = "once" if len(self._reasons) == 1 else f"{len(self._reasons)} times"
        self.summary = f"started again {times}, after: {'; '.join(self._reasons)}"
        resume = "strict" if self._config.resume == "strict" else "auto"
        return ["--run.folder", folder, "--checkpoint.resume", resume]

    def latest_checkpoint(self) -> Path | None:
        folder = self._folder()
        found = complete_checkpoints(Path(folder)) if folder else []
        return found[-1] if found else None

    def _folder(self) -> str:
        return self._note.read_text(encoding="utf-8") if self._note.exists() else ""
