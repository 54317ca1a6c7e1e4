"""The corpora of a run: what a worker reads of them, and where a resumed run goes on."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_diloco.components.records import PhaseRecord
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.config.schema import WORKER_FIELD, Config
from torchtitan_diloco.config.weights import turns_of
from torchtitan_diloco.data.corpus import open_corpora
from torchtitan_diloco.data.mixture import Mixture, Segment, check_fingerprints, plan_segments
from torchtitan_diloco.data.shards import INDEX_NAME
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.diloco.meeting import gather_objects
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.log import UserError


@dataclass(frozen=True)
class Position:
    """A place in the stream of samples of a worker."""

    samples: int = 0
    segment: Segment | None = None
    """The segment of the mixture that it is in; None at the beginning."""
    notes: list[str] = field(default_factory=list)
    """What could not be carried over from a checkpoint, one line each."""


class RunData:
    """The corpora of this worker, and the facts that a position in their order depends on."""

    def __init__(self, config: Config, tokenizer: Tokenizer, world: World) -> None:
        data = self._data = config.data
        self._length = config.training.sequence_length
        self.corpora = open_corpora(data, tokenizer, "train", config.worker_name(world.worker))
        self.fingerprints = {name: shards.fingerprint for name, shards in self.corpora.items()}
        check_fingerprints(self.fingerprints)
        if config.model.document_mask:
            self._check_documents()
        is_own = data.shard_by == "own"
        self.own = [name for name in self.corpora if is_own and WORKER_FIELD in name]
        """Names of the corpora that this worker alone reads."""
        self.parts = config.islands.slots or config.workers
        """Parts of the corpora that are divided between streams."""
        if data.shard_by == "none" or len(self.own) == len(self.corpora):
            self.parts = 1
        self.streams = 1 if data.shard_by == "none" else config.workers
        self._order = {
            "parts": self.parts,
            "training.sequence_length": self._length,
            "run.seed": config.run.seed,
            "data.shuffle": data.shuffle,
        }
        self.share = 1 / self.streams
        """Share of the tokens of all workers that this one reads."""
        if is_own:
            share = self._compare(world)
            if not config.islands.join:  # an island's weight is the tokens that it has trained on
                self.share = share

    def _check_documents(self) -> None:
        for shards in self.corpora.values():
            if not shards.documents:
                raise UserError(
                    f"model.document_mask = true, but no document ends in {shards.name} "
                    f"(documents = 0 in its {INDEX_NAME}): set it to false, or prepare the corpus "
                    "with a token at the end of each document"
                )

    def long_documents(self) -> Iterator[str]:
        """Yield a warning for each corpus in which a mask of documents changes little."""
        for name, shards in self.corpora.items():
            if (mean := len(shards) / shards.documents) > self._length:
                yield (
                    f"model.document_mask changes little: the documents of {name} have {mean:,.0f} "
                    f"tokens on average, and are cut into sequences of {self._length:,}, each of "
                    "which sees itself only: raise training.sequence_length, or set it to false"
                )

    def _compare(self, world: World) -> float:
        """Compare the corpora of the ranks of each worker, and return the share of this worker."""
        tokens = sum(
            len(shards) / (1 if name in self.own else self.parts)
            for name, shards in self.corpora.items()
        )
        of_all_ranks = gather_objects(self.fingerprints, world.control)
        for rank, fingerprints in enumerate(of_all_ranks):
            first = rank - rank % world.ranks_per_worker
            if fingerprints != of_all_ranks[first]:
                raise UserError(
                    f"ranks {first} and {rank} are of one worker and have other tokens in "
                    f"{', '.join(self.own)}: copy its corpora to all of its nodes"
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

    @property
    def identity(self) -> dict[str, Any]:
        """The facts that a position refers to, for a checkpoint."""
        return {**self._order, "corpora": self.fingerprints}

    @property
    def common_facts(self) -> dict[str, Any]:
        """The facts that must be the same on all workers."""
        weights = turns_of(self._data.weights)
        corpora = [
            f"{fingerprint} x {weights.get(name, 0)}" if len(weights) > 1 else fingerprint
            for name, fingerprint in self.fingerprints.items()
            if name not in self.own
        ]
        return {**self._order, "corpus": ", ".join(corpora)}

    def find_position(
        self, position: int, segment: Segment | None, saved: Mapping[str, Any]
    ) -> Position:
        """Return where a run goes on that saved this position, with this `identity`."""
        if any(saved.get(name) != fact for name, fact in self._order.items()):
            return Position(
                notes=["the order of the data has changed: they are read from the beginning"]
            )
        if segment is None:
            return Position()
        old: dict[str, str] = saved["corpora"]
        if old == self.fingerprints:
            return Position(position, segment)
        # The tokens say which corpus it is; a folder may have been moved.
        names = {fingerprint: name for name, fingerprint in self.fingerprints.items()}
        read_before = Mixture(list(old), [segment]).read_before(position)
        read = {
            names[fingerprint]: read_before.get(name, 0)
            for name, fingerprint in old.items()
            if fingerprint in names
        }
        left = [name for name, fingerprint in old.items() if fingerprint not in names]
        new = [name for name in self.fingerprints if name not in read]
        notes = [f"{name} is new, or has changed: it is read from its beginning" for name in new]
        notes += [f"{name} is no longer read" for name in left if name not in new]
        # Without weights, so that those of this run begin here.
        return Position(position, Segment(position, {}, read), notes)

    # --- the stream -------------------------------------------------------------------------------

    def segments(self, plan: RunPlan, at: Position) -> list[Segment]:
        """Return the segments of this worker's stream from a position on."""
        samples = self._samples(plan, plan.total_steps)
        # Where the order has changed, the stream began later than the run.
        began = self._samples(plan, plan.start_step) - at.samples
        phases = [
            (round(phase.start * samples) - began, phase.mixture) for phase in self._data.phases
        ]
        return plan_segments(self._data.weights, phases, position=at.samples, before=at.segment)

    def _samples(self, plan: RunPlan, step: int) -> int:
        """Return the samples of one stream in so many steps of the run."""
        return plan.tokens_at(step) // self._length // self.streams

    def epochs(self, plan: RunPlan, at: Position, step: int) -> dict[str, float]:
        """Return how often each corpus has been read after a step, since its beginning."""
        end = at.samples + self._samples(plan, step) - self._samples(plan, plan.start_step)
        read = Mixture(list(self.corpora), self.segments(plan, at)).read_before(end)
        epochs_of = {}
        for name, shards in self.corpora.items():
            divided = 1 if name in self.own or self.streams == 1 else self.streams
            epochs_of[name] = read.get(name, 0) * self._length * divided / len(shards)
        return epochs_of

    # --- phases -----------------------------------------------------------------------------------

    def phase_number(self, mixture: Mixture, segment: Segment) -> int:
        """Return the number of the phase that a segment of a stream belongs to, 0 before the
        first."""
        later = len(mixture.segments) - 1 - mixture.segments.index(segment)
        return len(self._data.phases) - later

    def phase_record(
        self, plan: RunPlan, step: int, mixture: Mixture, segment: Segment
    ) -> PhaseRecord:
        """Describe a segment that is read after a step."""
        turns = turns_of(segment.weights)
        total = sum(turns.values())
        shares = [f"{100 * turn / total:.4g} % {name}" for name, turn in turns.items() if turn]
        return PhaseRecord(
            step=step,
            time=time.time(),
            mixture=", ".join(shares),
            number=self.phase_number(mixture, segment),
            share=plan.tokens_at(step) / plan.tokens_at(plan.total_steps),
        )
