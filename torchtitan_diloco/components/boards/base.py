"""The interface of a board."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    """Shows the numbers of one worker. Nothing here may wait for a network for long."""

    @abstractmethod
    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Show some values of a step, by their names in the records."""

    @abstractmethod
    def add_text(self, step: int, name: str, text: str) -> None:
        """Show a text, such as a verdict."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""
