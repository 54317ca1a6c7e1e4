"""Train with transformers.Trainer; start it with

.venv/bin/torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from torchtitan_diloco.diloco import DiLoCoConfig, Fragments, StreamingDiLoCo, join_workers


class DiLoCo(TrainerCallback):
    """Calls the outer loop, and saves it with the checkpoints of the worker in `output_dir`.

    After training the model holds the shared parameters.
    """

    def __init__(self, group: dist.ProcessGroup | None, config: DiLoCoConfig) -> None:
        self.group = group
        self.config = config

    def on_train_begin(self, args: Any, state: Any, _control: Any, **parts: Any) -> None:
        model = parts["model"]
        optimizer = parts["optimizer"]
        worker = {name: value.clone() for name, value in model.state_dict().items()}
        self.outer = StreamingDiLoCo(
            model,
            self.group,
            self.config,
            optimizer=getattr(optimizer, "optimizer", optimizer),  # without accelerate's wrapper
            total_steps=state.max_steps,
        )
        if state.global_step:  # resumed: keep this worker's parameters, and load the outer loop
            model.load_state_dict(worker)
            self.outer.load_state_dict(torch.load(checkpoint(args, state) / "diloco.pt"))

    def on_step_end(self, *_: Any, **_parts: Any) -> None:
        self.outer.step()

    def on_save(self, args: Any, state: Any, _control: Any, **parts: Any) -> None:
        folder = checkpoint(args, state)
        torch.save(self.outer.state_dict(), folder / "diloco.pt")
        if self.outer.worker:  # transformers writes the model of rank 0 only
            save_model(parts["model"], str(folder / "model.safetensors"))

    def on_train_end(self, *_: Any, **parts: Any) -> None:
        self.outer.drain()
        parts["model"].load_state_dict(self.outer.global_state_dict())


def checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


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
    callback = DiLoCo(group, config)
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
