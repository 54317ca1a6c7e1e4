"""The interface of a board."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError, cause_of


@dataclass(frozen=True)
class Shown:
    """What a board is told about the worker that it shows."""

    folder: Path
    """Folder of the worker, where the board writes its files."""
    step: int
    """Step after which the worker starts or resumes."""
    workers: int
    """Number of workers of the job."""
    settings: Mapping[str, Any]
    group: str = ""
    """Id of the run that an island is in: the boards of all its islands belong together."""

    @property
    def name(self) -> str:
        """Return the name of the folder of the run, or of the island."""
        return self.folder.parent.name


class Board(ABC):
    """Shows the numbers of one worker. Nothing here may wait for a network for long.

    Training goes on after an error, and the next call is made as usual.
    """

    @abstractmethod
    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Show some values of a step, by their names in the records."""

    @abstractmethod
    def add_text(self, step: int, name: str, text: str) -> None:
        """Show a text, such as a verdict."""

    def add_sample(self, step: int, text: str) -> None:
        """Show a text that the model wrote, which may have several lines. By default, as others."""
        self.add_text(step, "sample", text)

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""


class GuardedBoard(Board):
    """A board that logs its first error, and never ends training by one."""

    def __init__(self, name: str, build: Callable[[], Board], *, is_new: bool) -> None:
        """Build the board, and guard it.

        `name`: of the board, for the log. `is_new`: whether the run begins. A mistake of the user
        is an error then, and later one of the board.
        """
        self._name = name
        self._failed = False
        self._board: Board | None = None
        with self._guarding(UserError if is_new else ()):
            self._board = build()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        with self._guarding():
            if self._board is not None:
                self._board.add(step, values)

    def add_text(self, step: int, name: str, text: str) -> None:
        with self._guarding():
            if self._board is not None:
                self._board.add_text(step, name, text)

    def add_sample(self, step: int, text: str) -> None:
        with self._guarding():
            if self._board is not None:
                self._board.add_sample(step, text)

    def close(self) -> None:
        with self._guarding():
            if self._board is not None:
                self._board.close()

    @contextmanager
    def _guarding(
        self, raised: type[Exception] | tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Log the first error of the body, unless it is one to be raised."""
        try:
            yield
        except raised:
            raise
        except Exception as error:
            if not self._failed:
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                logger.warning(
                    f"{self._name}: {kind}{cause_of(error)}; its curves have gaps, the records "
                    "do not depend on it"
                )
            self._failed = True
