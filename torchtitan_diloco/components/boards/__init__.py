"""Programs that show the curves of a run: one file each.

To add a board, write a class of `Board` (base.py) in a file here, with a setting in `Metrics`
(config/schema.py), and open it in `open_boards`. If it needs a package, add an extra to
pyproject.toml, and a line to `missing` in preflight.py.
"""

from torchtitan_diloco.components.boards.base import Board, Shown
from torchtitan_diloco.config.schema import Metrics

__all__ = ["Board", "Shown", "open_boards"]


def open_boards(config: Metrics, shown: Shown, *, of_run: bool) -> list[Board]:
    """Open the boards of a worker. `of_run`: it shows the numbers of the run, or of its island.

    Each is imported when it is used, as that takes up to seconds.
    """
    boards: list[Board] = []
    if config.tensorboard:
        from torchtitan_diloco.components.boards.tensorboard import TensorBoard

        boards.append(TensorBoard(shown))
    if config.wandb and of_run:
        from torchtitan_diloco.components.boards.wandb import WeightsAndBiases

        boards.append(WeightsAndBiases(config.wandb, shown))
    if config.mlflow and of_run:
        from torchtitan_diloco.components.boards.mlflow import MLflow

        boards.append(MLflow(config.mlflow, shown))
    return boards
