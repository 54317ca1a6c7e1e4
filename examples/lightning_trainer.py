"""Train with Lightning; start it with

.venv/bin/torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py
"""

from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchtitan_diloco.diloco import DiLoCoConfig, Fragments, StreamingDiLoCo, join_workers


class DiLoCo(pl.Callback):
    """Calls the outer loop, and saves it with the checkpoints of the worker.

    The model holds the shared parameters during validation and after training.
    """

    def __init__(self, group: dist.ProcessGroup | None, config: DiLoCoConfig) -> None:
        self.group = group
        self.config = config
        self.outer: StreamingDiLoCo | None = None
        self.saved: dict[str, Any] = {}
        self.validation = ExitStack()
        self.steps = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.steps = trainer.global_step
        (optimizer,) = trainer.optimizers
        worker = {name: value.clone() for name, value in module.state_dict().items()}
        length = max(0, trainer.max_steps)  # -1: not set
        self.outer = StreamingDiLoCo(
            module, self.group, self.config, optimizer=optimizer, total_steps=length
        )
        if self.saved:  # resumed: keep this worker's parameters, and load the outer loop
            module.load_state_dict(worker)
            self.outer.load_state_dict(self.saved)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.outer and trainer.global_step > self.steps:  # not while gradients accumulate
            self.steps = trainer.global_step
            self.outer.step()

    def on_validation_start(self, *_: Any) -> None:
        if self.outer:  # not in the check before training
            self.validation.enter_context(self.outer.global_parameters())

    def on_validation_end(self, *_: Any) -> None:
        self.validation.close()

    def on_train_end(self, _: pl.Trainer, module: pl.LightningModule) -> None:
        if self.outer:
            self.outer.drain()
            module.load_state_dict(self.outer.global_state_dict())

    def state_dict(self) -> dict[str, Any]:
        return self.outer.state_dict() if self.outer else {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.saved = saved


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 2)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss = nn.functional.cross_entropy(self.head(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    group = join_workers()  # before the framework looks for other processes
    generator = torch.Generator().manual_seed(group.rank())  # each worker has its own data
    x = torch.randn(512, 16, generator=generator)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16, shuffle=True)

    config = DiLoCoConfig(sync_every=10, fragments=Fragments(layers_per_fragment=2))
    callback = DiLoCo(group, config)
    trainer = pl.Trainer(
        devices=1,  # a worker is one process, and Lightning does not know of the others
        max_steps=40,
        callbacks=[callback],
        default_root_dir=f"outputs/worker-{group.rank()}",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)  # leaves the shared parameters in the model
    if callback.outer:
        print(callback.outer.table())
    print(f"worker {group.rank()} of {group.size()}: loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
