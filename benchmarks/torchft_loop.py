"""torchft's DiLoCo (optional: extra `bench`) as an outer loop of the benchmarks, and its programs.

    .venv/bin/python -m benchmarks.torchft_loop trainer --section.key value ...
    .venv/bin/python -m benchmarks.torchft_loop lighthouse ADDRESS

The first runs one rank of our trainer with it, and needs the environment variables of torchrun.
`benchmarks.islands_program` has its worker that comes and goes.
"""

import importlib.util
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from benchmarks import core
from torchtitan_diloco.diloco import DiLoCoConfig
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.outer_loop import DataParallel
from torchtitan_diloco.distributed.world import join_world, leave_world
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
        workers: int,
        name: str,
        *,
        lighthouse: str,
        address: str,
        timeout_seconds: int,
        alone: bool = False,
    ) -> None:
        """`address`: that of this worker. `alone`: train without the others if they are absent, and
        load their model when joining."""
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        super().__init__(model, workers)
        logging.getLogger("torchft").setLevel(logging.WARNING)
        timeout = timedelta(seconds=timeout_seconds)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, 0, is_master=True, wait_for_workers=False
        )
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=lambda state: model.load_state_dict(state["model"]),
            state_dict=lambda: {"model": model.state_dict()},
            min_replica_size=1 if alone else workers,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=store.port,
            lighthouse_addr=lighthouse,
            hostname=address,
            replica_id=name,
            timeout=timeout,
            quorum_timeout=timeout,
            connect_timeout=timedelta(seconds=60),
            init_sync=alone,
        )
        self._commit, self._manager.should_commit = self._manager.should_commit, self._committed
        self.lost_steps, self.commits, self._inner_steps = 0.0, 0, 0
        # Its fragments are modules.
        fragments = build_fragments(model, config.fragments)
        self.sizes = [fragment.parameters for fragment in fragments]
        self._synced_at = [0] * len(fragments)
        modules: list[nn.Module] = [
            nn.ParameterDict({part.name.replace(".", "_"): part.parameter for part in one.parts})
            for one in fragments
        ]
        outer, self._begun, self._reported = config.outer_optimizer, 0.0, 0.0
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
        self._inner_steps += 1
        self._begun = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.exposed_seconds += time.perf_counter() - self._begun

    def _committed(self, *arguments: Any, **named: Any) -> bool:
        """Commit, and count the steps of a fragment that are lost if its sync fails."""
        fragments = len(self._synced_at)
        fragment = self._manager.current_step() % fragments
        committed: bool = self._commit(*arguments, **named)
        if not committed:
            self.lost_steps += (self._inner_steps - self._synced_at[fragment]) / fragments
        self.commits += committed
        self._synced_at[fragment] = self._inner_steps
        return committed

    def metrics(self) -> dict[str, float]:
        before, self._reported = self._reported, self.exposed_seconds
        return {"worker/exposed_seconds": self.exposed_seconds - before}

    def describe(self) -> list[str]:
        return [f"{'outer':<10} torchft"]

    def close(self) -> None:
        self._manager.shutdown(wait=False)


class TorchftTrainer(Trainer):
    """Our trainer with torchft's outer loop.

    WORKER_ADDRESS is the address of this worker. Workers that come and go have LIGHTHOUSE, and
    their name in `run.description`.
    """

    outer: TorchftLoop

    def _build_outer_loop(self) -> TorchftLoop:
        lighthouse = os.environ.get("LIGHTHOUSE", "")
        return TorchftLoop(
            self.model,
            self.optimizer,
            self.config.diloco,
            self.world.workers,
            self.config.run.description if lighthouse else f"replica_{self.world.worker}",
            lighthouse=lighthouse or f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
            address=os.environ["WORKER_ADDRESS"],
            timeout_seconds=self.config.diloco.link.timeout_seconds,
            alone=bool(lighthouse),
        )


def run_trainer(settings: core.Settings) -> None:
    """Run one rank of the trainer. WORKER_ADDRESS is the address of this worker."""
    config = core.load(settings)
    link, workers = config.diloco.link, config.diloco.workers
    torch.manual_seed(config.run.seed)
    world = join_world(config.distributed, link, device=config.run.device, workers=workers, fsdp=1)
    lighthouse = None
    if world.is_first:
        lighthouse = serve_lighthouse(f"0.0.0.0:{LIGHTHOUSE_PORT}", workers)
    trainer = TorchftTrainer(config, world)
    trainer.run()
    trainer.outer.close()
    dist.barrier()  # the lighthouse has to answer until all ranks have ended
    if lighthouse is not None:
        lighthouse.shutdown()
    leave_world(world)


def main(program: str, *words: str) -> None:
    if program == "trainer":
        run_trainer(core.parse_settings(core.build_parser(__doc__), words))
    else:
        lighthouse = serve_lighthouse(words[0], 1)
        print("ready", lighthouse.address(), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
