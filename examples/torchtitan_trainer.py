"""Train with torchtitan's own Trainer and config, and streaming DiLoCo between workers.

Start it with this, and with any other option of torchtitan:

.venv/bin/torchrun --nproc-per-node 4 examples/torchtitan_trainer.py --model.name llama3_diloco

The ranks are a mesh of (worker, world). torchtitan uses one row of it as its world, so that FSDP2
(and TP, CP) stay inside a worker. Streaming DiLoCo runs in each column:

    worker 0: ranks 0, 1    shards of the same model, as in any torchtitan run of two ranks
    worker 1: ranks 2, 3
                            ranks 0 and 2 hold the same shard, and so do 1 and 3

Written for torchtitan 0.2.2, without pipeline parallelism and without its checkpoints.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models import llama3
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools import utils
from torchtitan.train import Trainer, main

from torchtitan_diloco.diloco import DiLoCoConfig, Fragments, StreamingDiLoCo

WORKERS = int(os.environ.get("WORKERS", "2"))


class DiLoCoTrainer(Trainer):
    def init_distributed(self) -> ParallelDims:
        if self.job_config.checkpoint.enable:
            raise ValueError("all workers would write to one checkpoint: leave it off")
        on_gpu = utils.device_type != "cpu"
        dist_utils.init_distributed(self.job_config.comm, enable_cpu_backend=on_gpu)  # for gloo
        shape, names = (WORKERS, dist.get_world_size() // WORKERS), ("worker", "world")
        self.mesh = init_device_mesh(utils.device_type, shape, mesh_dim_names=names)
        row = self.mesh["world"]
        with patch.object(dist_utils, "init_distributed", return_value=row.size()):
            dims = super().init_distributed()
        with patch.object(parallel_dims, "init_device_mesh", return_value=row):
            dims.build_mesh()
        return dims

    def train(self) -> None:
        row = self.mesh["world"].mesh.tolist()
        shards = dist.new_group(row, backend="gloo", use_local_synchronization=True)
        (model,), (optimizer,) = self.model_parts, self.optimizers.optimizers
        self.outer = StreamingDiLoCo(
            model,
            self.mesh["worker"].get_group(),
            DiLoCoConfig(sync_every=10, fragments=Fragments(layers_per_fragment=3)),
            optimizer=optimizer,
            shard_group=shards,
        )
        super().train()
        self.outer.drain()
        if self.outer.worker == 0:  # the shared model is the same on all workers
            folder = Path(self.job_config.job.dump_folder, "shared")
            save(self.outer.global_state_dict(), checkpoint_id=folder, process_group=shards)

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self.outer.step()


def build_dataloader(*, dp_world_size: int, dp_rank: int, **others: Any) -> Any:
    """Build torchtitan's loader for the ranks of all workers, so that each reads its own part."""
    dp_rank += dp_world_size * (dist.get_rank() * WORKERS // dist.get_world_size())
    dp_world_size *= WORKERS
    return spec.build_dataloader_fn(dp_world_size=dp_world_size, dp_rank=dp_rank, **others)


if __name__ == "__main__":
    spec = llama3.get_train_spec()
    register_train_spec("llama3_diloco", replace(spec, build_dataloader_fn=build_dataloader))
    main(DiLoCoTrainer)
