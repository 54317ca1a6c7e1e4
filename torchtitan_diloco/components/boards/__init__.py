"""Programs that show the curves of a run: one file each.

To add a board, write a class of `Board` (base.py) in a file here, with a setting in `Metrics`
(config/schema.py), and open it in `open_boards`. If it needs a package, add an extra to
pyproject.toml, and a line to `missing` in launching/preflight.py.
"""

from torchtitan_diloco.components.boards.base import Board, GuardedBoard, Shown
from torchtitan_diloco.config.schema import Metrics

__all__ = ["Board", "Shown", "open_boards"]


def open_boards(config: Metrics, shown: Shown, *, of_run: bool) -> list[GuardedBoard]:
    """Open the boards of a worker. `of_run`: it shows the numbers of the run, or of its island.

    Each is imported when it is used, as that takes up to seconds.
    """

    def tensorboard() -> Board:
        from torchtitan_diloco.components.boards.tensorboard import TensorBoard

        return TensorBoard(shown)

    def wandb() -> Board:
        from torchtitan_diloco.components.boards.wandb import WeightsAndBiases

        return WeightsAndBiases(config.wandb, shown)

    def mlflow() -> Board:
        from torchtitan_diloco.components.boards.mlflow import MLflow

        return MLflow(config.mlflow, shown)

    chosen = {
        "TensorBoard": tensorboard if config.tensorboard else None,
        "Weights & Biases": wandb if config.wandb and of_run else None,
        "MLflow": mlflow if config.mlflow and of_run else None,
    }
    is_new = shown.step == 0
    return [
        GuardedBoard(name, build, is_new=is_new)
        for name, build in chosen.items()
        if build is not None
    ]
