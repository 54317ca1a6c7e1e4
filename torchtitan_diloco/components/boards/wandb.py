"""Curves and settings in Weights & Biases."""

from collections.abc import Mapping

import wandb

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.boards.base import Board, Shown


class WeightsAndBiases(Board):
    """Run in a project of Weights & Biases, which a resumed run continues.

    The islands of a run are one group there.
    """

    def __init__(self, project: str, shown: Shown) -> None:
        named = shown.folder / "wandb" / "run-id"
        known = named.read_text() if shown.step and named.exists() else None
        try:
            self._run = wandb.init(
                project=project,
                name=shown.name,
                group=shown.group or None,
                job_type="island" if shown.group else None,
                id=known,
                resume="allow" if known else None,
                dir=str(shown.folder),
                config=dict(shown.settings),
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            raise UserError(
                f'metrics.boards = "wandb:{project}": {error} (`wandb login` logs in, '
                "WANDB_MODE=offline needs no login, WANDB_ENTITY is the owner of the project)"
            ) from error
        named.parent.mkdir(exist_ok=True)  # WANDB_MODE=disabled makes none
        named.write_text(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # values of a step come in several calls

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def add_text(self, step: int, name: str, text: str) -> None:
        self._run.alert(title=name, text=f"step {step}: {text}")

    def close(self) -> None:
        self._run.finish()
