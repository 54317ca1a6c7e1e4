"""Trainer: builds the parts of a run from its configuration, and trains."""

import gc
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan_diloco.components.checkpoint import (
    Checkpointer,
    Manifest,
    RunState,
    folder_of_worker,
)
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.mirror import build_mirror, new_identity
from torchtitan_diloco.components.optimizer import (
    SkippedSteps,
    build_optimizer,
    clipped_step,
    compute_dtype,
    gradient_norm,
    lr_factor,
    read_later,
    set_lr,
)
from torchtitan_diloco.components.resume import (
    changed_settings,
    check_tokenizer,
    claim_run_folder,
    find_start,
    restore,
)
from torchtitan_diloco.components.run_data import Position, RunData
from torchtitan_diloco.components.run_plan import (
    after_step,
    epochs_text,
    log_early_end,
    log_plan,
    plan_run,
)
from torchtitan_diloco.components.summary import log_summary
from torchtitan_diloco.components.telemetry import Batch, StepResult, Telemetry, build_profiler
from torchtitan_diloco.components.validation import Validator, open_held_out
from torchtitan_diloco.config import Config, to_toml
from torchtitan_diloco.config.schema import flat_settings, portable
from torchtitan_diloco.data.loader import Stream, TrainLoader
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.diagnosis.watch import Diagnosis, Stacks
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.diloco.config import MAY_DIFFER
from torchtitan_diloco.diloco.meeting import agree, code_facts
from torchtitan_diloco.diloco.streaming import DataParallel, OuterLoop
from torchtitan_diloco.distributed.collectives import StopRequest, answer_lag, watch_notices
from torchtitan_diloco.distributed.world import FSDP, WORKER, World
from torchtitan_diloco.export.weights import load_initial_weights, weights_fingerprint
from torchtitan_diloco.island_run import IslandRun
from torchtitan_diloco.log import UserError, logger
from torchtitan_diloco.models import build_model, vocabulary_rows
from torchtitan_diloco.models.interface import describe, flops_per_token, parameter_counts
from torchtitan_diloco.models.parallelize import materialize, parallelize

COLLECT_EVERY = 50
"""Steps between two collections of garbage."""
OWN_SETTINGS = {"run.folder", "data.cache_folder", "checkpoint.mirror", *MAY_DIFFER} | {
    "run.preemption",
    "run.preemption_address",
}
"""Settings that may differ between the processes of a run."""
PACKAGE = Path(__file__).parent
COMPUTES = (
    "components",
    "config",
    "data",
    "distributed",
    "export",
    "island_run.py",
    "islands",
    "models",
    "store",
    "trainer.py",
)
"""Code that decides what is computed, which all ranks must have in common with that of `diloco`."""


class Trainer:
    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world, self.toml = config, world, to_toml(portable(config))
        self.ranks = config.workers * world.ranks_per_worker
        """Number of ranks of all workers, including those of other islands."""
        self.island: IslandRun | None = None
        self.only_noticed = False
        """Whether the run was stopped by a notice to this rank, of which no launcher knows."""
        self._find_start()
        tokenizer = self.tokenizer = build_tokenizer(config.data.tokenizer)
        check_tokenizer(self.start.manifest, tokenizer.name, tokenizer.fingerprint)
        self.vocab_size = vocabulary_rows(config.model, tokenizer.vocab_size)
        length = config.training.sequence_length
        end = tokenizer.end_of_document
        self.model = build_model(config.model, self.vocab_size, length, end_of_document=end)
        self.flops_per_token = flops_per_token(self.model, length)
        self.data = RunData(config, tokenizer, world)
        self._agree()

        self.resumed = self.start.state
        self.position = Position()
        if self.start.manifest is not None:
            saved = self.resumed.position, self.resumed.segment, self.start.manifest.data
            self.position = self.data.find_position(*saved)
        self.step, self.lr = self.resumed.step, 0.0
        self.segment = self.position.segment if self.start.goes_on else None
        """The part of the mixture that the records say is being read."""
        self.skips = SkippedSteps(config.training.max_skipped_steps)
        self._build_model()
        self.optimizer = build_optimizer(self.model, config.optimizer, self.plan.total_steps)
        self.outer = self._build_outer_loop()
        self.parts = world, self.model, self.optimizer, self.outer  # of a checkpoint
        self.validator = self._build_validator()

    def _find_start(self) -> None:
        """Find what the run starts from, here or in its mirror."""
        config = self.config
        world = self.world
        find = partial(find_start, world, config.checkpoint.resume, config.run.folder)
        self.start = find()
        self.mirror = build_mirror(config, world)
        manifest = self.start.manifest
        goes_on = self.start.goes_on
        self.run_identity = manifest.run if goes_on and manifest else new_identity(world)
        if self.mirror is not None:
            self.start = self.mirror.join(self.start, self.run_identity, find)
            self.run_identity = self.mirror.run

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> Path:
        """Train until the last step, `stop_after` or a signal, and return the run folder."""
        config, stop_after = self.config, self.config.training.stop_after
        folder = Path(config.run.folder).expanduser()
        lock = claim_run_folder(self.world, folder, self.start, self.toml)
        for line in (f"{'folder':<10} {folder}", *self.outer.describe()):
            logger.info(line)
        self._resume()
        self.begin()
        own_folder = folder_of_worker(folder, self.world.worker)
        with (
            _without_automatic_collections(),
            lock or nullcontext(),
            StopRequest(self.world, answer_lag(self.world, config.diloco)) as stop,
            watch_notices(config.run, stop),
            self._open_telemetry(folder) as telemetry,
            build_profiler(config.profiling, folder, self.world) as profiler,
            closing(
                Checkpointer(config.checkpoint, own_folder, *self.parts, mirror=self.mirror)
            ) as checkpointer,
            Stacks(own_folder, self.world.rank_in_worker) as stacks,
            Diagnosis(self.outer, self.world, telemetry, folder) as diagnosis,
        ):
            saved, batches = self.step, telemetry.timed(self.loader)
            while not self.finished and (not stop_after or self.step < stop_after):
                stacks.watch(telemetry.vitals().step)
                telemetry.measure(lambda: self.train_step(batches))
                stacks.rest()
                self._note_phase(telemetry)
                diagnosis.after_step(self.step)
                if profiler is not None:
                    profiler.step()
                if self.step % COLLECT_EVERY == 0:
                    gc.collect(1)
                save = checkpointer.due_by_time()
                numbers = telemetry.numbers(stop.waited_seconds)
                requests = stop.agreed(self.step, numbers, save=save)
                then = after_step(config, self.step, requests, finished=self.finished)
                if then.log:
                    progress = None if self.island is None else self.island.progress
                    sums = stop.ask(self.step, numbers)
                    telemetry.open(self.step, self.lr, sums, progress, phase=self.phase)
                telemetry.publish(all=then.flush)
                if then.validate and not (self.island and self.island.peers.left):
                    telemetry.pause(self.validator.validate(self.step, telemetry))
                if self.island is not None:
                    self.island.note(telemetry.loss, self.validator.validated)
                if then.save:
                    telemetry.pause(paused := checkpointer.save(self._manifest()))
                    telemetry.saved(paused, self.step - saved)
                    saved = self.step
                if then.stop:
                    break
            self.outer.drain()
            checkpointer.finish(stop.seconds_left)
            self.only_noticed = stop.only_noticed
        early = not self.finished if self.island is None else self.island.close()
        self._log_end(folder, telemetry, early=early)
        if checkpointer.failure:
            raise UserError(
                f"the last checkpoint could not be saved: {checkpointer.failure}; make room and "
                f"start the same command again with --run.folder {folder}, which resumes from the "
                "checkpoint before, if there is one"
            )
        return folder

    def _log_end(self, folder: Path, telemetry: Telemetry, *, early: bool) -> None:
        config, is_island = self.config, self.island is not None
        if early:
            log_early_end(config, folder, self.step, self.plan.total_steps, island=is_island)
        is_plain = not is_island and config.data.shard_by == "none"
        has_control = is_plain and self.start.manifest is None
        validated = self.validator.validated
        epochs = (
            "" if is_island else epochs_text(self.data.epochs(self.plan, self.position, self.step))
        )
        log_summary(telemetry, folder, self.step, validated, has_control=has_control, epochs=epochs)

    def train_step(self, batches: Iterator[Batch]) -> StepResult:
        self.step += 1
        config, plan, fsdp = self.config.training, self.plan, self.world.group(FSDP)
        step = self.step if self.island is None else self.island.step
        factor = lr_factor(step, plan.total_steps, self.config.lr_schedule)
        self.lr = self.config.optimizer.lr * factor
        set_lr(self.optimizer, factor)
        # The gradient is the mean over all tokens of the step; FSDP2 averages over ranks.
        scale = self.ranks / plan.tokens_per_step
        cross_entropy = torch.zeros((), device=self.world.device)
        for number, (inputs, targets) in enumerate(islice(batches, plan.accumulation), start=1):
            inputs = inputs.to(self.world.device, non_blocking=True)
            targets = targets.to(self.world.device, non_blocking=True)
            if isinstance(self.model, FSDPModule):  # links between workers are slow: once a step
                self.model.set_requires_all_reduce(number == plan.accumulation)
            head = loss_head(targets, z_loss=config.z_loss)
            sums = self.model(inputs, head=head)
            (sums.objective * scale).backward()
            cross_entropy += sums.cross_entropy
        total_norm = gradient_norm(self.model.parameters(), fsdp)
        read = read_later(torch.stack([cross_entropy, total_norm]))
        clipped_step(self.optimizer, total_norm, config.max_gradient_norm)
        self.optimizer.zero_grad()
        loss, norm = read()  # while a GPU runs the optimizer step
        skipped = self.skips.count(self.step, norm)
        if skipped:
            self.outer.heal(fsdp)
        self.outer.step(weight=0 if skipped else self.weight)
        if self.finished:
            self.outer.drain()
        return StepResult(loss, norm, skipped)

    @property
    def finished(self) -> bool:
        """Whether all tokens of the run have been trained. Islands count them together."""
        island = self.island
        return self.step == self.plan.total_steps if island is None else island.peers.finished

    @property
    def phase(self) -> int | None:
        """Number of the phase of the data that the next step is in, if there are phases."""
        if not self.config.data.phases:
            return None
        return self.data.phase_number(self.loader.mixture, self.loader.segment)

    def begin(self) -> None:
        """Join the other islands, if any, and start the loader at the current position."""
        world, config = self.world, self.config
        start = self.position.samples
        stream = None
        segments = self.data.segments(self.plan, self.position)
        if self.island is not None:
            start, stream = self.island.join()
            segments = self.data.segments(self.plan, Position())
        elif config.data.shard_by != "none":
            stream = Stream(world.worker, world.workers)
        self.loader = TrainLoader(
            self.data.corpora,
            segments=segments,
            sequence_length=config.training.sequence_length,
            batch_size=config.training.batch_size,
            accumulation=self.plan.accumulation,
            rank=world.rank if stream is None else world.rank_in_worker,
            ranks=world.size if stream is None else world.ranks_per_worker,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            processes=config.data.loader_processes,
            start=start,
            stream=stream,
            own=self.data.own,
            pin_memory=world.device.type == "cuda",
        )
        self.weight = self.plan.tokens_per_step // config.workers
        if config.data.shard_by == "own":
            self.weight = round(self.plan.tokens_per_step * self.data.share)

    def _open_telemetry(self, folder: Path) -> Telemetry:
        parts = self.config.metrics, self.world, folder, self.plan, self.outer, self.resumed.step
        settings = flat_settings(portable(self.config))
        options: Any = {"settings": settings, "run": self.island.run if self.island else ""}
        telemetry = Telemetry(*parts, flops_per_token=self.flops_per_token, **options)
        self._note_phase(telemetry)
        return telemetry

    def _note_phase(self, telemetry: Telemetry) -> None:
        """Record the mixture that the next step reads, if it is another one."""
        before, self.segment = self.segment, self.loader.segment
        if self.segment != before and len(self.data.corpora) > 1:
            record = self.data.phase_record(self.plan, self.step, self.loader.mixture, self.segment)
            telemetry.begin_phase(record)

    # --- checkpoints ------------------------------------------------------------------------------

    def _manifest(self) -> Manifest:
        tokens = self.plan.tokens_at(self.step)
        state = RunState(
            step=self.step,
            tokens=tokens if self.island is None else self.island.progress.tokens,
            position=self.loader.position,
            segment=self.loader.segment,
            validated=self.validator.validated,
        )
        return Manifest(
            state,
            workers=1 if self.config.diloco.method == "none" else self.world.workers,
            data=self.data.identity,
            config=self.toml,
            tokenizer=self.tokenizer.fingerprint,
            run=self.run_identity,
        )

    def _resume(self) -> None:
        """Load the checkpoint, and log what has changed since the save."""
        manifest = self.start.manifest
        if manifest is None:
            return
        notes = restore(self.start, *self.parts)
        notes += self.position.notes if self.island is None else []
        if self.config.model.weights:
            notes.append("model.weights is for new runs: the checkpoint's weights are used")
        if self.start.goes_on and self.config.checkpoint.resume != "auto":
            notes.append("checkpoint.resume is for new runs: this one continues")
        path = self.start.checkpoint or f"worker {self.start.holders[0]}"
        logger.info(f"resumed from {path}: step {manifest.step}, {manifest.state.tokens:,} tokens")
        changes = changed_settings(manifest.config, self.toml)
        for line in [*(f"changed: {change}" for change in changes), *notes]:
            logger.info(f"  {line}")

    # --- parts ------------------------------------------------------------------------------------

    def _build_model(self) -> None:
        config, device, counts = self.config, self.world.device, parameter_counts(self.model)
        # Tokens of islands are counted in their log.
        start = RunState() if config.islands.join else self.resumed
        self.plan = plan_run(
            config.training,
            self.ranks,
            counts["total"],
            counts["embedding"],
            start_step=start.step,
            start_tokens=start.tokens,
            muon=config.optimizer.name == "muon",
        )
        model = f"{config.model.flavor}, {describe(self.model)}, vocabulary {self.vocab_size:,}"
        data = f"{self.data.description}, tokenizer {self.tokenizer.name}"
        epochs = self.data.epochs(self.plan, self.position, self.plan.total_steps)
        log_plan(self.plan, config, self.world, model, data, epochs)  # before memory is allocated
        if config.model.document_mask and self.world.is_first:
            for warning in self.data.long_documents():
                logger.warning(warning)
        dtype = compute_dtype(config.parallel.compute_dtype, device)
        mesh = self.world.fsdp_mesh(all_workers=config.diloco.method == "none")
        parallelize(
            self.model,
            mesh,
            parallel=config.parallel,
            activation_checkpoint=config.activation_checkpoint,
            compile=config.compile,
            compute_dtype=dtype,
        )
        materialize(self.model, device, config.run.seed)
        if config.model.weights and self.start.manifest is None:
            load_initial_weights(self.model, config.model.weights)

    def _build_outer_loop(self) -> OuterLoop:
        config = self.config.diloco
        if self.config.islands.join:
            identity = self.data.common_facts | {"tokenizer": self.tokenizer.fingerprint}
            self.island = IslandRun(self.config, self.plan, self.world, identity)
            return StreamingDiLoCo(self.model, self.island.peers, config, optimizer=self.optimizer)
        if config.method == "none":
            return DataParallel(self.model, self.world.workers)
        return StreamingDiLoCo(
            self.model,
            self.world.group(WORKER),
            replace(config, link=replace(config.link, streams=self.world.streams)),
            optimizer=self.optimizer,
            seed=self.config.run.seed,
            shard_group=self.world.shards,
            liveness=self.world.liveness,
            total_steps=self.plan.total_steps,
        )

    def _build_validator(self) -> Validator:
        """Build the validator, and keep its few sequences in memory."""
        config = self.config
        held_out = []
        if config.validation.every:
            is_own = config.data.shard_by == "own"
            opened = open_held_out(
                config, self.tokenizer, self.world, each_worker_has_its_own=is_own
            )
            held_out = [corpus.in_memory() for corpus in opened]
        return Validator(self.model, held_out, self.world, self.outer, self.resumed.validated)

    def _agree(self) -> None:
        settings = flat_settings(self.config).items()
        facts = {key: str(value) for key, value in settings if key not in OWN_SETTINGS}
        facts |= {key: str(fact) for key, fact in self.data.common_facts.items()}
        weights = weights_fingerprint("" if self.start.manifest else self.config.model.weights)
        facts |= {"tokenizer": self.tokenizer.fingerprint, "model.weights": weights}
        code = [PACKAGE / name for name in COMPUTES]
        model = sys.modules[type(self.model).__module__]  # FLAVORS may have those of other packages
        source = getattr(model, "__file__", None)  # that of an interactive session has none
        if source and not model.__name__.startswith(f"{__package__}."):
            code.append(Path(source))
        agree(facts | code_facts(*code), self.world.control, "rank")


@contextmanager
def _without_automatic_collections() -> Iterator[None]:
    """Leave it to the body when garbage is collected: on all ranks after the same steps."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
