"""Starting a crashed run again, from its latest checkpoint."""

from pathlib import Path

from torchtitan_diloco.components.checkpoint_folders import complete_checkpoints, step_of
from torchtitan_diloco.config.schema import Checkpoint

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 60.0


class NotRestartedError(Exception):
    """A crashed run is not started again. The message says why."""


class Restarts:
    """Decides after each crash whether and where the run goes on.

    `limit` is `run.restarts`. `note` is the file in which training processes write the run folder.
    """

    def __init__(self, limit: int, checkpoint: Checkpoint, note: Path) -> None:
        self._limit, self._config, self._note = limit, checkpoint, note
        self._started_from: int | None = None
        """Step of the checkpoint that the last restart began with; 0 for the beginning."""
        self._in_a_row = 0
        """Crashes since the last new checkpoint."""
        self.reasons: list[str] = []
        """The crash before each restart."""

    def after_crash(self, reason: str) -> list[str]:
        """Return the arguments that resume the run, or raise NotRestartedError."""
        saves = self._config.every or self._config.every_minutes
        if not saves:
            raise NotRestartedError("it saves no checkpoints while it trains")
        if not (folder := self._folder()):
            raise NotRestartedError("it had not begun to train")
        latest = _latest_checkpoint(folder)
        if latest is None and self._config.resume not in ("auto", "strict"):
            raise NotRestartedError("it had saved no checkpoint")
        step = 0 if latest is None else step_of(latest)
        self._in_a_row = self._in_a_row + 1 if step == self._started_from else 1
        self._started_from = step
        if self._in_a_row > self._limit:
            times = f"{self._limit} restarts" if self._limit > 1 else "a restart"
            raise NotRestartedError(f"{times} from {self.origin} brought no new checkpoint")
        self.reasons.append(reason)
        resume = "strict" if self._config.resume == "strict" else "auto"
        return ["--run.folder", folder, "--checkpoint.resume", resume]

    def last_saved(self) -> str:
        """Return the end of a sentence that names the latest checkpoint of the run."""
        latest = _latest_checkpoint(self._folder())
        return f"; the latest checkpoint is {latest}" if latest else "; no checkpoint was saved"

    def _folder(self) -> str:
        return self._note.read_text(encoding="utf-8") if self._note.exists() else ""

    @property
    def origin(self) -> str:
        step = self._started_from
        return f"the checkpoint of step {step}" if step else "the beginning"

    @property
    def pause_seconds(self) -> float:
        """Seconds before the next start: a machine that has failed may need some time."""
        return min(FIRST_PAUSE_SECONDS * 2.0 ** (self._in_a_row - 1), LONGEST_PAUSE_SECONDS)

    def announcement(self) -> str:
        return (
            f"starting again from {self.origin} in {self.pause_seconds:g} s "
            f"(restart {self._in_a_row} of {self._limit} without a new checkpoint)"
        )

    def summary(self) -> str:
        """Return how often and why the run was started again, in one line; empty if it was not."""
        count = len(self.reasons)
        times = "once" if count == 1 else f"{count} times"
        return f"started again {times}, after: {'; '.join(self.reasons)}" if count else ""


def _latest_checkpoint(folder: str) -> Path | None:
    found = complete_checkpoints(Path(folder)) if folder else []
    return found[-1] if found else None
