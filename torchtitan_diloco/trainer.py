"""Trainer: builds the parts of a run and holds its loop. Only it sees the whole configuration."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.checkpoint_schema import Manifest, RunState, check_tokenizer
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.optimizer import (
    SkippedSteps,
    autocast,
    build_optimizer,
    clip_gradients,
    compute_dtype,
    lr_factor,
    reduce_over_workers,
    set_lr,
)
from torchtitan_diloco.components.profiling import build_profiler
from torchtitan_diloco.components.resume import changed_settings, find_start, restore
from torchtitan_diloco.components.run_folder import claim_run_folder
from torchtitan_diloco.components.run_plan import (
    after_step,
    log_end,
    log_plan,
    plan_run,
    validation_due,
    vocabulary_rows,
)
from torchtitan_diloco.components.telemetry import StepResult, Telemetry
from torchtitan_diloco.components.validation import Validator, validate
from torchtitan_diloco.config import Config, to_toml
from torchtitan_diloco.config.checks import run_warnings
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.data.corpus import open_split, open_tokenizer
from torchtitan_diloco.data.loader import TrainLoader, ValidationBatches
from torchtitan_diloco.data.worker_shards import share_out
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.diloco.outer_loop import DataParallel, OuterLoop
from torchtitan_diloco.distributed.collectives import assert_agreement
from torchtitan_diloco.distributed.stop import StopRequest
from torchtitan_diloco.distributed.world import FSDP, WORKER, World
from torchtitan_diloco.export.weights import load_initial_weights
from torchtitan_diloco.models import build_model
from torchtitan_diloco.models.parallelize import materialize, parallelize
from torchtitan_diloco.planner.observed import log_summary, run_summary
from torchtitan_diloco.utils import GarbageControl, clock, logger

STEPS_APART = 6
"""Steps by which workers that train on their own may run apart before they wait for an answer."""
OWN_SETTINGS = {"run.folder", "data.cache_folder", "diloco.link.interface"}
"""Settings in which the processes of a run may differ."""


class Trainer:
    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.start = find_start(world, config.checkpoint.resume, config.run.folder)
        tokenizer = self.tokenizer = open_tokenizer(config.data)
        if self.start.manifest is not None:
            saved = self.start.checkpoint, self.start.manifest
            check_tokenizer(*saved, tokenizer.name, tokenizer.fingerprint)
        train_tokens = open_split(config.data, tokenizer, "train")
        self.worker_shards = share_out(config.data, train_tokens, tokenizer, world.workers)
        self.vocab_size = vocabulary_rows(config.model, tokenizer.vocab_size)
        self._assert_agreement()

        self.resumed = self._resumed_state()
        self.step = self.resumed.step
        skipped_in_a_row = self.resumed.skipped_in_a_row
        self.skips = SkippedSteps(config.training.max_skipped_steps, skipped_in_a_row)
        self._build_model()
        self.optimizer = build_optimizer(self.model, config.optimizer, self.plan.total_steps)
        self.outer = self._build_outer_loop()
        self.loader = TrainLoader(
            self.worker_shards.parts,
            sequence_length=config.training.sequence_length,
            batch_size=config.training.batch_size,
            accumulation=self.plan.accumulation,
            rank=world.rank,
            ranks=world.size,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            processes=config.data.loader_processes,
            start=self.resumed.position,
            pin_memory=world.device.type == "cuda",
        )
        self.validator = self._build_validator()

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> Path:
        """Train to the last step, or until `stop_after` or a signal, and return the folder."""
        config, total_steps = self.config, self.plan.total_steps
        last_step = min(total_steps, config.training.stop_after or total_steps)
        folder, lock = self._claim_folder(stops_early=last_step < total_steps)
        self._log_plan(folder)
        self._resume()
        sections = config.training, config.checkpoint, config.metrics, config.validation
        garbage = GarbageControl(config.run.garbage_collect_every)
        with (
            lock,
            StopRequest(self.world, self._lag) as stop,
            self._open_telemetry(folder) as telemetry,
            build_profiler(config.profiling, folder, self.world) as profiler,
            closing(self._checkpointer(folder)) as checkpointer,
            checkpointer.saving_alone(stop, lambda: self._manifest(telemetry)),
        ):
            batches = telemetry.timed(self.loader)
            if self._validation_missed():
                telemetry.pause(self.validator.validate(self.step, telemetry))
            while self.step < last_step:
                telemetry.step_begins()
                telemetry.step_done(self.train_step(batches))
                if profiler is not None:
                    profiler.step()
                garbage.after_step(self.step)
                requests = stop.agreed(self.step, save=checkpointer.due_by_time())
                then = after_step(self.plan, self.step, requests, *sections)
                if then.drain:
                    started = time.perf_counter()
                    self.outer.drain()
                    telemetry.count("time/step_seconds", time.perf_counter() - started)
                if then.report:
                    telemetry.open(self.step, self.lr, stop.waited_seconds)
                telemetry.publish(self.step, all=then.publish_all)
                if then.validate:
                    telemetry.pause(self.validator.validate(self.step, telemetry))
                if then.save:
                    telemetry.pause(checkpointer.save(self._manifest(telemetry)))
                if then.stop:
                    break
            self.outer.drain()
            checkpointer.wait()
            summary = self._summarise(telemetry)
        garbage.close()
        log_end(self.plan, self.step, config.training, config.checkpoint, folder)
        log_summary(summary)
        logger.info(f"took {clock(telemetry.elapsed_seconds)}; the run is in {folder}")
        if checkpointer.failure:
            raise ValueError(
                f"the last checkpoint could not be saved: {checkpointer.failure}; make room and "
                f"start the same command again with --run.folder {folder}, which resumes from the "
                "checkpoint before, if there is one"
            )
        return folder

    def train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> StepResult:
        self.step += 1
        config, plan, fsdp = self.config.training, self.plan, self.world.group(FSDP)
        set_lr(self.optimizer, self.lr)
        # The gradient is a sum over all tokens / their number. FSDP2 takes the mean over ranks.
        scale = self.world.size / plan.tokens_per_step
        cross_entropy = torch.zeros((), device=self.world.device)
        for number, (inputs, targets) in enumerate(islice(batches, plan.accumulation), start=1):
            inputs = inputs.to(self.world.device, non_blocking=True)
            targets = targets.to(self.world.device, non_blocking=True)
            reduce_over_workers(self.model, number == plan.accumulation)
            head = loss_head(targets, z_loss=config.z_loss, chunk_tokens=config.loss_chunk_tokens)
            with self.precision:
                sums = self.model(inputs, head=head)
            (sums.objective * scale).backward()
            cross_entropy += sums.cross_entropy
        norm = clip_gradients(self.model.parameters(), config.max_gradient_norm, fsdp)
        # Read here, where the norm has been waited for: later a GPU would run out of work.
        loss = cross_entropy.item()
        skipped = self.skips.count(self.step, norm)
        if skipped:
            self.outer.heal(fsdp)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        tokens = plan.tokens_per_step * self.worker_shards.shares[self.world.worker]
        self.outer.step(weight=0.0 if skipped else tokens)
        return StepResult(loss, norm, skipped)

    @property
    def lr(self) -> float:
        factor = lr_factor(self.step, self.plan.total_steps, self.config.lr_schedule)
        return self.config.optimizer.lr * factor

    def _open_telemetry(self, folder: Path) -> Telemetry:
        return Telemetry(
            self.config.metrics,
            self.world,
            folder,
            self.plan,
            self.outer,
            self.resumed,
            flops_per_token=self.model.flops_per_token(self.config.training.sequence_length),
            lag=self._lag,
        )

    def _checkpointer(self, folder: Path) -> Checkpointer:
        parts = self.world, self.model, self.optimizer, self.outer
        return Checkpointer(self.config.checkpoint, folder, *parts)

    @property
    def _lag(self) -> int:
        """Steps between a question to the other ranks and reading their answer.

        Workers that train on their own should not wait for each other.
        """
        if self.config.diloco.method == "none" or self.world.workers == 1:
            return 1
        return max(STEPS_APART, self.config.diloco.overlap.delay)

    def _summarise(self, telemetry: Telemetry) -> dict[str, Any]:
        summary = run_summary(
            self.plan,
            self.config.diloco,
            ranks=self.world.size,
            step=self.step,
            validated=self.validator.validated,
            totals=telemetry.totals,
            totals_after=self.resumed.totals_after,
            rounds=telemetry.round_records,
        )
        if self.step > self.resumed.step:  # else the summary of the start before stays the last one
            telemetry.write_summary(summary)
            telemetry.draw(self.step)
        return summary

    # --- checkpoints ------------------------------------------------------------------------------

    def _manifest(self, telemetry: Telemetry) -> Manifest:
        state = RunState(
            step=self.step,
            tokens=self.plan.tokens_at(self.step),
            position=self.loader.position,
            skipped_in_a_row=self.skips.in_a_row,
            validated=self.validator.validated,
            totals=dict(telemetry.totals),  # a copy: it is written while the run goes on counting
            totals_after=self.resumed.totals_after,
            elapsed_seconds=telemetry.elapsed_seconds,
        )
        return Manifest(
            state,
            workers=1 if self.config.diloco.method == "none" else self.world.workers,
            ranks_per_worker=self.world.ranks_per_worker,
            data=self._data_identity(),
            config=self._toml(),
            tokenizer=self.tokenizer.fingerprint,
        )

    def _resumed_state(self) -> RunState:
        """Return the state to resume from; what does not fit this run starts from zero."""
        manifest, state = self.start.manifest, self.start.state
        if manifest is not None and manifest.data != self._data_identity():
            state = replace(state, position=0)
        if manifest is not None and bool(manifest.outer) == (self.config.diloco.method == "none"):
            state = replace(state, totals={}, totals_after=state.step)
        return state

    def _resume(self) -> None:
        """Load the checkpoint, and log what has changed since it was saved."""
        manifest = self.start.manifest
        if manifest is None:
            return
        parts = self.world, self.model, self.optimizer, self.outer
        path, new_workers = Path(self.start.checkpoint), self.config.checkpoint.new_workers
        notes = restore(path, manifest, new_workers, *parts)
        if manifest.data != self._data_identity():
            notes.append("the data or their order have changed: they are read from the beginning")
        if self.config.model.weights:
            notes.append("model.weights is for new runs: the checkpoint's weights are used")
        logger.info(
            f"resumed from {self.start.checkpoint}: step {manifest.step}, "
            f"{manifest.state.tokens:,} tokens"
        )
        changes = changed_settings(manifest.config, self._toml())
        for line in [*(f"changed: {change}" for change in changes), *notes]:
            logger.info(f"  {line}")

    def _data_identity(self) -> dict[str, Any]:
        """Return what a position in the order of samples refers to."""
        return {
            "corpus": self.worker_shards.fingerprint,
            "training.sequence_length": self.config.training.sequence_length,
            "run.seed": self.config.run.seed,
            "data.shuffle": self.config.data.shuffle,
        }

    def _toml(self) -> str:
        """Return the configuration that starts the same run again, in a folder of its own."""
        return to_toml(replace(self.config, run=replace(self.config.run, folder="")))

    def _claim_folder(self, *, stops_early: bool) -> tuple[Path, AbstractContextManager[object]]:
        run, save = self.config.run, self.config.checkpoint
        saves = bool(save.every or save.every_minutes or save.at_end or stops_early)
        names = run.folder, run.name, save.resume
        return claim_run_folder(self.world, *names, self.start, self._toml(), shared=saves)

    def _validation_missed(self) -> bool:
        """Return whether a signal came between the resumed step and its validation."""
        due = validation_due(self.plan, self.step, self.config.validation.every)
        done = 0 if self.validator.validated is None else self.validator.validated[0]
        return bool(self.start.checkpoint) and due and done < self.step

    # --- parts ------------------------------------------------------------------------------------

    def _build_model(self) -> None:
        config, device = self.config, self.world.device
        length = config.training.sequence_length
        self.model = build_model(config.model, self.vocab_size, length)
        counts = self.model.parameter_counts()
        self.plan = plan_run(
            config.training,
            self.world.size,
            counts["total"],
            counts["embedding"],
            start_step=self.resumed.step,
            start_tokens=self.resumed.tokens,
        )
        dtype = compute_dtype(config.parallel.compute_dtype, device)
        mesh = self._fsdp_mesh()
        parallelize(
            self.model,
            mesh,
            parallel=config.parallel,
            activation_checkpoint=config.activation_checkpoint,
            compile=config.compile,
            compute_dtype=dtype,
        )
        materialize(self.model, device, config.run.seed)
        if config.model.weights and not self.start.checkpoint:
            load_initial_weights(self.model, config.model.weights)
        self.precision = autocast(dtype, device) if mesh is None else nullcontext()

    def _fsdp_mesh(self) -> DeviceMesh | None:
        """Return the ranks that average gradients: all with data parallelism, else a worker's."""
        mesh = self.world.mesh
        if mesh is None or (self.config.diloco.method == "none" and self.world.workers > 1):
            return mesh
        return mesh[FSDP] if self.world.ranks_per_worker > 1 else None

    def _build_outer_loop(self) -> OuterLoop:
        config, group = self.config.diloco, self.world.group(WORKER)
        if config.method == "none":
            return DataParallel(self.model, self.world.workers, self.world.liveness)
        build = partial(StreamingDiLoCo, optimizer=self.optimizer, seed=self.config.run.seed)
        shards, liveness = self.world.shards, self.world.liveness
        return build(self.model, group, config, shard_group=shards, liveness=liveness)

    def _build_validator(self) -> Validator:
        """Build the validator; the few sequences that it reads stay in memory."""
        config = self.config
        batches: list[tuple[Tensor, Tensor]] = []
        if config.validation.every:
            held_out = ValidationBatches(
                open_split(config.data, self.tokenizer, "validation"),
                sequence_length=config.training.sequence_length,
                batch_size=config.training.batch_size,
                rank=self.world.rank,
                ranks=self.world.size,
                sequences=config.validation.sequences,
            )
            batches = list(held_out)
        evaluate = partial(
            validate,
            self.model,
            batches,
            self.world,
            chunk_tokens=config.training.loss_chunk_tokens,
            precision=self.precision,
        )
        local, validated = config.validation.local, self.resumed.validated
        return Validator(self.outer, evaluate, local=local, validated=validated)

    def _log_plan(self, folder: Path) -> None:
        config = self.config
        model_line = (
            f"{config.model.name} {config.model.flavor}, {self.model.shape}, "
            f"vocabulary {self.vocab_size:,}"
        )
        data_line = f"{config.data.corpus}: {self.worker_shards} of tokenizer {self.tokenizer.name}"
        log_plan(self.plan, config.training, self.world, model_line, data_line, folder)
        for line in self.outer.describe():
            logger.info(line)
        warnings = run_warnings(config, self.plan.total_steps) if self.world.is_first else []
        for warning in warnings:
            logger.warning(warning)

    def _assert_agreement(self) -> None:
        settings = flat_settings(self.config).items()
        facts = {key: str(value) for key, value in settings if key not in OWN_SETTINGS}
        tokenizer, corpus = self.tokenizer.fingerprint, self.worker_shards.fingerprint
        facts |= {"tokenizer": tokenizer, "corpus": corpus}
        assert_agreement(self.world, facts)
