"""Callbacks of the examples, in the loops of their frameworks where these are installed."""

import os
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.diloco.toy import Net, batch, config, inner_step, parameters, sgd
from tests.processes import ProcessPool
from tests.test_examples import EXAMPLES, skip_without
from torchtitan_diloco.diloco import StreamingDiLoCo, join_workers

Run = tuple[dict[str, Tensor], int]
"""Parameters at the end of a training, and the steps of its optimizer."""


def _joined() -> tuple[int, int, list[str]]:
    group = join_workers()
    return group.rank(), group.size(), [name for name in os.environ if "RANK" in name]


def test_a_framework_finds_one_process(processes: ProcessPool) -> None:
    assert processes.run(_joined, 2) == [(0, 2, []), (1, 2, [])]


def test_workers_that_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match="start it with torchrun"):
        join_workers()
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match="there is no GPU for local rank 2 among 2 GPUs"):
        join_workers()


def build_callback(example: str, group: Any = None) -> Any:
    return run_path(str(EXAMPLES / f"{example}.py"))["DiLoCo"](group, config())


def test_the_callback_of_transformers_is_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Its hooks are called as Trainer calls them, which needs accelerate."""
    pytest.importorskip("transformers")
    args = SimpleNamespace(world_size=1, output_dir=str(tmp_path))
    own = Net()
    model = Net()
    outer = StreamingDiLoCo(own, None, config())
    optimizer = sgd(model)
    own_optimizer = sgd(own)
    (tmp_path / "checkpoint-11").mkdir()
    for first, last in ((1, 11), (12, 20)):
        callback = build_callback("transformers_trainer")
        state = SimpleNamespace(global_step=first - 1, max_steps=20)
        wrapped = SimpleNamespace(optimizer=optimizer)
        callback.on_train_begin(args, state, None, model=model, optimizer=wrapped)
        for step in range(first, last + 1):
            inner_step(model, optimizer, 0, step)
            inner_step(own, own_optimizer, 0, step)
            outer.step()
            state.global_step = step
            callback.on_step_end(args, state, None, model=model)
        assert all(map(torch.equal, parameters(model).values(), parameters(own).values()))
        callback.on_save(args, state, None, model=model) if last == 11 else None
    callback.on_train_end(args, state, None, model=model)
    outer.drain()
    shared = outer.global_state_dict()
    assert all(torch.equal(value, shared[name]) for name, value in model.state_dict().items())


def _examples(worker: int) -> list[dict[str, Tensor]]:
    found = [batch(worker, step) for step in range(48)]
    return [{"tokens": tokens, "labels": labels} for tokens, labels in found]


def _with_lightning(folder: Path) -> list[Run]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, callback: Any) -> None:
            super().__init__()
            self.net = Net()
            self.callback = callback
            self.saw_shared = False

        def training_step(self, one: dict[str, Tensor], _: int) -> Tensor:
            logits = self.net(one["tokens"])
            return nn.functional.cross_entropy(logits.flatten(0, 1), one["labels"].flatten())

        def validation_step(self, *_: Any) -> None:
            shared = self.callback.outer.global_state_dict()["net.gain"]
            self.saw_shared = torch.equal(shared, self.net.gain)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    group = join_workers()
    loader: Any = DataLoader(_examples(group.rank()), batch_size=2)  # type: ignore[arg-type]
    runs = []
    for resumed in (None, folder / f"{group.rank()}-epoch=0.ckpt"):
        callback = build_callback("lightning_trainer", group)
        saves = ModelCheckpoint(folder, filename=f"{group.rank()}-{{epoch}}", save_top_k=-1)
        module = Module(callback)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            accumulate_grad_batches=2,
            callbacks=[callback, saves],
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader, loader, ckpt_path=resumed)
        assert module.saw_shared
        runs.append((parameters(module), callback.outer.step_count))
    return runs


def test_a_resumed_run_of_lightning_ends_as_an_uninterrupted_one_on_all_workers(
    processes: ProcessPool, tmp_path: Path
) -> None:
    skip_without("lightning")
    found = [run for runs in processes.run(_with_lightning, 2, tmp_path) for run in runs]
    assert [of_optimizer for _, of_optimizer in found] == [24] * 4
    for model, _ in found:
        assert all(torch.equal(model[name], value) for name, value in found[0][0].items())
