"""torchft's DiLoCo (optional: extra `bench`) as an outer loop of the benchmarks, and its program.

    .venv/bin/python -m benchmarks.torchft_loop --section.key value ...

This runs one rank of our trainer with it, and needs the environment variables of torchrun.
"""

import importlib.util
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from torchtitan_diloco import train
from torchtitan_diloco.diloco import DiLoCoConfig
from torchtitan_diloco.diloco.data_parallel import DataParallel
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.launching import rank
from torchtitan_diloco.trainer import Trainer

LIGHTHOUSE_PORT = 29510


def is_installed() -> bool:
    return importlib.util.find_spec("torchft") is not None


def serve_lighthouse(address: str, workers: int) -> Any:
    """Start the server that connects the workers."""
    from torchft.coordination import LighthouseServer

    return LighthouseServer(
        bind=address, min_replicas=workers, join_timeout_ms=60_000, quorum_tick_ms=100
    )


class TorchftLoop(DataParallel):
    """torchft's DiLoCo as the outer loop of our trainer.

    It works in hooks of the inner optimizer. All workers must start with the same parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: DiLoCoConfig,
        world: World,
        *,
        lighthouse: str,
        address: str = "localhost",
    ) -> None:
        """Build the loop. `address`: that of this worker."""
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        super().__init__(model, world.workers)
        logging.getLogger("torchft").setLevel(logging.WARNING)
        timeout = timedelta(seconds=config.link.timeout_seconds)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, 0, is_master=True, wait_for_workers=False
        )
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=lambda state: model.load_state_dict(state["model"]),
            state_dict=lambda: {"model": model.state_dict()},
            min_replica_size=world.workers,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=store.port,
            lighthouse_addr=lighthouse,
            hostname=address,
            replica_id=f"replica_{world.worker}",
            timeout=timeout,
            quorum_timeout=timeout,
            connect_timeout=timedelta(seconds=60),
            init_sync=False,
        )
        # Its fragments are modules.
        modules: list[nn.Module] = [
            nn.ParameterDict(
                {part.name.replace(".", "_"): part.parameter for part in fragment.parts}
            )
            for fragment in build_fragments(model, config.fragments)
        ]
        outer = config.outer_optimizer
        self._begun = 0.0
        self._reported = 0.0
        optimizer.register_step_post_hook(self._begin)
        DiLoCo(
            self._manager,
            modules,
            optimizer,
            [
                SGD(part.parameters(), lr=outer.lr, momentum=outer.momentum, nesterov=True)
                for part in modules
            ],
            sync_every=config.sync_every,
            fragment_sync_delay=config.overlap.delay,
            fragment_update_alpha=config.overlap.mixing,
        ).__enter__()  # registers its hooks
        optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._begun = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.exposed_seconds += time.perf_counter() - self._begun

    def metrics(self) -> dict[str, float]:
        before = self._reported
        self._reported = self.exposed_seconds
        return {"worker/exposed_seconds": self.exposed_seconds - before}

    def describe(self) -> list[str]:
        return [f"{'outer':<10} torchft"]

    def close(self) -> None:
        self._manager.shutdown(wait=False)


class TorchftTrainer(Trainer):
    """Our trainer with torchft's outer loop. WORKER_ADDRESS is the address of this worker."""

    outer: TorchftLoop

    def _build_outer_loop(self) -> TorchftLoop:
        address = f"0.0.0.0:{LIGHTHOUSE_PORT}"
        if self.world.is_first:
            self.lighthouse = serve_lighthouse(address, self.world.workers)
        return TorchftLoop(
            self.model,
            self.optimizer,
            self.config.diloco,
            self.world,
            lighthouse=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
            address=os.environ["WORKER_ADDRESS"],
        )

    def run(self) -> Path:
        folder = super().run()
        self.outer.close()
        dist.barrier()  # the lighthouse has to answer until all ranks have ended
        return folder


if __name__ == "__main__":
    setattr(rank, "Trainer", TorchftTrainer)  # noqa: B010 - the same program with another loop
    sys.exit(train.main(sys.argv[1:]))
