"""Builds the parts of a run and holds its loop. The one place that sees the whole configuration."""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.checkpoint_folder import Manifest, check_tokenizer
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.metrics import MetricsWriter
from torchtitan_diloco.components.optimizer import (
    autocast,
    build_optimizer,
    clip_gradients,
    compute_dtype,
    lr_factor,
    reduce_over_workers,
    set_lr,
)
from torchtitan_diloco.components.profiling import build_profiler
from torchtitan_diloco.components.reports import StepReports, StepResult
from torchtitan_diloco.components.resume import agree_on_start, changed_settings, restore
from torchtitan_diloco.components.run_claim import claim_run_folder
from torchtitan_diloco.components.run_plan import log_plan, plan_run, vocabulary_rows
from torchtitan_diloco.components.step_time import TimedIterator
from torchtitan_diloco.components.validation import Validator
from torchtitan_diloco.config.fields import flat_settings
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.config.toml_writer import to_toml
from torchtitan_diloco.config.unused import unused_settings
from torchtitan_diloco.data.loader import (
    build_train_loader,
    build_validation_batches,
    open_split,
    open_tokenizer,
)
from torchtitan_diloco.data.worker_shards import share_out
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.diloco.advice import advice
from torchtitan_diloco.diloco.data_parallel import DataParallel
from torchtitan_diloco.distributed.agreement import assert_agreement
from torchtitan_diloco.distributed.stop import StopRequest
from torchtitan_diloco.distributed.world import FSDP, WORKER, World
from torchtitan_diloco.export.initial_weights import load_initial_weights
from torchtitan_diloco.models import MODELS
from torchtitan_diloco.planner.summary import log_summary, outer_line, summary_record, wire_line
from torchtitan_diloco.utils import GIB, GarbageControl, clock, code_fingerprint, logger

STEPS_APART = 6
"""Workers that train on their own are not held together to print a number or to ask whether to stop: what they say is read so
many steps later, or after the delay of an exchange where that is longer."""
ASK_EVERY = 2
"""Steps between two questions whether to stop."""

OWN_SETTINGS = {"run.folder", "data.cache_folder", "diloco.link.interface"}
"""Settings in which the processes of a run may differ."""


class Trainer:
    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.start = agree_on_start(world, config.checkpoint.resume, config.run.folder)
        self.tokenizer = open_tokenizer(config.data)
        if self.start.manifest is not None:
            check_tokenizer(
                self.start.checkpoint,
                self.start.manifest,
                self.tokenizer.name,
                self.tokenizer.fingerprint,
            )
        self.train_tokens = open_split(config.data, self.tokenizer, "train")
        self.worker_shards = share_out(
            config.data, self.train_tokens, self.tokenizer, world.workers
        )
        self.vocab_size = vocabulary_rows(config.model, self.tokenizer.vocab_size)
        self._assert_agreement()

        spec = MODELS[config.model.name]
        with torch.device("meta"):
            self.model = spec.build(config.model, self.vocab_size, config.training.sequence_length)
        counts = self.model.parameter_counts()
        started = {"start_step": self.start.step, "start_tokens": self.start.tokens}
        self.plan = plan_run(
            config.training, world, counts["total"], counts["embedding"], **started
        )
        dtype = compute_dtype(config.parallel.compute_dtype, world.device)
        if dtype == torch.bfloat16 and world.device.type != "cuda":
            raise ValueError(
                'parallel.compute_dtype = "bfloat16" needs a GPU, and there is none here: use "auto" or "float32"'
            )
        spec.parallelize(
            self.model,
            self._fsdp_mesh(),
            parallel=config.parallel,
            activation_checkpoint=config.activation_checkpoint,
            compile=config.compile,
            compute_dtype=dtype,
        )
        spec.materialize(self.model, world.device, config.run.seed)
        if config.model.weights and not self.start.checkpoint:
            load_initial_weights(self.model, config.model.weights)
        self.precision = (
            autocast(dtype, world.device) if self._fsdp_mesh() is None else nullcontext()
        )
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(self.model, config.optimizer, self.plan.total_steps)

        self.outer = self._outer_loop()
        self.loader = build_train_loader(
            self.train_tokens,
            sequence_length=config.training.sequence_length,
            batch_size=config.training.batch_size,
            accumulation=self.plan.accumulation,
            rank=world.rank,
            ranks=world.size,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            processes=config.data.loader_processes,
            start=self._position(),
            worker_shards=self.worker_shards,
            pin_memory=world.device.type == "cuda",
        )
        self.step = self.start.step
        self.behind = {} if self.start.manifest is None else self.start.manifest.run
        """What a run that goes on has behind it."""
        if (
            self.start.manifest is not None
            and self.start.manifest.settings.get("diloco.method") != config.diloco.method
        ):
            self.behind |= {
                "totals": {},
                "totals_after": self.start.step,
            }  # those of another method
        self.skipped_in_a_row: int = self.behind.get("skipped_in_a_row", 0)
        self.validator = self._validator()

    # --- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> Path:
        """Trains to the last step, or to the one after which `stop_after` or a signal ends it. Returns the run's folder."""
        config, total_steps = self.config, self.plan.total_steps
        until = min(total_steps, config.training.stop_after or total_steps)
        own_folder = replace(
            config, run=replace(config.run, folder="")
        )  # starts the same run again, in a folder of its own
        saves = (
            config.checkpoint.every
            or config.checkpoint.every_minutes
            or config.checkpoint.at_end
            or until < total_steps
        )
        claimed = config.run, config.checkpoint.resume, self.start, to_toml(own_folder)
        folder, held = claim_run_folder(self.world, *claimed, saves=bool(saves))
        self._log_plan(folder)
        self._take_up()
        together = config.diloco.method == "none" or self.world.workers == 1
        lag, ask_every = (
            (1, 1) if together else (max(STEPS_APART, config.diloco.overlap.delay), ASK_EVERY)
        )
        garbage = GarbageControl(config.run.garbage_collect_every)
        batches = TimedIterator(iter(self.loader))
        with (
            StopRequest(self.world, lag, ask_every) as stop,
            MetricsWriter(
                folder if self.world.is_first else None,
                config.metrics,
                self.step,
                self.world.workers,
                held,
            ) as metrics,
            build_profiler(config.profiling, folder, self.world) as profiler,
            Checkpointer(
                config.checkpoint, folder, self.world, self.model, self.optimizer, self.outer
            ) as checkpointer,
        ):
            flops = self.model.flops_per_token(config.training.sequence_length)
            reports = StepReports(
                self.world, self.plan, flops, metrics, lag, self.outer, self.behind
            )
            if self.start.checkpoint and self.validator.missed(self.step):
                reports.pause(self.validator.validate(self.step, metrics))
            while self.step < until:
                reports.step_begins()
                reports.step_done(self.train_step(batches), batches.take_seconds())
                profiler.step()
                garbage.after_step(self.step)
                asked, saving = stop.agreed(
                    self.step, self.world.is_first and checkpointer.minutes_have_passed()
                )
                finished = self.step == total_steps
                pausing = self.step == until and not finished
                stopping = pausing or (asked and not finished)
                at_end = config.checkpoint.at_end and (stopping or finished)
                saving = saving or checkpointer.due(self.step) or at_end or pausing
                if finished:
                    started = time.perf_counter()
                    self.outer.drain()
                    reports.drained(time.perf_counter() - started)
                # What a run that goes on from a checkpoint would not write again is written before the save.
                settled = stopping or finished or saving
                if settled or self.step % config.metrics.log_every == 0 or self.step == 1:
                    reports.open(self.step, self.lr, stop.waited_seconds)
                validating = self.validator.due(self.step)
                reports.publish(self.step, all=settled or validating)
                if validating and not asked:  # whoever sent the signal is waiting
                    reports.pause(self.validator.validate(self.step, metrics))
                if saving:
                    self._save(checkpointer, reports)
                if stopping:
                    self.outer.drain()
                    break
            checkpointer.wait()
            facts = (
                self.step,
                self.validator.validated,
                reports.totals,
                self.behind.get("totals_after", 0),
                reports.observed,
            )
            summary = summary_record(self.plan, config.diloco, self.world.size, *facts)
            if (
                self.step > self.start.step
            ):  # else the record of the start before stays the last word
                metrics.write_summary(summary)
                metrics.draw(self.step)
        garbage.close()
        if self.step < total_steps:
            asker, again = "a signal", "the same command"
            if self.step >= until:
                asker = f"training.stop_after = {config.training.stop_after}"
                again = "with a later one or none, the same command"
            saved = config.checkpoint.at_end or self.step >= until
            hint = f"; {again} with --run.folder {folder} goes on" if saved else ""
            logger.info(
                f"stopped after step {self.step} of {total_steps}, as asked by {asker}{hint}"
            )
        log_summary(summary)
        logger.info(f"took {clock(reports.elapsed_seconds)}; the run is in {folder}")
        if checkpointer.failure:
            raise ValueError(
                f"the last checkpoint could not be saved: {checkpointer.failure}; free what is missing and start the same "
                f"command again with --run.folder {folder}, which goes on from the checkpoint before, if there is one"
            )
        return folder

    def train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> StepResult:
        self.step += 1
        config, plan = self.config.training, self.plan
        set_lr(self.optimizer, self.lr)
        # The gradient is a sum over the tokens of all ranks / their number. FSDP2 takes the mean over ranks: x ranks.
        scale = self.world.size / plan.tokens_per_step
        cross_entropy = torch.zeros((), device=self.world.device)
        for number, (inputs, targets) in enumerate(islice(batches, plan.accumulation), start=1):
            inputs = inputs.to(self.world.device, non_blocking=True)
            targets = targets.to(self.world.device, non_blocking=True)
            reduce_over_workers(self.model, number == plan.accumulation)
            with self.precision:
                head = loss_head(
                    targets, z_loss=config.z_loss, chunk_tokens=config.loss_chunk_tokens
                )
                sums = self.model(inputs, head=head)
            (sums.objective * scale).backward()
            cross_entropy += sums.cross_entropy
        norm = clip_gradients(self.parameters, config.max_gradient_norm, self.world.group(FSDP))
        # Read where the norm has been waited for: behind the optimizer an accelerator would run empty before the next step.
        loss = cross_entropy.item()
        skipped = not math.isfinite(norm)
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.outer.step(
            weight=0.0
            if skipped
            else plan.tokens_per_step * self.worker_shards.shares[self.world.worker]
        )
        self._guard(skipped, norm)
        return StepResult(loss, norm, skipped)

    @property
    def lr(self) -> float:
        return self.config.optimizer.lr * lr_factor(
            self.step, self.plan.total_steps, self.config.lr_schedule
        )

    def _guard(self, skipped: bool, norm: float) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            return
        logger.warning(f"step {self.step}: gradient norm is {norm}, so the step is skipped")
        limit = self.config.training.max_skipped_steps
        if self.skipped_in_a_row > limit:
            raise ValueError(
                f"{self.skipped_in_a_row} steps in a row, up to step {self.step}, had gradients that are not finite, "
                f"more than training.max_skipped_steps = {limit}: lower optimizer.lr, lengthen "
                "lr_schedule.warmup_steps, or look at the data"
            )

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _save(self, checkpointer: Checkpointer, reports: StepReports) -> None:
        manifest = Manifest(
            step=self.step,
            tokens=self.plan.tokens_at(self.step),
            position=self.loader.position,
            workers=1 if self.config.diloco.method == "none" else self.world.workers,
            ranks_per_worker=self.world.ranks_per_worker,
            data=self._data_identity(),
            run={
                "skipped_in_a_row": self.skipped_in_a_row,
                "validated": self.validator.validated,
                "totals": dict(
                    reports.totals
                ),  # it is written later, while the run goes on counting
                "totals_after": self.behind.get("totals_after", 0),
                "elapsed_seconds": reports.elapsed_seconds,
            },
            settings={key: str(value) for key, value in flat_settings(self.config).items()},
            tokenizer=self.tokenizer.fingerprint,
        )
        reports.pause(checkpointer.save(manifest))

    def _data_identity(self) -> dict[str, object]:
        """What a position in the order of samples is good for."""
        config = self.config
        return {
            "corpus": self.worker_shards.fingerprint,
            "training.sequence_length": config.training.sequence_length,
            "run.seed": config.run.seed,
            "data.shuffle": config.data.shuffle,
        }

    def _position(self) -> int:
        manifest = self.start.manifest
        return (
            manifest.position
            if manifest is not None and manifest.data == self._data_identity()
            else 0
        )

    def _take_up(self) -> None:
        """Goes on where the checkpoint was saved, and says what is different."""
        manifest = self.start.manifest
        if manifest is None:
            return
        notes = restore(
            self.start, self.config.checkpoint, self.world, self.model, self.optimizer, self.outer
        )
        if manifest.data != self._data_identity():
            notes.append(
                "the data are others than before, or in another order: they are read from their beginning"
            )
        if self.config.model.weights:
            notes.append("model.weights is for a new run: the checkpoint's own are taken")
        changes = changed_settings(
            manifest, {key: str(value) for key, value in flat_settings(self.config).items()}
        )
        logger.info(
            f"goes on from {self.start.checkpoint}: step {manifest.step}, {manifest.tokens:,} tokens"
        )
        for line in [*(f"changed: {change}" for change in changes), *notes]:
            logger.info(f"  {line}")

    # --- parts -----------------------------------------------------------------------------------------------------

    def _fsdp_mesh(self) -> DeviceMesh | None:
        """What gradients are averaged over: all ranks with data parallelism, else those of this worker."""
        mesh = self.world.mesh
        if mesh is None or (self.config.diloco.method == "none" and self.world.workers > 1):
            return mesh
        return mesh[FSDP] if self.world.ranks_per_worker > 1 else None

    def _outer_loop(self) -> StreamingDiLoCo | DataParallel:
        config = self.config
        if config.diloco.method == "none":
            return DataParallel()
        group, shards = self.world.group(WORKER), self.world.shards
        return StreamingDiLoCo(
            self.model, group, config.diloco, shard_group=shards, seed=config.run.seed
        )

    def _validator(self) -> Validator:
        """With the held-out sequences this rank reads at every validation: few, so they stay in memory."""
        config = self.config
        batches: list[tuple[Tensor, Tensor]] = []
        if config.validation.every:
            held_out = build_validation_batches(
                open_split(config.data, self.tokenizer, "validation"),
                sequence_length=config.training.sequence_length,
                batch_size=config.training.batch_size,
                rank=self.world.rank,
                ranks=self.world.size,
                sequences=config.validation.sequences,
            )
            batches = list(held_out)
        validated = self.behind.get("validated")
        return Validator(
            config.validation,
            self.model,
            self.outer,
            batches,
            self.world,
            chunk_tokens=config.training.loss_chunk_tokens,
            precision=self.precision,
            last_step=self.plan.total_steps,
            validated=None if validated is None else (validated[0], validated[1]),
        )

    def _log_plan(self, folder: Path) -> None:
        shape, config = self.model.shape, self.config
        model_line = (
            f"{config.model.name} {config.model.flavor}, {shape.layers} layers x {shape.width}, {shape.heads} heads of "
            f"{shape.head_dim}, feed-forward {shape.feed_forward}, vocabulary {self.vocab_size:,}"
        )
        data_line = f"{config.data.corpus}: {self.worker_shards} of tokenizer {self.tokenizer.name}"
        log_plan(self.plan, config.training, self.world, model_line, data_line, folder)
        if isinstance(self.outer, StreamingDiLoCo):
            logger.info(f"{'outer':<10} {outer_line(config.diloco)}")
            logger.info(f"{'wire':<10} {wire_line(config.diloco)}")
            residual = " and what encoding lost" * config.diloco.quantization.error_feedback
            held = f"shared parameters, the outer optimizer, one delta{residual}"
            logger.info(f"{'':<10} {self.outer.state_bytes / GIB:.2f} GiB a rank for {held}")
            logger.info(self.outer.table())
        elif self.world.workers > 1:
            logger.info(
                f"{'outer':<10} none: gradients are averaged at every step; of [diloco] only workers and link are read"
            )
        for warning in self._warnings() if self.world.is_first else ():
            logger.warning(warning)

    def _warnings(self) -> list[str]:
        found = [*advice(self.config.diloco, self.plan.total_steps), *unused_settings(self.config)]
        warmup_steps = self.config.lr_schedule.warmup_steps
        if warmup_steps > self.plan.total_steps:
            found.append(
                f"lr_schedule.warmup_steps = {warmup_steps} is longer than the run of {self.plan.total_steps} steps, so the "
                "peak learning rate is never reached: shorten it"
            )
        stop_after = self.config.training.stop_after
        if stop_after >= self.plan.total_steps:
            found.append(
                f"training.stop_after = {stop_after} does nothing: the run ends after step {self.plan.total_steps}"
            )
        return found

    def _assert_agreement(self) -> None:
        settings = {
            key: str(value)
            for key, value in flat_settings(self.config).items()
            if key not in OWN_SETTINGS
        }
        facts = settings | {
            "code": code_fingerprint(),
            "torch version": str(torch.__version__),
            "tokenizer": self.tokenizer.fingerprint,
            "corpus": self.worker_shards.fingerprint,
        }
        assert_agreement(self.world, facts)
