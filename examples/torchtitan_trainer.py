"""Train with torchtitan's own Trainer and config, and exchange fragments between workers; start it with

torchrun --nproc-per-node 4 examples/torchtitan_trainer.py --model.name llama3_diloco [--...]

The ranks are a mesh of (worker, world). torchtitan gets one row of it for its whole world, so that
FSDP2 (and TP, CP) stay inside a worker. Streaming DiLoCo joins each column:

    worker 0: ranks 0, 1    shards of the same model, as in any torchtitan run of two ranks
    worker 1: ranks 2, 3
                            ranks 0 and 2 hold the same shard, and so do 1 and 3

Written for torchtitan 0.2.2, for models in one part (no pipeline parallelism).
"""

import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
        config, chosen = self.job_config, self.job_config.parallelism
        on_gpu = utils.device_type != "cpu"
        dist_utils.init_distributed(config.comm, enable_cpu_backend=on_gpu)  # gloo between workers
        ranks = dist.get_world_size() // WORKERS
        names = ("worker", "world")
        self.mesh = init_device_mesh(utils.device_type, (WORKERS, ranks), mesh_dim_names=names)
        dims = ParallelDims(
            dp_replicate=chosen.data_parallel_replicate_degree,
            dp_shard=chosen.data_parallel_shard_degree,
            cp=chosen.context_parallel_degree,
            tp=chosen.tensor_parallel_degree,
            pp=1,
            ep=chosen.expert_parallel_degree,
            etp=chosen.expert_tensor_parallel_degree,
            world_size=ranks,
        )
        with patch.object(parallel_dims, "init_device_mesh", return_value=self.mesh["world"]):
            dims.build_mesh()
        return dims

    def train(self) -> None:
        (model,), (optimizer,) = self.model_parts, self.optimizers.optimizers
        self.outer = StreamingDiLoCo(
            model,
            self.mesh["worker"].get_group(),
            DiLoCoConfig(sync_every=10, fragments=Fragments(layers_per_fragment=3)),
            optimizer=optimizer,
            total_steps=self.job_config.training.steps,
        )
        super().train()
        self.outer.drain()
        folder = os.path.join(self.job_config.job.dump_folder, "shared")
        if self.outer.worker == 0:  # the shared model is the same on all workers
            world = self.mesh["world"].get_group()
            dcp.save(self.outer.global_state_dict(), checkpoint_id=folder, process_group=world)

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self.outer.step()


def build_dataloader(*, dp_world_size: int, dp_rank: int, **others: Any) -> Any:
    """Build torchtitan's loader for all workers together: each reads a part of its own."""
    worker = dist.get_rank() * WORKERS // dist.get_world_size()
    dp_rank += worker * dp_world_size
    return spec.build_dataloader_fn(
        dp_world_size=WORKERS * dp_world_size, dp_rank=dp_rank, **others
    )


if __name__ == "__main__":
    spec = llama3.get_train_spec()
    register_train_spec("llama3_diloco", replace(spec, build_dataloader_fn=build_dataloader))
    main(DiLoCoTrainer)
