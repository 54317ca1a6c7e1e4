"""Train with Lightning; start it with

.venv/bin/torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py
"""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchtitan_diloco.diloco import DiLoCoConfig, Fragments
from torchtitan_diloco.integrations import join_workers, lightning_callback


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
    callback = lightning_callback(group, config)
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
    print(callback.outer.table())
    print(f"worker {group.rank()} of {group.size()}: loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
