"""What a run transfers in an hour and in all, and what that costs.

`plan`, `compare`, the start of a run and its end say it by the functions of this file, each with
the seconds of a step that it knows. Bytes are those of parts, versions, deltas and gradients, with
their headers; a GB are 10^9 bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from torchtitan_diloco.base.formatting import counted, few_digits, markdown_table
from torchtitan_diloco.base.usage import Usage
from torchtitan_diloco.components.metrics import GRADIENTS, HOUR, SENT, all_reduce_bytes
from torchtitan_diloco.config.schema import Config, Price
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import DiLoCoConfig, diloco_mistakes
from torchtitan_diloco.diloco.exchange import exchange_bytes
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.schedule import build_schedule
from torchtitan_diloco.store import Kind
from torchtitan_diloco.store.location import kind_at

if TYPE_CHECKING:
    from torchtitan_diloco.components.run_plan import RunPlan

GB = 1e9
MILLION = 1e6
RECEIVED = "worker/received_bytes"
STORES = {
    Kind.FOLDER: "in a folder",
    Kind.NEAR: "in a bucket of your own",
    Kind.CLOUD: "in a provider's bucket",
}


class Party(NamedTuple):
    """Processes that transfer the same: the workers of a job, or islands, or their syncer."""

    name: str
    """Of one of them, for users."""
    members: int
    hour: Usage
    """What one of them transfers in an hour."""
    run: Usage
    """What one of them transfers in the run."""


@dataclass(frozen=True)
class RunTraffic:
    """What determines the traffic of a run, but for the length of its steps."""

    diloco: DiLoCoConfig
    fragments: Sequence[int]
    """Numbers of parameters, in the order in which fragments are sent."""
    parameters: int
    workers: int
    ranks: int
    """Ranks of a worker."""
    steps: int
    """Last step of the run."""
    first_step: int = 0
    """Step from which it is resumed."""
    reduce_dtype: str = "float32"
    """Type of the gradients that data parallelism averages, as in `parallel.reduce_dtype`."""
    store: Kind | None = None
    """Kind of the store in which islands meet. None: the workers are one job."""

    def parties(self, step_seconds: float) -> list[Party]:
        """Return what each party transfers, if all steps take so long. A single worker is none."""
        if self.store is not None:
            return self._islands(self.store, step_seconds)
        if self.workers == 1:
            return []
        steps_an_hour = HOUR / step_seconds
        hour = Usage(*[self._bytes_a_step * steps_an_hour] * 2)
        run = Usage(*[self._bytes_in_run] * 2)
        return [Party(name="worker", members=self.workers, hour=hour, run=run)]

    def _islands(self, store: Kind, step_seconds: float) -> list[Party]:
        from torchtitan_diloco.islands.traffic import Meeting  # a job needs nothing of islands

        meeting = Meeting(self.fragments, self.diloco, self.workers, store, step_seconds)
        steps = self.steps - self.first_step
        island = Party(
            name="island",
            members=self.workers,
            hour=meeting.island_a_second.times(HOUR),
            run=meeting.of_island(steps),
        )
        syncer = Party(
            name="syncer",
            members=1,
            hour=meeting.syncer_a_second.times(HOUR),
            run=meeting.of_syncer(steps),
        )
        return [island, syncer]

    @property
    def _bytes_a_step(self) -> float:
        """Bytes that a worker of a job sends in a step after the beginning of a run, on average."""
        if self.diloco.method == "none":
            return self._gradient_bytes
        return sum(map(self._exchange_bytes, self.fragments)) / self.diloco.sync_every

    @property
    def _bytes_in_run(self) -> float:
        """Bytes that a worker of a job sends from the first step on."""
        if self.diloco.method == "none":
            return (self.steps - self.first_step) * self._gradient_bytes
        schedule = build_schedule(self.diloco, len(self.fragments))
        total = 0
        for fragment, values in enumerate(self.fragments):
            before = schedule.outer_round(fragment, self.first_step)
            rounds = schedule.outer_round(fragment, self.steps) - before
            total += rounds * self._exchange_bytes(values)
        return total

    def _exchange_bytes(self, values: int) -> int:
        codec = build_codec(self.diloco.quantization)
        return exchange_bytes(values, self.workers, codec, self.ranks)

    @property
    def _gradient_bytes(self) -> float:
        each = GRADIENTS[self.reduce_dtype].bytes_each
        return all_reduce_bytes(self.parameters, self.workers, each=each)

    def counted(self, totals: Mapping[str, float]) -> list[Party]:
        """Return what each party has transferred, with the bytes that were counted. The others, and
        the requests, are computed from the steps and seconds so far."""
        steps = round(totals.get("worker/steps", 0))
        seconds = totals.get("worker/wall_seconds", 0.0)
        if not (steps and seconds):
            return []
        so_far = replace(self, first_step=self.steps - steps)
        parties = so_far.parties(step_seconds=seconds / steps)
        if parties and SENT in totals:
            # The first rank of an island transfers all its bytes. In a job, what all workers send
            # is what all receive.
            sent = totals[SENT]
            received = sent if self.store is None else totals.get(RECEIVED, 0.0)
            run = parties[0].run._replace(sent=sent, received=received)
            parties[0] = parties[0]._replace(run=run, hour=run.times(HOUR / seconds))
        return parties


def traffic_of(config: Config, plan: "RunPlan", model: nn.Module) -> RunTraffic:
    """Return the traffic of a run. `model`: not sharded yet; it may be on the meta device."""
    has_outer_loop = config.diloco.method != "none"
    fragments = build_fragments(model, config.diloco.fragments) if has_outer_loop else ()
    return RunTraffic(
        diloco=config.diloco.in_steps(plan.schedule_steps, plan.step_at),
        fragments=[fragment.parameters for fragment in fragments],
        parameters=plan.parameters,
        workers=config.workers,
        ranks=plan.ranks // config.workers,
        steps=plan.total_steps,
        first_step=plan.start_step,
        reduce_dtype=config.parallel.reduce_dtype,
        store=store_of(config),
    )


def ways_to_meet(traffic: RunTraffic) -> dict[str, RunTraffic]:
    """Return the traffic by words for where workers meet. If that is nowhere, as they are one job,
    they could be islands in a provider's bucket, unless these settings are not for islands."""
    if traffic.store is not None:
        return {STORES[traffic.store]: traffic}
    ways = {"of a job": traffic}
    if not any(diloco_mistakes(traffic.diloco, islands=True)):
        ways[STORES[Kind.CLOUD]] = replace(traffic, store=Kind.CLOUD)
    return ways


def store_of(config: Config) -> Kind | None:
    """Return the kind of the store in which the islands of a run meet, or None for a job."""
    if config.islands.local:
        return Kind.FOLDER
    return kind_at(config.islands.join) if config.islands.join else None


# --- money ----------------------------------------------------------------------------------------


def is_priced(price: Price) -> bool:
    """Return whether any price is given."""
    return price != Price()


def cost(parties: Iterable[Party], price: Price) -> tuple[float, float]:
    """Return what all of them cost, in an hour and in the run.

    Of a job, what its workers send to each other is paid for, and of islands and their syncer, what
    they read from their bucket, send to it, and ask of it.
    """
    hour = 0.0
    run = 0.0
    for party in parties:
        hour += party.members * _cost_of(party.hour, price, is_job=party.name == "worker")
        run += party.members * _cost_of(party.run, price, is_job=party.name == "worker")
    return hour, run


def _cost_of(usage: Usage, price: Price, *, is_job: bool) -> float:
    if is_job:
        return usage.sent / GB * price.per_gb
    requests = usage.reads * price.per_million_reads + usage.writes * price.per_million_writes
    transfers = usage.received * price.per_gb + usage.sent * price.per_gb_up
    return transfers / GB + requests / MILLION


# --- text -----------------------------------------------------------------------------------------


def gigabytes(size: float) -> str:
    return few_digits(size / GB, 1) if size else "0"


def traffic_rows(parties: Sequence[Party], price: Price, *, condition: str = "") -> dict[str, str]:
    """Return a line for each party, and one about the cost of all if prices are given.

    `condition`: of what is counted by the hour, such as " at steps of 1 s".
    """
    rows = {}
    for party in parties:
        hour = party.hour
        run = party.run
        row = "traffic" if party is parties[0] else party.name
        sender = f"each {party.name}" if party.members > 1 else f"the {party.name}"
        text = (
            f"{sender} sends {gigabytes(hour.sent)} and receives {gigabytes(hour.received)} GB an "
            f"hour{condition}, {gigabytes(run.sent)} and {gigabytes(run.received)} GB in the run"
        )
        if hour.reads or hour.writes:
            text += f"; about {hour.reads:,.0f} reads and {hour.writes:,.0f} writes an hour"
        rows[row] = text
    if parties and is_priced(price):
        of_hour, of_run = cost(parties, price)
        rows["cost"] = (
            f"{few_digits(of_hour, 2)} an hour{condition}, {few_digits(of_run, 2)} in the run, of "
            "all of these, by the prices in [price]"
        )
    return rows


def traffic_table(groups: Mapping[str, Sequence[Party]], price: Price) -> str:
    """Return a table of the parties of each group, whose name follows that of the first of them,
    in the row of which is the cost of all."""
    has_requests = any(party.hour.writes for group in groups.values() for party in group)
    columns = ["each of", "GB up an hour", "down", "GB up a run", "down"]
    if has_requests:
        columns += ["reads an hour", "writes an hour"]
    if is_priced(price):
        columns += ["cost of all an hour", "of a run"]
    rows = []
    for name, group in groups.items():
        costs = [few_digits(amount, 2) for amount in cost(group, price)]
        for party in group:
            is_first = party is group[0]
            label = f"{counted(party.members, party.name)} {name}"
            if not is_first:
                label = f"their {party.name}"
            volumes = (party.hour.sent, party.hour.received, party.run.sent, party.run.received)
            row = [label, *map(gigabytes, volumes)]
            if has_requests:
                row += [f"{party.hour.reads:,.0f}", f"{party.hour.writes:,.0f}"]
            if is_priced(price):
                row += costs if is_first else ["", ""]
            rows.append(row)
    return markdown_table(columns, rows)
