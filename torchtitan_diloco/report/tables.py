"""The tables and notes of a report, the same for the page and for Markdown."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torchtitan_diloco.report.facts import (
    SHARES,
    data_parallel_bytes,
    hidden_percent,
    known_median,
    link_facts,
    mean_share,
    sent_bytes_per_worker,
    worker_facts,
)
from torchtitan_diloco.report.run_records import (
    ELAPSED_SECONDS,
    TOKENS,
    TRAINING_LOSS,
    VALIDATION_LOSS,
    Run,
    number,
)
from torchtitan_diloco.utils import brief, clock

ABSENT = "–"  # noqa: RUF001 - a dash for an empty cell
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
NAMING_SETTINGS = ("run.folder", "run.name", "run.description")
"""Settings that name a run without changing it."""
MAX_LINKS = 12


class Cell(NamedTuple):
    text: str = ABSENT
    note: str = ""
    """What the value covers, in small print."""


class Table(NamedTuple):
    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    """The first cell of a row is its name."""


def facts_table(runs: Sequence[Run]) -> Table:
    """Return the facts of all runs, without the rows that no run has."""
    columns = [_facts(run) for run in runs]
    rows = [[Cell(name), *(column[name] for column in columns)] for name in columns[0]]
    known = [row for row in rows if set(row[1:]) != {Cell()}]
    return Table("", ["", *(run.name for run in runs)], known)


def detail_tables(runs: Sequence[Run]) -> list[Table]:
    """Return the workers and links of each run and the settings that differ, if there are any."""
    tables = [table for run in runs for table in (_workers_table(run), _links_table(run))]
    if len(runs) > 1:
        names = [run.name for run in runs for _ in range(2)]
        tables = [
            table._replace(heading=f"{table.heading}, {name}")
            for table, name in zip(tables, names, strict=True)
        ]
    return [table for table in (*tables, _differences_table(runs)) if table.rows]


def notes(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what is missing from the records."""
    for run in runs:
        if not run.steps:
            yield f"{run.name} has not logged a step yet."
        if run.unreadable:
            lines = f"{run.unreadable} line(s) of metrics.jsonl"
            yield f"{run.name}: {lines} are not readable and left out."
        if not run.settings:
            yield f"{run.name} has no readable config.toml: its settings are unknown."
    if not any(run.rounds for run in runs):
        yield "No exchange was recorded: there is no timeline, cosine or drift to show."


def _facts(run: Run) -> dict[str, Cell]:
    validated, shared_loss = run.last(VALIDATION_LOSS)
    trained, loss = run.last(TRAINING_LOSS)
    shared_note = (
        f"nats per held-out token, step {validated:,}" if validated else "no validation yet"
    )
    loss_note = f"nats per token, all workers, step {trained:,}"
    _, rates = run.curve("speed/tokens_per_second_global")
    return {
        "loss of the shared model": Cell(
            f"{shared_loss:.4f}" if validated else ABSENT, shared_note
        ),
        "training loss": Cell(f"{loss:.4f}", loss_note) if trained else Cell(),
        "tokens, all workers": _cell(run.last(TOKENS)[1], _count, f"{run.last_step:,} steps"),
        "time": _cell(run.last(ELAPSED_SECONDS)[1], clock, "days, h:mm:ss, with validations"),
        "tokens/s, all workers": _cell(known_median(rates), _count, "median"),
        "sent by each worker": _sent(run),
        "data parallelism would send": _data_parallel(run),
        "communication hidden": _cell(hidden_percent(run), _percent, "of the time of exchanges"),
        "exposed communication": _cell(
            mean_share(run, SHARES["exposed communication"]), _percent, "of the training time"
        ),
        "utilisation": _utilisation(run),
        "last to arrive": _last_to_arrive(run),
        "slowest link": _slowest_link(run),
    }


def _sent(run: Run) -> Cell:
    if run.settings.get("diloco.method") == "none":
        note = "gradients at every step, in bf16; computed, not counted"
        return _cell(data_parallel_bytes(run), _bytes)._replace(note=note)
    return _cell(sent_bytes_per_worker(run), _bytes, "counted in the buffers")


def _data_parallel(run: Run) -> Cell:
    expected, ratio = (
        data_parallel_bytes(run),
        data_parallel_bytes(run) / sent_bytes_per_worker(run),
    )
    if math.isnan(expected):
        return Cell(note="one worker" if run.workers == 1 else "model size not recorded")
    times = f"{ratio:,.1f} times as much; " if math.isfinite(ratio) else ""
    return _cell(expected, _bytes, f"{times}bf16 gradients, every step")


def _utilisation(run: Run) -> Cell:
    if not run.summary:
        return Cell(note="not recorded: the run has not ended")
    measured, predicted = (
        number(run.summary.get(f"{kind}_utilisation_percent")) for kind in ("measured", "predicted")
    )
    known = math.isfinite(predicted)
    note = f"{predicted:.1f} % predicted" if known else "no prediction recorded"
    return _cell(measured, _percent, f"measured; {note}")


def _last_to_arrive(run: Run) -> Cell:
    facts = worker_facts(run)
    if not facts or not facts[0].rounds:
        return Cell()
    slowest = facts[0]
    late = f", by {brief(slowest.median_late)} (median)" if slowest.rounds_last else ""
    note = f"in {slowest.rounds_last:,} of {slowest.rounds:,} rounds{late}"
    return Cell(f"worker {slowest.worker}", note)


def _slowest_link(run: Run) -> Cell:
    for rate, sender, receiver, rounds in link_facts(run)[:1]:
        note = f"worker {sender} to worker {receiver}, median of {rounds:,} rounds"
        return Cell(quantity(rate, "bit/s"), note)
    return Cell()


def _workers_table(run: Run) -> Table:
    columns = ["worker", "last to arrive", "late by", "ahead of the last", "training waited"]
    rows = [
        [
            Cell(f"worker {fact.worker}"),
            Cell(f"{fact.rounds_last:,} of {fact.rounds:,}", "rounds"),
            _cell(fact.median_late, brief, "median, where it was last"),
            _cell(fact.median_ahead, brief, "median, where it was not"),
            _cell(fact.mean_waited, brief, "for an exchange, mean"),
        ]
        for fact in worker_facts(run)
    ]
    return Table("Workers", columns, rows)


def _links_table(run: Run) -> Table:
    rows = [
        [
            Cell(f"worker {sender} to worker {receiver}"),
            Cell(quantity(rate, "bit/s"), "median"),
            Cell(f"{rounds:,}", "rounds"),
        ]
        for rate, sender, receiver, rounds in link_facts(run)[:MAX_LINKS]
    ]
    return Table("Links, slowest first", ["from, to", "rate of a payload", "measured in"], rows)


def _differences_table(runs: Sequence[Run]) -> Table:
    runs = [run for run in runs if run.settings]
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        texts = [setting_text(run.settings[key]) if key in run.settings else ABSENT for run in runs]
        if key not in NAMING_SETTINGS and len(set(texts)) > 1:
            rows.append([Cell(key), *map(Cell, texts)])
    return Table("Settings that differ", ["setting", *(run.name for run in runs)], rows)


def _cell(value: float, form: Callable[[float], str], note: str = "") -> Cell:
    return Cell(form(value), note) if math.isfinite(value) else Cell()


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.1f} %"


def _bytes(value: float) -> str:
    return quantity(value, "B")


def setting_text(value: object) -> str:
    """Return a setting as TOML writes it, which is JSON for the types that settings have."""
    return json.dumps(value, ensure_ascii=False, default=str)


def quantity(value: float, unit: str) -> str:
    """Return a value with three digits and a prefix: `1.23 GB`."""
    scale, prefix = next((pair for pair in PREFIXES if abs(value) >= pair[0]), (1.0, ""))
    digits = max(0, 3 - len(f"{abs(value / scale):.0f}"))
    return f"{value / scale:,.{digits}f} {prefix}{unit}"
