"""Programs that show the curves of a run: one file each.

To add a board, write a class of `Board` (base.py), and a line of `BOARDS` in config/parts.py.
"""

from functools import partial

from torchtitan_diloco.base.registry import find
from torchtitan_diloco.components.boards.base import Board, GuardedBoard, Shown
from torchtitan_diloco.config.parts import BOARDS, BoardEntry
from torchtitan_diloco.config.schema import Metrics

__all__ = ["Board", "Shown", "open_boards"]


def open_boards(config: Metrics, shown: Shown, *, of_run: bool) -> list[GuardedBoard]:
    """Open the boards of a worker. `of_run`: it shows the numbers of the run, or of its island.

    Each is imported when it is used, as that takes up to seconds.
    """
    opened = []
    for name in config.boards:
        chosen = find(BOARDS, name)
        assert chosen is not None, "the settings were checked"
        entry, text = chosen
        if of_run or entry.of_each_worker:
            build = partial(_build, entry, [text] if entry.takes else [], shown)
            opened.append(GuardedBoard(name, build, is_new=shown.step == 0))
    return opened


def _build(entry: BoardEntry, texts: list[str], shown: Shown) -> Board:
    board: Board = entry.load()(*texts, shown)
    return board
