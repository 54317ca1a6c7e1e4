"""Train with transformers.Trainer; start it with

.venv/bin/torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py
"""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from torchtitan_diloco.diloco import DiLoCoConfig, Fragments
from torchtitan_diloco.integrations import join_workers, transformers_callback


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from different numbers."""

    def __init__(self, worker: int, workers: int) -> None:
        self.starts = torch.arange(worker, 4096, workers)  # a worker reads its own part

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (self.starts[index] + torch.arange(32)) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    group = join_workers()  # before the framework looks for other processes
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    config = DiLoCoConfig(sync_every=10, fragments=Fragments(layers_per_fragment=2))
    callback = transformers_callback(group, config)
    arguments = TrainingArguments(
        output_dir=f"outputs/worker-{group.rank()}",
        per_device_train_batch_size=8,
        max_steps=40,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=group.rank(),  # for the order of the data; all start from the model of worker 0
    )
    trainer = Trainer(
        LlamaForCausalLM(shape),
        arguments,
        train_dataset=Counting(group.rank(), group.size()),
        callbacks=[callback],
    )
    loss = trainer.train().training_loss
    print(callback.outer.table())
    if group.rank() == 0:
        trainer.save_model("outputs/shared")  # equal on all workers
    print(f"worker {group.rank()} of {group.size()}: mean loss {loss:.3f}")


if __name__ == "__main__":
    main()
