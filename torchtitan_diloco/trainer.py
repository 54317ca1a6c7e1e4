"""Trainer: builds the parts of a run from its configuration, and trains."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint import Checkpointer, Loads, RunPart, RunState
from torchtitan_diloco.components.checkpoint_folder import Manifest, folder_of_worker
from torchtitan_diloco.components.common_facts import common_code, common_settings
from torchtitan_diloco.components.garbage import GarbageCollection
from torchtitan_diloco.components.group_entries import GroupEntries, SavedEntries
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.lr_schedule import lr_factor
from torchtitan_diloco.components.mirror import build_mirror
from torchtitan_diloco.components.optimizer import (
    build_optimizer,
    clipped_step,
    gradient_norm,
    read_later,
    set_lr,
)
from torchtitan_diloco.components.profiling import build_profiler
from torchtitan_diloco.components.resume import (
    OtherRun,
    ThisRun,
    changed_settings,
    check_tokenizer,
    find_start,
)
from torchtitan_diloco.components.run_data import RunData, SavedMixture
from torchtitan_diloco.components.run_folder import FolderLock, claim_run_folder, find_compared_run
from torchtitan_diloco.components.run_plan import (
    AfterStep,
    epochs_text,
    log_early_end,
    log_plan,
    plan_run,
)
from torchtitan_diloco.components.same_model import check_same_meaning
from torchtitan_diloco.components.sampling import build_sampler
from torchtitan_diloco.components.skipped_steps import SkippedSteps
from torchtitan_diloco.components.summary import log_summary
from torchtitan_diloco.components.telemetry import SavedTelemetry, StepResult, Telemetry
from torchtitan_diloco.components.traffic import traffic_of
from torchtitan_diloco.components.validation import SavedValidation, build_validator
from torchtitan_diloco.config import Config, to_toml
from torchtitan_diloco.config.parts import OPTIMIZERS
from torchtitan_diloco.config.schema import flat_settings, portable
from torchtitan_diloco.course import Course, JobCourse, counted_before
from torchtitan_diloco.data.batch import Batch
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.diagnosis.watch import Diagnosis, Stacks
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.diloco.agreement import agree
from torchtitan_diloco.diloco.data_parallel import DataParallel, OuterLoop
from torchtitan_diloco.distributed.collectives import (
    Requests,
    StopRequest,
    longest_lag,
    naming_lost_ranks,
    on_all_ranks,
    watch_notices,
)
from torchtitan_diloco.distributed.world import FSDP, World
from torchtitan_diloco.islands.config import location_id
from torchtitan_diloco.models import build_model, vocabulary_rows
from torchtitan_diloco.models.activations import activation_bytes
from torchtitan_diloco.models.interface import describe, flops_per_token, parameter_counts
from torchtitan_diloco.models.parallelize import compute_dtype, materialize, parallelize


class Trainer:
    """Build the parts of a run, and train."""

    def __init__(
        self, config: Config, world: World, note_step: Callable[[], None] = lambda: None
    ) -> None:
        """Build the parts of a run. `note_step`: called after each step."""
        self._note_step = note_step
        self.config = config
        self.world = world
        self.toml = to_toml(portable(config))
        self.ranks = config.workers * world.ranks_per_worker
        """Number of ranks of all workers, including those of other islands."""
        self.got_signal = False
        """Whether this rank got a signal to stop."""
        self.knows_of_stop = False
        """Whether a rank got a signal or a notice to stop, as far as this one knows."""
        self.lr = 0.0
        tokenizer = build_tokenizer(config.data.tokenizer)
        self.tokenizer = tokenizer
        self._find_start()
        if self.start.manifest is not None:
            self._check_start(self.start.manifest, goes_on=self.start.goes_on)
        self.vocab_size = vocabulary_rows(config.model, tokenizer.vocab_size)
        length = config.training.sequence_length
        end = tokenizer.end_of_document
        self.model = build_model(config.model, self.vocab_size, length, end_of_document=end)
        self.flops_per_token = flops_per_token(self.model, length)
        self.data = RunData(config, tokenizer, world, saved=self.start.position)
        self._agree()

        self.skips = SkippedSteps(config.training.max_skipped_steps)
        self._build_model()
        self.course = self._build_course()
        self.optimizer = build_optimizer(self.model, config.optimizer, self.plan.total_steps)
        self.group_entries = GroupEntries(self.optimizer)
        self.outer = self._build_outer_loop()
        self.validator = build_validator(config, tokenizer, self.model, self.outer, world)
        self.sampler = build_sampler(config, tokenizer, self.model, self.outer, self.data)
        self.telemetry = self._build_telemetry()
        self.state = self._list_state()

    def _find_start(self) -> None:
        """Find what the run starts from."""
        config = self.config
        world = self.world
        check = partial(self._check_start, goes_on=True)
        other_run = OtherRun(world, config.checkpoint.resume, run_folder=config.run.folder)
        this_run = ThisRun(world, config.run.folder)
        self.mirror = build_mirror(config, world, this_run, self.toml, check=check)
        # A run that has lost its folder may also have lost what it started from, so that its mirror
        # comes before `checkpoint.resume`.
        self.start = find_start(filter(None, (this_run, self.mirror, other_run)))
        # An island without a checkpoint goes on from the shared parameters of its run.
        begins_anew = self.start.manifest is None and not config.islands.join
        if begins_anew and self.mirror is not None:
            self.mirror.log_new_run()

    def _check_start(self, manifest: Manifest, *, goes_on: bool) -> None:
        """Raise if the checkpoint of a manifest has parameters or tokens of another meaning."""
        check_tokenizer(manifest, self.tokenizer.name, self.tokenizer.fingerprint)
        check_same_meaning(manifest, self.config.model, goes_on=goes_on)

    @property
    def step(self) -> int:
        """Inner steps of this worker so far."""
        return self.course.step

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> Path:
        """Train until the last step, `stop_after` or a signal, and return the run folder."""
        config = self.config
        folder = Path(config.run.folder).expanduser()
        own_folder = folder_of_worker(folder, self.world.worker)
        lock = self._claim(folder)
        with (
            GarbageCollection() as garbage,
            lock or nullcontext(),
            StopRequest(self.world, longest_lag(self.world, config.diloco)) as stop,
            watch_notices(config.run, stop) as notices,
            self.telemetry as telemetry,
            build_profiler(config.profiling, folder, self.world) as profiler,
            closing(self._build_checkpointer(own_folder, lock)) as checkpointer,
            Stacks(own_folder, self.world.rank_in_worker) as stacks,
            Diagnosis(
                self.outer,
                self.world,
                telemetry=telemetry,
                folder=folder,
                has_mirror=bool(config.checkpoint.mirror),
            ) as diagnosis,
        ):
            self.course.leave_when(lambda: stop.knows_of_stop)
            if not self.course.took_end:
                telemetry.begin_phase(self.data.new_phase(self.step, self.course.share))
            batches = telemetry.timed(self.data.loader)
            while not (self.course.finished or self._is_paused):
                stacks.expect_step(telemetry.vitals().step)
                telemetry.measure(partial(self.train_step, batches))
                stacks.expect_nothing()
                self._note_step()
                telemetry.begin_phase(self.data.new_phase(self.step, self.course.share))
                diagnosis.after_step(self.step)
                if profiler is not None:
                    profiler.step()
                garbage.after_step(self.step)
                numbers = telemetry.numbers(stop.waited_seconds)
                requests = stop.agreed(self.step, numbers, save=checkpointer.due_by_time())
                save_seconds = checkpointer.save_seconds
                notices.check_time(stop.steps_to_stop, stop.step_seconds, save_seconds)
                after = self._after_step(requests)
                saves = checkpointer.is_due(after)
                validates = self.validator.is_due(after) and not self.course.has_left
                if saves or telemetry.is_due(after):
                    sums = stop.ask(self.step, numbers)
                    progress = self.course.progress
                    telemetry.open_record(
                        self.step, lr=self.lr, sums=sums, run=progress, phase=self.data.phase
                    )
                # A resumed run does not repeat the steps before its checkpoint: write them now.
                telemetry.publish(all=saves or validates or after.stops)
                if validates:
                    weights = self.data.weights
                    telemetry.exclude_pause(self.validator.validate(self.step, telemetry, weights))
                if self.sampler.is_due(after) and not self.course.has_left:
                    telemetry.exclude_pause(self.sampler.sample(self.step, telemetry))
                self.course.note(telemetry.loss, self.validator.validated)
                if saves:
                    position = self.data.saved_position()
                    paused = checkpointer.save(self.step, self.course.tokens, position)
                    telemetry.note_save(self.step, paused)
                if after.stops:
                    break
            self.outer.drain()
            if self.course.took_end:
                self._save_end(checkpointer)
            checkpointer.finish(lambda: stop.seconds_left)
        self.got_signal = stop.got_signal
        self.knows_of_stop = stop.knows_of_stop
        self._log_end(folder, telemetry)
        if checkpointer.failure:
            raise UserError(
                f"the last checkpoint could not be saved: {checkpointer.failure}; make room and "
                f"start the same command again with --run.folder {shlex.quote(str(folder))}, "
                "which resumes from the checkpoint before, if there is one"
            )
        return folder

    @property
    def has_ended(self) -> bool:
        """Whether the end of the run or `training.stop_after` is reached."""
        return self._is_paused or (self.course.finished and not self.course.has_left)

    @property
    def _is_paused(self) -> bool:
        """Whether `training.stop_after` is reached."""
        return 0 < self.config.training.stop_after <= self.step

    def _after_step(self, requests: Requests) -> AfterStep:
        """Return what is true after a step."""
        finished = self.course.finished
        return AfterStep(
            step=self.step,
            finished=finished,
            paused=self._is_paused and not finished,
            asked_to_stop=requests.stop,
            asked_to_save=requests.save,
        )

    def _save_end(self, checkpointer: Checkpointer) -> None:
        """Save the final model of a run that had ended before this worker took a step."""
        if checkpointer.is_due(self._after_step(Requests(stop=False, save=False))):
            self.course.step += 1  # the checkpoint of its last step has another model
            position = self.start.position or self.data.saved_position()
            checkpointer.save(self.step, self.course.tokens, position)

    def _log_end(self, folder: Path, telemetry: Telemetry) -> None:
        """Close the course, and log where the run has ended and its summary."""
        config = self.config
        if self.course.close():
            log_early_end(config, folder=folder, step=self.step, describe=self.course.describe_stop)
        is_alone = not self.course.run  # what islands read is in their run
        has_control = is_alone and config.data.shard_by == "none" and self.start.manifest is None
        is_control = config.diloco.method == "none" and config.workers > 1
        finds = is_control and self.world.is_first
        compared = find_compared_run(folder, portable(config)) if finds else None
        epochs = self.data.epochs(self.plan, self.data.position, self.step)
        log_summary(
            telemetry,
            folder=folder,
            step=self.step,
            validated=self.validator.validated,
            has_control=has_control,
            compared=compared,
            traffic=self.traffic,
            price=config.price,
            epochs=epochs_text(epochs) if is_alone else "",
        )

    def train_step(self, batches: Iterator[Batch]) -> StepResult:
        """Train this worker on the micro-batches of one step, then step the outer loop."""
        self.course.step += 1
        config = self.config.training
        plan = self.plan
        fsdp = self.world.group(FSDP)
        factor = lr_factor(self.course.scheduled_step, plan.schedule_steps, self.config.lr_schedule)
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
        read_loss_and_norm = read_later(torch.stack([cross_entropy, total_norm]))
        clipped_step(self.optimizer, total_norm, config.max_gradient_norm)
        self.optimizer.zero_grad()
        self.group_entries.check()
        loss, norm = read_loss_and_norm()  # while a GPU runs the optimizer step
        skipped = self.skips.count(self.step, norm)
        if skipped:
            self.outer.heal(fsdp)
        self.outer.step(weight=0 if skipped else self.data.weight(plan))
        self.data.enter(self.course.entered)
        if self.course.finished:
            self.outer.drain()
        return StepResult(cross_entropy=loss, gradient_norm=norm, skipped=skipped)

    def _claim(self, folder: Path) -> FolderLock | None:
        """Make the folder that of this run, load the checkpoint, and join the run. Return, on the
        first rank of a worker, the lock of its folder."""
        with naming_lost_ranks(self.world, "at the start"):
            lock = claim_run_folder(self.world, folder, start=self.start, toml=self.toml)
            for line in (f"{'folder':<10} {folder}", *self.outer.describe()):
                logger.info(line)
            self._load()
            self.begin()
            # Only now, as a start that fails must not stop the copies of another one.
            if self.mirror is not None:
                self.mirror.claim()
        return lock

    def begin(self) -> None:
        """Join the run, and open the data where this worker begins to read."""
        place = self.course.join(self.data.position)
        for note in place.planned_from.notes:
            logger.info(f"  {note}")
        self.data.begin(
            self.plan,
            first_sample=place.first_sample,
            planned_from=place.planned_from,
            stream=place.stream,
            entered=place.entered,
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def _list_state(self) -> RunState:
        """List all that is saved of this worker, and when it is loaded."""
        return RunState(
            self.model,
            self.optimizer,
            self.outer,
            parts=[
                RunPart("optimizer", self.group_entries, SavedEntries, Loads.ALWAYS),
                RunPart("mixture", self.data, SavedMixture, Loads.WITH_RUN),
                # A new run has not validated what it starts from.
                RunPart("validator", self.validator, SavedValidation, Loads.WITH_RUN),
                RunPart("telemetry", self.telemetry, SavedTelemetry, Loads.WITH_WORKER),
            ],
        )

    def _build_checkpointer(self, folder: Path, lock: FolderLock | None) -> Checkpointer:
        """Build the checkpointer of this worker. `folder`: its own. `lock`: on its first rank."""
        about = Manifest(
            step=0,
            tokens=0,
            workers=1 if self.config.diloco.method == "none" else self.world.workers,
            config=self.toml,
            tokenizer=self.tokenizer.fingerprint,
            begins_documents=self.data.begins_documents,
            run=self.start.run,
            schedule_tokens=self.plan.schedule_tokens,
        )
        return Checkpointer(
            config=self.config.checkpoint,
            folder=folder,
            world=self.world,
            state=self.state,
            about=about,
            mirror=self.mirror,
            is_locked=lock is None or not lock.problem,
        )

    def _load(self) -> None:
        """Load the checkpoint, and log what has changed since the save."""
        manifest = self.start.manifest
        if manifest is None:
            return
        notes = self.start.load(self.state, self.world, is_island=bool(self.course.run))
        if self.config.model.weights:
            notes.append("model.weights is for new runs: the checkpoint's weights are used")
        if self.start.goes_on and self.config.checkpoint.resume != "auto":
            notes.append("checkpoint.resume is for new runs: this one continues")
        path = self.start.checkpoint or f"worker {self.start.holders[0]}"
        logger.info(f"resumed from {path}: step {manifest.step}, {manifest.tokens:,} tokens")
        changes = changed_settings(manifest.config, self.toml)
        for line in [*(f"changed: {change}" for change in changes), *notes]:
            logger.info(f"  {line}")

    # --- parts ------------------------------------------------------------------------------------

    def _build_model(self) -> None:
        """Plan the run, and shard the model, allocate it and fill it with its first weights."""
        config = self.config
        dtype = compute_dtype(config.parallel.compute_dtype, self.world.device)
        counts = parameter_counts(self.model)
        before = counted_before(config, self.start.manifest)
        self.plan = plan_run(
            config.training,
            ranks=self.ranks,
            parameters=counts["total"],
            embedding_parameters=counts["embedding"],
            optimizer=OPTIMIZERS[config.optimizer.name],
            before=before,
            reduce_dtype=config.parallel.reduce_dtype,
            activation_bytes=activation_bytes(
                self.model,
                tokens=config.training.batch_size * config.training.sequence_length,
                element_bytes=dtype.itemsize,
                checkpoint=config.activation_checkpoint,
            ),
        )
        model = f"{config.model.flavor}, {describe(self.model)}, vocabulary {self.vocab_size:,}"
        data = f"{self.data.description}, tokenizer {self.tokenizer.name}"
        epochs = self.data.epochs(self.plan, self.data.position, self.plan.total_steps)
        # Before memory is allocated, as it raises if the run does not fit.
        self.traffic = traffic_of(config, self.plan, self.model)
        log_plan(self.plan, config, self.world, model, data, epochs=epochs, traffic=self.traffic)
        if config.model.document_mask and self.world.is_first:
            for warning in self.data.long_documents():
                logger.warning(warning)
        mesh = self.world.fsdp_mesh(all_workers=config.diloco.method == "none")
        parallelize(
            self.model,
            mesh,
            parallel=config.parallel,
            activation_checkpoint=config.activation_checkpoint,
            compile=config.compile,
            compute_dtype=dtype,
        )
        materialize(self.model, self.world.device, config.run.seed)
        if weights := self._initial_weights:
            from torchtitan_diloco.export.weights import load_initial_weights

            load = partial(load_initial_weights, self.model, weights, self.tokenizer)
            on_all_ranks(self.world.saving, load)  # disks may be slow

    @property
    def _initial_weights(self) -> str:
        """The weights to start from, if this is a new run that has some."""
        return "" if self.start.manifest else self.config.model.weights

    def _build_course(self) -> Course:
        if not self.config.islands.join:
            return JobCourse(self.config, self.plan, self.world)
        from torchtitan_diloco.island_course import IslandCourse  # a job needs nothing of islands

        return IslandCourse(
            self.config,
            self.plan,
            self.world,
            manifest=self.start.manifest,
            data=self.data,
            tokenizer=self.tokenizer.fingerprint,
        )

    def _build_outer_loop(self) -> OuterLoop:
        config = self.config.diloco
        if config.method == "none":
            return DataParallel(self.model, self.world.workers)
        peers = self.course.build_peers()
        return StreamingDiLoCo(self.model, peers, config, optimizer=self.optimizer)

    def _build_telemetry(self) -> Telemetry:
        return Telemetry(
            config=self.config.metrics,
            world=self.world,
            folder=Path(self.config.run.folder).expanduser(),
            plan=self.plan,
            outer=self.outer,
            step=self.start.step,
            flops_per_token=self.flops_per_token,
            settings=flat_settings(portable(self.config)),
            run=self.course.run,
        )

    def _agree(self) -> None:
        """Raise unless all ranks have the same settings, data, weights and code."""
        facts = common_settings(self.config)
        facts |= {key: str(fact) for key, fact in self.data.common_facts.items()}
        weights = self._initial_weights
        if weights:
            from torchtitan_diloco.export.weights import weights_fingerprint

            weights = on_all_ranks(self.world.saving, partial(weights_fingerprint, weights))
        facts |= {"tokenizer": self.tokenizer.fingerprint, "model.weights": weights}
        if join := self.config.islands.join:
            facts["run in islands.join"] = location_id(join)
        facts |= common_code(self.model, self.config.run.imports)
        agree(facts, self.world.control, "rank")
