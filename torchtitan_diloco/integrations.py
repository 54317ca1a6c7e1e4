"""Streaming DiLoCo as a callback of transformers.Trainer and Lightning.

Each worker is a process that its framework trains on its own. For workers of several ranks see
examples/.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch import nn
from torch.distributed.constants import default_pg_timeout

from torchtitan_diloco.diloco import DiLoCoConfig, StreamingDiLoCo
from torchtitan_diloco.diloco.meeting import store_of_attempt, store_of_job

STATE = "diloco.pt"
"""File for the outer loop in a checkpoint of transformers."""
HIDDEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


def join_workers() -> dist.ProcessGroup:
    """Join the processes of torchrun, each of which is a worker, and return their group.

    This hides the other processes and their GPUs from a framework, which would otherwise average
    gradients over all of them. Call it before CUDA is used.
    """
    if "LOCAL_RANK" not in os.environ:
        raise ValueError("join_workers() needs the environment of torchrun: start it with torchrun")
    if torch.cuda.is_initialized():
        raise ValueError("join_workers() picks this process's GPU: call it before CUDA is used")
    local = int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count()
    if 0 < gpus <= local:
        raise ValueError(
            f"there are {gpus} GPUs, none for local rank {local}: start one process each"
        )
    rank, size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), default_pg_timeout
    store = store_of_attempt(store_of_job(timeout), rank, size, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if gpus:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = chosen.split(",") if chosen else list(map(str, range(gpus)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[local]
    for name in list(os.environ):
        if name in HIDDEN or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    group = dist.group.WORLD
    assert group is not None
    return group


class DiLoCoCallback:
    """Base of callbacks, which build the outer loop when training begins."""

    def __init__(self, group: dist.ProcessGroup | None, config: DiLoCoConfig) -> None:
        self._group, self._config = group, config
        self._outer: StreamingDiLoCo | None = None

    @property
    def outer(self) -> StreamingDiLoCo:
        if self._outer is None:
            raise ValueError("there is no outer loop yet: it is built when training begins")
        return self._outer

    def _begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        ranks: int,
        total_steps: int,
        saved: dict[str, Any] | None,
    ) -> None:
        """Start from worker 0's model, or resume from `saved` with the model as it is."""
        if ranks > 1:
            raise ValueError(
                f"the framework has joined {ranks} processes and averages gradients over them: "
                "call torchtitan_diloco.integrations.join_workers() before it is set up"
            )
        own = {} if saved is None else {k: v.clone() for k, v in model.state_dict().items()}
        self._outer = StreamingDiLoCo(
            model,
            self._group,
            self._config,
            optimizer=optimizer,
            total_steps=max(0, total_steps),  # frameworks write -1 for "not set"
        )
        if saved is not None:
            model.load_state_dict(own)
            self._outer.load_state_dict(saved)

    def _end(self, model: nn.Module) -> None:
        """Load the shared parameters into the model."""
        self.outer.drain()
        model.load_state_dict(self.outer.global_state_dict())


def transformers_callback(group: dist.ProcessGroup | None, config: DiLoCoConfig) -> DiLoCoCallback:
    """Return a callback for transformers.Trainer.

    `group` is that of join_workers(). Each worker needs its own `output_dir` for its checkpoints.
    After training the model holds the shared parameters.
    """
    from transformers import TrainerCallback

    class ForTrainer(DiLoCoCallback, TrainerCallback):  # type: ignore[misc]  # not type-checked
        def on_train_begin(self, args: Any, state: Any, _control: Any, **parts: Any) -> None:
            if getattr(args, "load_best_model_at_end", False):
                raise ValueError(
                    "load_best_model_at_end: after training the model holds the shared parameters, "
                    "not those of a checkpoint: leave it off"
                )
            optimizer, state_file = parts["optimizer"], _checkpoint(args, state) / STATE
            if state.global_step and not state_file.exists():
                raise ValueError(
                    f"{state_file} is missing: resume from a checkpoint of this callback, in "
                    "output_dir"
                )
            self._begin(
                parts["model"],
                getattr(optimizer, "optimizer", optimizer),  # without accelerate's wrapper
                ranks=args.world_size,
                total_steps=state.max_steps,
                saved=torch.load(state_file) if state.global_step else None,
            )

        def on_step_end(self, *_: Any, **_parts: Any) -> None:
            self.outer.step()

        def on_save(self, args: Any, state: Any, _control: Any, **parts: Any) -> None:
            folder = _checkpoint(args, state)
            torch.save(self.outer.state_dict(), folder / STATE)
            if self.outer.worker:  # transformers writes the model of rank 0 only
                save_model(parts["model"], str(folder / "model.safetensors"))
                if hasattr(parts["model"], "config"):
                    parts["model"].config.save_pretrained(folder)

        def on_train_end(self, *_: Any, **parts: Any) -> None:
            self._end(parts["model"])

    return ForTrainer(group, config)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def lightning_callback(group: dist.ProcessGroup | None, config: DiLoCoConfig) -> DiLoCoCallback:
    """Return a callback for lightning.pytorch.Trainer(devices=1).

    `group` is that of join_workers(). Each worker needs its own `default_root_dir` for its
    checkpoints. The model holds the shared parameters during validation and after training.
    """
    from lightning.pytorch import Callback

    class ForLightning(DiLoCoCallback, Callback):  # type: ignore[misc]  # not type-checked
        def __init__(self) -> None:
            super().__init__(group, config)
            self._saved: dict[str, Any] | None = None
            self._validation, self._steps = ExitStack(), 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            if len(trainer.optimizers) != 1:
                raise ValueError(
                    f"{type(module).__name__} has {len(trainer.optimizers)} optimizers: "
                    "lightning_callback is for one"
                )
            (optimizer,), self._steps = trainer.optimizers, trainer.global_step
            length = {"ranks": trainer.world_size, "total_steps": trainer.max_steps}
            self._begin(module, optimizer, **length, saved=self._saved)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step > self._steps:  # not while gradients accumulate
                self._steps = trainer.global_step
                self.outer.step()

        def on_validation_start(self, *_: Any) -> None:
            if self._outer is not None:  # not in the check before training
                self._validation.enter_context(self.outer.global_parameters())

        def on_validation_end(self, *_: Any) -> None:
            self._validation.close()

        def on_train_end(self, _: Any, module: Any) -> None:
            self._end(module)

        def state_dict(self) -> dict[str, Any]:
            return {} if self._outer is None else self.outer.state_dict()

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            self._saved = saved

    return ForLightning()
