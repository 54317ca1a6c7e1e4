"""Train in a loop with accelerate; start it with

.venv/bin/torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchtitan_diloco.diloco import DiLoCoConfig, Fragments, StreamingDiLoCo, join_workers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: torch.Tensor = self.head(x)
        return logits


def main() -> None:
    group = join_workers()  # before accelerate looks for other processes
    generator = torch.Generator().manual_seed(group.rank())  # each worker has its own data
    x = torch.randn(1280, 16, generator=generator)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, prepared, loader = accelerator.prepare(net, optimizer, loader)
    config = DiLoCoConfig(sync_every=10, fragments=Fragments(layers_per_fragment=2))
    outer = StreamingDiLoCo(model, group, config, optimizer=optimizer)

    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            prepared.step()
            prepared.zero_grad()
        if accelerator.sync_gradients:  # the optimizer has taken a step
            outer.step()
    outer.drain()

    shared = outer.global_state_dict()  # equal on all workers
    print(outer.table())
    print(f"worker {outer.worker} of {outer.workers}: loss {loss:.3f}, {len(shared)} tensors")


if __name__ == "__main__":
    main()
