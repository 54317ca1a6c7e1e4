"""Train with torchtitan's own Trainer and config, and streaming DiLoCo between workers.

Start it on GPUs with this, and with any other module, config and option of torchtitan:

.venv/bin/torchrun --nproc-per-node 4 examples/torchtitan_trainer.py \
    --module llama3 --config llama3_debugmodel

The ranks are a mesh of (worker, world). torchtitan uses one row of it as its world, so that FSDP2
(and TP, CP) stay inside a worker. Streaming DiLoCo runs in each column:

    worker 0: ranks 0, 1    shards of the same model, as in any torchtitan run of two ranks
    worker 1: ranks 2, 3
                            ranks 0 and 2 hold the same shard, and so do 1 and 3

Written for torchtitan 0.3.0, without pipeline parallelism and without its checkpoints. Before torch
2.14 it also needs --parallelism.spmd-backend partial_dtensor.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from torchtitan_diloco.diloco import DiLoCoConfig, Fragments, StreamingDiLoCo

WORKERS = int(os.environ.get("WORKERS", "2"))


class LoaderPerWorker:
    """Builds torchtitan's loader for the ranks of all workers, so that each reads its own part."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.to_dict = config.to_dict

    def build(self, *, dp_world_size: int, dp_rank: int, **others: Any) -> Any:
        dp_rank += dp_world_size * (dist.get_rank() * WORKERS // dist.get_world_size())
        dp_world_size *= WORKERS
        return self.config.build(dp_world_size=dp_world_size, dp_rank=dp_rank, **others)


class DiLoCoTrainer(Trainer):
    def __init__(self, config: Any) -> None:
        if config.checkpoint.enable:
            sys.exit("error: --checkpoint.enable: all workers would write to one: leave it off")
        config.dataloader = LoaderPerWorker(config.dataloader)
        super().__init__(config)

    def init_distributed(self) -> ParallelDims:
        comm = self.config.comm
        folder = self.config.dump_folder
        on_gpu = utils.device_type != "cpu"
        dist_utils.init_distributed(comm, enable_cpu_backend=on_gpu, base_folder=folder)  # for gloo
        shape = (WORKERS, dist.get_world_size() // WORKERS)
        names = ("worker", "world")
        self.mesh = init_device_mesh(utils.device_type, shape, mesh_dim_names=names)
        row = self.mesh["world"]
        dims = ParallelDims.from_config(self.config.parallelism, row.size())
        with patch.object(parallel_dims, "init_device_mesh", return_value=row):
            dims.build_mesh()
        return dims

    def train(self) -> None:
        row = self.mesh["world"].mesh.tolist()
        shards = dist.new_group(row, backend="gloo", use_local_synchronization=True)
        (model,) = self.model_parts
        (optimizer,) = self.optimizers.optimizers
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
            folder = Path(self.config.dump_folder, "shared")
            save(self.outer.global_state_dict(), checkpoint_id=folder, process_group=shards)
        self.outer.close()

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self.outer.step()


if __name__ == "__main__":
    if not utils.device_module.is_available():
        sys.exit("error: torchtitan trains on GPUs only, and torch sees none here")
    init_logger()
    trainer = DiLoCoTrainer(ConfigManager().parse_args())
    trainer.train()
    trainer.close()
    dist.destroy_process_group()
