"""Optimizers, learning-rate schedules, sources of text and boards, by the names in the settings.

To add one, write a line here, or in a module of your own that `run.imports` names
(docs/own-parts.md). An entry of a dict says where the code is; nothing of it is imported before it
is used, as most of it needs PyTorch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchtitan_diloco.base.registry import Entry


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry(Entry):
    """An inner optimizer. `build(model, config, total_steps, **options)` returns it.

    `config`: the section [optimizer]. If it has the attributes `grad_scale` and `found_inf`, it
    divides gradients by the first and changes nothing if the second is 1, as fused AdamW does. For
    another one, both is done before its step, for which the host waits for the gradient norm.
    """

    state_bytes: float = 8
    """Bytes of its state per parameter, for the estimate of memory."""
    block_state_bytes: float | None = None
    """Those per parameter of the blocks, if they are others."""

    def mean_state_bytes(self, block_share: float) -> float:
        """Return the bytes of state per parameter. `block_share`: that of the blocks in a model."""
        in_blocks = self.state_bytes if self.block_state_bytes is None else self.block_state_bytes
        return self.state_bytes + (in_blocks - self.state_bytes) * block_share


OPTIMIZERS: dict[str, OptimizerEntry] = {
    "adamw": OptimizerEntry(
        build="torchtitan_diloco.components.optimizer:build_adamw",
        reads=("beta1", "beta2", "epsilon"),
    ),
    "muon": OptimizerEntry(
        build="torchtitan_diloco.components.optimizer:build_muon",
        reads=("matrix_lr", "momentum", "beta1", "beta2", "epsilon"),
        block_state_bytes=4,  # one moment
    ),
}
"""Values of `optimizer.name`."""

SCHEDULES: dict[str, Entry] = {
    "cosine": Entry(build="torchtitan_diloco.components.lr_schedule:cosine", reads=("floor",)),
    "linear": Entry(build="torchtitan_diloco.components.lr_schedule:linear", reads=("floor",)),
    "wsd": Entry(
        build="torchtitan_diloco.components.lr_schedule:wsd", reads=("decay_fraction", "floor")
    ),
    "constant": Entry(build="torchtitan_diloco.components.lr_schedule:constant"),
}
"""Values of `lr_schedule.decay`: functions of a step after the warm-up, the first of these steps,
the steps of the run and the section [lr_schedule], which return a share of the peak learning
rate."""


@dataclass(frozen=True, kw_only=True)
class SourceEntry(Entry):
    """A source of text. `build(spec, field)` returns its `Corpus` (data/pieces.py).

    `spec`: the whole setting, such as hf:allenai/c4. `field`: the name of the text in a record.
    """

    is_prepared: bool = False
    """Whether training reads only token shards of it, which `prepare` writes."""


SOURCES: dict[str, SourceEntry] = {
    "stdlib": SourceEntry(build="torchtitan_diloco.data.text:open_standard_library"),
    "hf": SourceEntry(
        build="torchtitan_diloco.data.hub:open_dataset",
        takes="NAME[/SUBSET][:SPLIT]",
        package="datasets",
        extra="c4",
        is_prepared=True,
    ),
}
"""Sources of text that a corpus may name. Anything else is a path."""


@dataclass(frozen=True, kw_only=True)
class BoardEntry(Entry):
    """A program that shows the curves of a run. `build(shown)`, or `build(text, shown)` if it takes
    a text, returns its `Board` (components/boards/base.py)."""

    of_each_worker: bool = False
    """Whether it shows each worker, and not only the first one of a run, or of an island."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that must be set, each with what it is set to."""


BOARDS: dict[str, BoardEntry] = {
    "tensorboard": BoardEntry(
        build="torchtitan_diloco.components.boards.tensorboard:TensorBoard", of_each_worker=True
    ),
    "wandb": BoardEntry(
        build="torchtitan_diloco.components.boards.wandb:WeightsAndBiases",
        takes="PROJECT",
        package="wandb",
        extra="wandb",
    ),
    "mlflow": BoardEntry(
        build="torchtitan_diloco.components.boards.mlflow:MLflow",
        takes="EXPERIMENT",
        package="mlflow",
        extra="mlflow",
        variables={"MLFLOW_TRACKING_URI": "the address of the tracking server"},
    ),
}
"""Values of `metrics.boards`."""
