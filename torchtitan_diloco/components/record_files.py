"""What shows a run: metrics.jsonl, the boards, and a trace of the latest rounds."""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from torchtitan_diloco.components.records import Record, RoundRecord, to_line
from torchtitan_diloco.components.timeline import write_trace
from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.utils import logger, read_json_lines

if TYPE_CHECKING:
    from torchtitan_diloco.components.board import Board


class RecordFiles:
    """Writes records to the folder of a run; to nothing if it is None.

    A run that was resumed after `step` does not keep the records of later steps, which it repeats.
    A full disk loses records, but does not end the run. The boards show `settings`.
    """

    def __init__(
        self, config: Metrics, folder: Path | None, step: int, settings: Mapping[str, Any]
    ) -> None:
        self._folder = folder
        self._lines: TextIO | None = None
        self._boards: list[Board] = []
        self._failed = False
        self._writing = threading.Lock()
        if folder is None:
            return
        path = folder / "metrics.jsonl"
        drop_records_after(path, step)
        self._lines = path.open("a", buffering=1, encoding="utf-8")
        if config.tensorboard or config.wandb:
            from torchtitan_diloco.components import board  # slow to import

            self._boards = board.open_boards(config, folder, step, settings)

    def write(
        self, line: msgspec.Struct | Mapping[str, Any], step: int = 0, scalars: Record | None = None
    ) -> None:
        """Write a line of JSON and the curves of a step."""
        with self._tolerating_a_full_disk():
            if self._lines is not None:
                self._lines.write(to_line(line))
            for board in self._boards:
                board.add(step, scalars or {})

    def write_trace(self, rounds: Sequence[RoundRecord]) -> None:
        """Write a trace file of these rounds."""
        if self._folder is not None and rounds:
            with self._tolerating_a_full_disk():
                write_trace(self._folder / "traces" / "fragments.json", rounds)

    def close(self) -> None:
        for opened in (self._lines, *self._boards):
            with suppress(OSError):
                if opened is not None:
                    opened.close()

    @contextmanager
    def _tolerating_a_full_disk(self) -> Iterator[None]:
        try:
            with self._writing:  # silence is recorded by a thread of its own
                yield
        except OSError as error:
            if not self._failed:
                reason = f"cannot write records to {self._folder} ({error.strerror})"
                logger.error(f"{reason}; they are lost until there is room again")
            self._failed = True


def drop_records_after(path: Path, step: int) -> None:
    """Drop records of steps that a resumed run repeats. If it starts over, put them all aside."""
    if not path.exists():
        return
    if step == 0:
        names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        path.rename(aside)
        logger.warning(
            f"{path.parent} holds a run without a checkpoint, which starts over; its records are "
            f"kept in {aside.name}"
        )
        return
    records, unreadable = read_json_lines(path)
    known = [record for record in records if isinstance(record.get("step"), int)]
    unreadable += len(records) - len(known)
    if unreadable:
        logger.warning(f"{unreadable} lines of {path} cannot be read and are left out")
    kept = [to_line(record) for record in known if record["step"] <= step]
    new = path.with_suffix(".new")
    new.write_text("".join(kept), encoding="utf-8")
    new.replace(path)
