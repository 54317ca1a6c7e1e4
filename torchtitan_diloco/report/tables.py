"""The tables of a report, the same for a page and for a terminal."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from torchtitan_diloco.report.facts import (
    data_parallel_bytes,
    exposed_percent,
    hidden_percent,
    link_facts,
    sent_bytes_per_worker,
    worker_facts,
)
from torchtitan_diloco.report.run_records import Run, number
from torchtitan_diloco.report.words import ABSENT, count, duration, percent, quantity, seconds

PERSONAL = ("run.folder", "run.name", "run.description")
"""Settings that name a run and do not change it."""
MOST_LINKS = 12


class Cell(NamedTuple):
    text: str
    note: str = ""
    """What it covers, or its unit: smaller, beside the text."""


def told(text: str, note: str) -> Cell:
    """What is not known is not explained."""
    return Cell(text, "" if text == ABSENT else note)


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    """The first cell of a row says what the others are."""


def facts_table(runs: Sequence[Run]) -> Table:
    rows: list[tuple[str, Callable[[Run], Cell]]] = [
        ("loss of the shared model", _validated),
        ("training loss", _trained),
        ("tokens, all workers", _tokens),
        (
            "time",
            lambda run: told(
                duration(_value(run, "time/elapsed_seconds")), "days, h:mm:ss, with validations"
            ),
        ),
        ("tokens/s, all workers", _pace),
        ("sent by each worker", _sent),
        ("data parallelism would send", _data_parallel),
        ("communication hidden", _hidden),
        (
            "exposed communication",
            lambda run: told(percent(exposed_percent(run)), "of the time of training"),
        ),
        ("utilisation", _utilisation),
        ("last to arrive", _last_to_arrive),
        ("slowest link", _slowest_link),
    ]
    cells = [(name, [cell(run) for run in runs]) for name, cell in rows]
    told_of_some = [
        [Cell(name), *facts] for name, facts in cells if any(fact != Cell(ABSENT) for fact in facts)
    ]
    return Table(["", *(run.name for run in runs)], told_of_some)


def workers_table(run: Run) -> Table:
    head = ["worker", "last to arrive", "late by", "ahead of the last", "training waited"]
    rows = [
        [
            Cell(f"worker {fact.worker}"),
            Cell(f"{fact.last_in:,} of {fact.rounds:,}", "rounds"),
            told(seconds(fact.median_late), "median, where it was last"),
            told(seconds(fact.median_ahead), "median, where it was not"),
            told(seconds(fact.mean_waited), "for an exchange, mean"),
        ]
        for fact in worker_facts(run)
    ]
    return Table(head, rows)


def links_table(run: Run) -> Table:
    rows = [
        [
            Cell(f"worker {fact.sender} to worker {fact.receiver}"),
            Cell(quantity(fact.median_bits_per_second, "bit/s"), "median"),
            Cell(count(fact.rounds), "rounds"),
        ]
        for fact in link_facts(run)[:MOST_LINKS]
    ]
    return Table(["from, to", "rate of a payload", "measured in"], rows)


def differences_table(runs: Sequence[Run]) -> Table:
    """The settings that are not the same in all runs which have a config.toml."""
    known = [run for run in runs if run.settings]
    keys = dict.fromkeys(key for run in known for key in run.settings)
    rows = [
        [Cell(key), *(Cell(run.settings.get(key, ABSENT)) for run in known)]
        for key in keys
        if key not in PERSONAL and len({run.settings.get(key) for run in known}) > 1
    ]
    return Table(["setting", *(run.name for run in known)], rows)


def _value(run: Run, key: str) -> float | None:
    last = run.last(key)
    return None if last is None else last[1]


def _validated(run: Run) -> Cell:
    last = run.last("validation/loss_nats_per_token_global")
    if last is None:
        return Cell(ABSENT, "no validation yet")
    return Cell(f"{last[1]:.4f}", f"nats per held-out token, step {last[0]:,}")


def _trained(run: Run) -> Cell:
    last = run.last("train/loss_nats_per_token_global")
    return (
        Cell(ABSENT)
        if last is None
        else Cell(f"{last[1]:.4f}", f"nats per token, all workers, step {last[0]:,}")
    )


def _tokens(run: Run) -> Cell:
    tokens = _value(run, "train/tokens_global")
    return Cell(ABSENT) if tokens is None else Cell(count(tokens), f"{run.last_step:,} steps")


def _pace(run: Run) -> Cell:
    rates = [
        value for _, value in run.curve("speed/tokens_per_second_global") if math.isfinite(value)
    ]
    return Cell(count(median(rates)), "median") if rates else Cell(ABSENT)


def _sent(run: Run) -> Cell:
    sent = sent_bytes_per_worker(run)
    if sent is not None:
        return Cell(quantity(sent, "B"), "counted in the buffers")
    if run.settings.get("diloco.method") != '"none"':
        return Cell(ABSENT)
    expected = data_parallel_bytes(run)
    return Cell(
        quantity(expected, "B") if expected else ABSENT,
        "gradients at every step, in bf16; not counted",
    )


def _data_parallel(run: Run) -> Cell:
    expected, sent = data_parallel_bytes(run), sent_bytes_per_worker(run)
    if expected is None:
        return Cell(ABSENT, "size of the model not recorded" if run.workers != 1 else "one worker")
    ratio = f"{expected / sent:,.1f} times as much; " if sent else ""
    return Cell(quantity(expected, "B"), f"{ratio}bf16 gradients, every step")


def _hidden(run: Run) -> Cell:
    return told(percent(hidden_percent(run)), "of the time of exchanges")


def _utilisation(run: Run) -> Cell:
    """Measured beside predicted."""
    measured, predicted = (
        number(run.summary.get(f"{kind}_utilisation_percent")) for kind in ("measured", "predicted")
    )
    if not run.summary:
        return Cell(ABSENT, "not recorded: the run has not ended, or is an old one")
    if measured is None and predicted is None:
        return Cell(ABSENT)
    beside = "no prediction recorded" if predicted is None else f"{percent(predicted)} predicted"
    return Cell(percent(measured), f"measured; {beside}")


def _last_to_arrive(run: Run) -> Cell:
    facts = worker_facts(run)
    if not facts or not facts[0].rounds:
        return Cell(ABSENT)
    slowest = facts[0]
    late = "" if slowest.median_late is None else f", by {seconds(slowest.median_late)} (median)"
    return Cell(
        f"worker {slowest.worker}", f"in {slowest.last_in:,} of {slowest.rounds:,} rounds{late}"
    )


def _slowest_link(run: Run) -> Cell:
    facts = link_facts(run)
    if not facts:
        return Cell(ABSENT)
    rate = quantity(facts[0].median_bits_per_second, "bit/s")
    return Cell(
        rate,
        f"worker {facts[0].sender} to worker {facts[0].receiver}, median of {facts[0].rounds:,} rounds",
    )
