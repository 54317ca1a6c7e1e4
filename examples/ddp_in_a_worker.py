"""Train two workers of two ranks each, with DistributedDataParallel inside a worker; start it with

.venv/bin/torchrun --standalone --nproc-per-node 4 examples/ddp_in_a_worker.py

The ranks are a mesh of (worker, rank):

    worker 0: ranks 0, 1    DDP averages their gradients in every step
    worker 1: ranks 2, 3
                            ranks 0 and 2, and ranks 1 and 3, exchange fragments

Every rank exchanges the whole model. With FSDP2 instead of DDP, it would exchange only its shard.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from torchtitan_diloco.diloco import DiLoCoConfig, Fragments, StreamingDiLoCo

WORKERS = 2


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
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    shape = (WORKERS, dist.get_world_size() // WORKERS)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("worker", "rank"))

    net = Net().to(device)
    model = DistributedDataParallel(net, process_group=mesh["rank"].get_group())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    config = DiLoCoConfig(sync_every=10, fragments=Fragments(layers_per_fragment=2))
    outer = StreamingDiLoCo(net, mesh["worker"].get_group(), config, optimizer=optimizer)

    generator = torch.Generator().manual_seed(dist.get_rank())  # each rank has its own data
    for _ in range(40):
        x = torch.randn(16, 16, generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
    outer.drain()

    shared = outer.global_state_dict()  # equal on all ranks
    print(f"worker {outer.worker} of {outer.workers}: loss {loss:.3f}, {len(shared)} tensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
