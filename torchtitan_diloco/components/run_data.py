"""The corpora of a run: what a worker reads of them, and where a resumed run goes on."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_diloco.base.messages import gather_objects
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.records import PhaseRecord
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.config.schema import WORKER_FIELD, Config
from torchtitan_diloco.config.weights import Weights, turns_of
from torchtitan_diloco.data.corpus import check_validation_corpus, open_corpora
from torchtitan_diloco.data.loader import Stream, TrainLoader
from torchtitan_diloco.data.mixture import (
    Mixture,
    SavedPosition,
    Segment,
    check_fingerprints,
    plan_segments,
)
from torchtitan_diloco.data.shards import INDEX_NAME
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.distributed.world import World


@dataclass(frozen=True)
class Position:
    """A place in the stream of samples of a worker."""

    samples: int = 0
    segment: Segment | None = None
    """The segment of the mixture that it is in; None at the beginning."""
    notes: list[str] = field(default_factory=list)
    """What could not be carried over from a checkpoint, one line each."""


@dataclass(frozen=True)
class SavedMixture:
    """What a resumed run need not record again."""

    recorded: Segment | None
    """The segment of the mixture that the records say is being read."""


class RunData:
    """The corpora of this worker, and its place in them."""

    loader: TrainLoader
    """Loader of this worker. `begin` opens it."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, world: World, saved: SavedPosition | None = None
    ) -> None:
        """Open the corpora. `saved`: position in the checkpoint that the run starts from."""
        self._config = config
        self._world = world
        data = config.data
        self._data = data
        self._length = config.training.sequence_length
        worker = config.worker_name(world.worker)
        self.corpora = open_corpora(data, tokenizer, worker)
        self.fingerprints = {name: shards.fingerprint for name, shards in self.corpora.items()}
        check_fingerprints(self.fingerprints)
        if data.validation_corpus and config.validation.every:
            check_validation_corpus(data, tokenizer, worker, self.fingerprints)
        if config.model.document_mask:
            self._check_documents()
        is_own = data.shard_by == "own"
        self.own_corpora = [name for name in self.corpora if is_own and WORKER_FIELD in name]
        """Names of the corpora that this worker alone reads."""
        self.parts = config.islands.slots or config.workers
        """Parts of the corpora that are divided between streams."""
        if data.shard_by == "none" or len(self.own_corpora) == len(self.corpora):
            self.parts = 1
        self.streams = 1 if data.shard_by == "none" else config.workers
        self._order = {
            "parts": self.parts,
            "training.sequence_length": self._length,
            "run.seed": config.run.seed,
            "data.shuffle": data.shuffle,
        }
        self._share = 1 / config.workers
        """Share of the tokens of all workers that this one reads."""
        if is_own:
            share = self._compare(world)
            if not config.islands.join:  # an island's weight is the tokens that it has trained on
                self._share = share
        self.position = Position() if saved is None else self._find_position(saved)
        """Where this worker begins to read, if its course does not say otherwise."""
        self.recorded: Segment | None = None
        """The segment of the mixture that the records of this run say is being read."""
        self._phase_starts = list[int]()
        """Positions at which the first phases of the data start, as far as they are known."""

    def _check_documents(self) -> None:
        """Raise if a corpus does not say where its documents end."""
        for shards in self.corpora.values():
            if not shards.documents:
                raise UserError(
                    f"model.document_mask = true, but no document ends in {shards.name} "
                    f"(documents = 0 in its {INDEX_NAME}): set it to false, or prepare the corpus "
                    "with a token at the end of each document"
                )

    @property
    def begins_documents(self) -> bool:
        """Whether a token precedes the documents, of one corpus at least."""
        return any(shards.begin_token is not None for shards in self.corpora.values())

    def long_documents(self) -> Iterator[str]:
        """Yield a warning if there are corpora in which a mask of documents changes little."""
        means = {name: len(shards) / shards.documents for name, shards in self.corpora.items()}
        long = [f"{mean:,.0f} ({name})" for name, mean in means.items() if mean > self._length]
        if long:
            yield (
                f"model.document_mask changes little: documents have {', '.join(long)} tokens on "
                f"average, and are cut into sequences of {self._length:,}, each of which sees "
                "itself only: raise training.sequence_length, or set it to false"
            )

    def _compare(self, world: World) -> float:
        """Compare the corpora of the ranks of each worker, and return the share of this worker."""
        tokens = sum(
            len(shards) / (1 if name in self.own_corpora else self.parts)
            for name, shards in self.corpora.items()
        )
        of_all_ranks = gather_objects(self.fingerprints, world.control)
        for rank, fingerprints in enumerate(of_all_ranks):
            first = rank - rank % world.ranks_per_worker
            if fingerprints != of_all_ranks[first]:
                raise UserError(
                    f"ranks {first} and {rank} are of one worker and have other tokens in "
                    f"{', '.join(self.own_corpora)}: copy its corpora to all of its nodes"
                )
        of_ranks = gather_objects(tokens, world.control)
        return tokens / sum(of_ranks[:: world.ranks_per_worker])

    @property
    def description(self) -> str:
        """The corpora with their tokens, and shares of the samples if there are several."""
        weights = turns_of(self._data.weights)
        texts = []
        for name, shards in self.corpora.items():
            text = f"{name}: {len(shards):,} tokens"
            if len(self.corpora) > 1:
                text += f", {100 * weights.get(name, 0) / sum(weights.values()):.4g} %"
            texts.append(text)
        return "; ".join(texts)

    # --- checkpoints ------------------------------------------------------------------------------

    def saved_position(self) -> SavedPosition:
        """Return where a run that is resumed after this step goes on."""
        return SavedPosition(
            samples=self.loader.position,
            segment=self.loader.segment,
            order=self._order,
            corpora=self.fingerprints,
        )

    def saved_state(self) -> SavedMixture:
        return SavedMixture(self.recorded)

    def load_state(self, saved: SavedMixture, /) -> None:
        self.recorded = saved.recorded

    @property
    def common_facts(self) -> dict[str, Any]:
        """The facts that must be the same on all workers."""
        return {**self._order, "corpus": self._describe_corpora(is_own=False)}

    @property
    def own_digest(self) -> str:
        """Digest of the corpora that this worker alone reads, and of their weights; empty if it has
        none."""
        text = self._describe_corpora(is_own=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""

    def _describe_corpora(self, *, is_own: bool) -> str:
        """Return the fingerprints of the corpora that all workers read, or that only this one
        reads, with their turns in the mixture of each phase."""
        data = self._data
        turns = [turns_of(mixture) for mixture in data.mixtures]
        corpora = list[str]()
        for name, fingerprint in self.fingerprints.items():
            of_phases = "/".join(str(of_corpora.get(name, 0)) for of_corpora in turns)
            if (name in self.own_corpora) is is_own:
                is_mixed = len(self.corpora) > 1
                corpora.append(f"{fingerprint} x {of_phases}" if is_mixed else fingerprint)
        return ", ".join(corpora)

    def _find_position(self, saved: SavedPosition) -> Position:
        """Return where a run goes on that saved this position."""
        if any(saved.order.get(name) != fact for name, fact in self._order.items()):
            return Position(
                notes=["the order of the data has changed: they are read from the beginning"]
            )
        position = saved.samples
        segment = saved.segment
        old = saved.corpora
        # The turns also depend on the order of the corpora. If it is another one, the period is not
        # continued, but begins here.
        if list(old.items()) == list(self.fingerprints.items()):
            return Position(position, segment)
        # The tokens say which corpus it is; a folder may have been moved. So a corpus that was read
        # under an old name goes on under its new one, from as many samples.
        names = {fingerprint: name for name, fingerprint in self.fingerprints.items()}
        read_before = Mixture(list(old), [segment]).read_before(position)
        read = {
            names[fingerprint]: read_before.get(name, 0)
            for name, fingerprint in old.items()
            if fingerprint in names
        }
        dropped = [name for name, fingerprint in old.items() if fingerprint not in names]
        new = [name for name in self.fingerprints if name not in read]
        notes = [f"{name} is new, or has changed: it is read from its beginning" for name in new]
        notes += [f"{name} is no longer read" for name in dropped if name not in new]
        # Without weights, so that those of this run begin here.
        return Position(position, Segment(position, weights={}, read=read), notes)

    # --- the stream -------------------------------------------------------------------------------

    def begin(
        self,
        plan: RunPlan,
        first_sample: int,
        planned_from: Position,
        stream: Stream | None,
        entered: Sequence[int] | None = None,
    ) -> None:
        """Open the loader where this worker begins to read.

        `planned_from`: from which the segments of the mixture are planned. `stream`: which the
        ranks of this worker divide, or None if all ranks divide the only one. `entered`: positions
        at which the stream has entered phases of the data, and `enter` says the later ones. None:
        phases start at their shares of the plan.
        """
        config = self._config
        world = self._world
        if entered is None:
            segments = self.segments(plan, planned_from)
            self._phase_starts = self._planned_starts(plan, planned_from)
        else:
            mixtures = [phase.mixture for phase in self._data.phases]
            phases = zip(entered, mixtures, strict=False)
            segments = plan_segments(self._data.weights, phases, names=list(self.corpora))
            self._phase_starts = list(entered)
        self.loader = TrainLoader(
            self.corpora,
            segments=segments,
            sequence_length=self._length,
            batch_size=config.training.batch_size,
            accumulation=plan.accumulation,
            rank=world.rank if stream is None else world.rank_in_worker,
            ranks=world.size if stream is None else world.ranks_per_worker,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            prefetch=config.data.prefetch,
            start=first_sample,
            stream=stream,
            own_corpora=self.own_corpora,
            own_turns=entered is not None and bool(self._data.phases),
            pin_memory=world.device.type == "cuda",
        )

    def weight(self, plan: RunPlan) -> int:
        """Return the tokens that a step of this worker counts for in the mean over workers."""
        return round(plan.tokens_per_step * self._share)

    def segments(self, plan: RunPlan, at: Position) -> list[Segment]:
        """Return the segments of this worker's stream from a position on."""
        mixtures = [phase.mixture for phase in self._data.phases]
        phases = zip(self._planned_starts(plan, at), mixtures, strict=True)
        return plan_segments(
            self._data.weights,
            phases,
            names=list(self.corpora),
            position=at.samples,
            before=at.segment,
        )

    def _planned_starts(self, plan: RunPlan, at: Position) -> list[int]:
        """Return the positions at which phases start, at their shares of the plan."""
        # Where the order has changed, the stream began later than the run.
        began = self._samples(plan, plan.start_step) - at.samples
        return [start - began for start in self.starts_in_run(plan)]

    def starts_in_run(self, plan: RunPlan) -> list[int]:
        """Return the positions at which phases start in a stream that began with the run."""
        samples = self._samples(plan, plan.total_steps)
        return [round(phase.start * samples) for phase in self._data.phases]

    def _samples(self, plan: RunPlan, step: int) -> int:
        """Return the samples of one stream in so many steps of the run."""
        return plan.tokens_at(step) // self._length // self.streams

    def epochs(self, plan: RunPlan, at: Position, step: int) -> dict[str, float]:
        """Return how often each corpus has been read after a step, since its beginning."""
        end = at.samples + self._samples(plan, step) - self._samples(plan, plan.start_step)
        read = Mixture(list(self.corpora), self.segments(plan, at)).read_before(end)
        epochs_of = {}
        for name, shards in self.corpora.items():
            divided = 1 if name in self.own_corpora else self.streams
            epochs_of[name] = read.get(name, 0) * self._length * divided / len(shards)
        return epochs_of

    # --- phases -----------------------------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """Weights of the mixture that the next step reads, by names of corpora in the settings."""
        return self.loader.segment.weights

    @property
    def phase(self) -> int | None:
        """Number of the phase that the next step is in, 0 before the first; None without phases."""
        return self._phase_number if self._data.phases else None

    @property
    def _phase_number(self) -> int:
        return sum(start <= self.loader.position for start in self._phase_starts)

    def enter(self, entered: Sequence[int]) -> None:
        """Enter the phases whose positions are new. `entered`: those of all phases so far."""
        for start in entered[len(self._phase_starts) :]:
            phase = self._data.phases[len(self._phase_starts)]
            self.loader.enter(Segment(start, dict(phase.mixture)))
            self._phase_starts.append(start)

    def new_phase(self, step: int, share: float) -> PhaseRecord | None:
        """Describe the mixture that is read after this step, if it is not the recorded one.

        `share`: completed share of the run.
        """
        before = self.recorded
        segment = self.loader.segment
        self.recorded = segment
        if segment == before or len(self.corpora) == 1:
            return None
        turns = turns_of(segment.weights)
        total = sum(turns.values())
        shares = [f"{100 * turn / total:.4g} % {name}" for name, turn in turns.items() if turn]
        return PhaseRecord(
            step=step,
            time=time.time(),
            mixture=", ".join(shares),
            number=self._phase_number,
            share=share,
        )
