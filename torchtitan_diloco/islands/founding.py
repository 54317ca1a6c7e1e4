"""What an island brings to a run: its settings, what must be equal, its copies and checkpoint."""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.fragments import Fragment, describe_layout
from torchtitan_diloco.islands.config import Islands, site_of
from torchtitan_diloco.islands.followers import SharedCopies
from torchtitan_diloco.islands.layout import Layout
from torchtitan_diloco.islands.payload import PartHeader, encode, memory_of
from torchtitan_diloco.islands.rules.checkpoint import Saved
from torchtitan_diloco.islands.rules.fields import MOST_PHASES, Digest
from torchtitan_diloco.islands.rules.founding import Founding, SlotStart
from torchtitan_diloco.islands.rules.island import Island
from torchtitan_diloco.islands.rules.names import founding_name
from torchtitan_diloco.islands.rules.settings import RATES, Settings
from torchtitan_diloco.islands.run_settings import of_diloco
from torchtitan_diloco.islands.runs import Run


class JobCheckpoint(NamedTuple):
    """What the checkpoint of a job contains, from which a run of islands can be founded."""

    tokens: int = 0
    """Tokens of the job so far."""
    position: int = 0
    """First sample of each slot that the job has not read. With a corpus of its own, this is only
    known of the slot of this island."""
    entered: Sequence[int] = ()
    """Samples of a slot at which phases of the data have begun in the job."""

    def saved(self, fragments: int, slots: int, corpus: str) -> Saved:
        """Return this as the checkpoint of an island."""
        start = SlotStart(self.position, list(self.entered), corpus)
        return Saved.of_job(self.tokens, fragments, [start] * (1 if corpus else slots))


@dataclass
class Contribution:
    """What an island brings to a run, which it may found with it."""

    islands: Islands
    total_tokens: int
    tokens_per_step: int
    samples_per_step: int
    facts: dict[str, str]
    """What must be equal on all islands, in addition to the layout of the parameters."""
    corpus: str = ""
    """Digest of the data of this island, if islands have data of their own."""
    phases: tuple[float, ...] = ()
    job: JobCheckpoint | None = None
    saved: Saved | None = None
    """What its own checkpoint contains about its run."""

    def __post_init__(self) -> None:
        """Raise a UserError for a value that is impossible."""
        try:
            msgspec.convert(self.corpus, Digest)
        except msgspec.ValidationError as error:
            raise UserError(
                f"corpus = {self.corpus!r}: give at most 64 hexadecimal digits"
            ) from error
        is_sorted = list(self.phases) == sorted(set(self.phases))
        is_inside = all(0 < share < 1 for share in self.phases)
        if not (is_sorted and is_inside) or len(self.phases) > MOST_PHASES:
            raise UserError(
                f"phases = {self.phases}: give at most {MOST_PHASES} increasing shares of the run, "
                "each above 0 and below 1"
            )
        if self.phases:
            self.facts["phases"] = ",".join(f"{share:g}" for share in self.phases)

    @property
    def may_found(self) -> bool:
        """Whether this island may begin a run in an empty location."""
        if site_of(self.islands.join):
            return False
        return (self.saved is None and self.job is None) or self.islands.found

    def machine(
        self,
        config: DiLoCoConfig,
        kind: str,
        fragments: Sequence[Fragment],
        layouts: Sequence[Layout],
        checksums: Sequence[str],
    ) -> Island:
        """Return a new incarnation of this island. `kind`: of the store. `checksums`: of its P."""
        facts = facts_of(fragments, self.facts)
        settings = settings_of(
            config,
            self.islands,
            kind,
            total_tokens=self.total_tokens,
            tokens_per_step=self.tokens_per_step,
            samples_per_step=self.samples_per_step,
            phases=self.phases,
            facts=facts,
        )
        founding = new_founding(settings, layouts, checksums)
        saved = self.saved
        if saved is None and self.job is not None:
            saved = self.job.saved(len(layouts), self.islands.slots, self.corpus)
        if saved is not None:
            founding = saved.found(founding)
            if saved.fragments:
                saved = saved.with_checksums(checksums)
        return Island(
            f"{self.islands.name}/{secrets.token_hex(4)}",
            facts=facts,
            shapes=founding.shapes,
            founds=founding if self.may_found else None,
            saved=saved,
            corpus=self.corpus,
            ranks=layouts[0].ranks,
        )


def settings_of(
    config: DiLoCoConfig,
    islands: Islands,
    kind: str,
    *,
    total_tokens: int,
    tokens_per_step: int,
    samples_per_step: int,
    phases: Sequence[float] = (),
    facts: Mapping[str, str],
) -> Settings:
    """Return the settings of a run that this island founds. `kind`: that of the store."""
    step_tokens = islands.begin * tokens_per_step
    outer = config.outer_optimizer.in_steps(total_tokens // step_tokens)
    rates = RATES[kind]
    return Settings(
        **of_diloco(config),
        total_tokens=total_tokens,
        slots=islands.slots,
        start_with=islands.begin,
        streams=islands.slots,
        block=samples_per_step,
        tokens_per_sample=-(-tokens_per_step // samples_per_step),
        phases=tuple(phases),
        outer_optimizer=outer.name,
        outer_numbers={
            "momentum": outer.momentum,
            "beta2": outer.beta2,
            "epsilon": outer.epsilon,
            "warmup": outer.warmup * step_tokens,
        },
        block_size=config.quantization.block_size,
        grace=max(rates.grace, islands.grace_seconds),
        slot_seconds=islands.slot_seconds or 1e-3,
        copies_every=rates.copies_every,
        commit_seconds=rates.commit_seconds,
        poll_seconds=rates.poll_seconds,
        store_kind=kind,
        facts=dict(facts),
    )


def facts_of(fragments: Sequence[Fragment], facts: Mapping[str, str]) -> dict[str, str]:
    """Return what must be equal on all islands: the model, and what the caller adds."""
    all_facts = {"parameter layout": "\n".join(describe_layout(fragments)), **facts}
    return {key.replace(" ", "-"): _short(value) for key, value in all_facts.items()}


def _short(value: str) -> str:
    """Return the value, or its hash if it is no name of the rules."""
    fits = re.fullmatch(r"[\x21-\x7e]{1,100}", value)
    return value if fits else hashlib.sha256(value.encode()).hexdigest()[:16]


def new_founding(
    settings: Settings, layouts: Sequence[Layout], checksums: Sequence[str]
) -> Founding:
    """Return a founding of a new run with copies P that have these checksums."""
    return Founding(
        run=f"run-{secrets.token_hex(4)}",
        settings=settings,
        shapes=[list(layout.shapes) for layout in layouts],
        checksums=list(checksums),
    )


def store_copies(run: Run, incarnation: str, copies: SharedCopies) -> bool:
    """Store the copies of a founder. Return whether all hold them now."""
    return all(
        run.large.create(
            founding_name(incarnation, number),
            memory_of(encode(copies.gather(number), PartHeader())),
        )
        for number in range(len(copies))
    )


def read_saved(text: str) -> Saved | None:
    """Return what a checkpoint of an island contains about its run, or None if it is of a job."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text.encode(), type=Saved)
    except msgspec.DecodeError as error:
        raise UserError(
            f"what the checkpoint says of its run of islands is damaged, or of another version "
            f"({error}): start from an older one, or give another run.folder"
        ) from error


def write_saved(saved: Saved | None) -> str:
    return "" if saved is None else msgspec.json.encode(saved).decode()
