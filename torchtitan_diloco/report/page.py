"""Write a report about one or several runs as one HTML page.

.venv/bin/torchtitan-diloco report outputs/RUN [outputs/RUN ...]
.venv/bin/torchtitan-diloco report LOCATION
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.ticker import EngFormatter

from torchtitan_diloco.base.formatting import brief, clock, counted
from torchtitan_diloco.base.user import Parser, UserError, command_line
from torchtitan_diloco.components.metrics import (
    BASELINE,
    compute_percent,
    exposed_percent,
    hidden_percent,
)
from torchtitan_diloco.components.records import NAN
from torchtitan_diloco.config.schema import format_value
from torchtitan_diloco.islands.page_server import TEMPLATES
from torchtitan_diloco.islands.stays import LEAST_GAP, time_text
from torchtitan_diloco.report.charts import Exchange
from torchtitan_diloco.report.figures import figures
from torchtitan_diloco.report.run_records import Run, Worker, of_known, open_runs

METHODS = {"streaming": "Streaming DiLoCo", "none": "data parallelism"}
ABSENT = "–"  # noqa: RUF001 - a dash for an empty cell
NO_BREAK = "\N{NO-BREAK SPACE}"
NAMING_SETTINGS = ("run.folder", "run.name", "run.description")
"""Settings that name a run without changing it."""
MIXTURE_SETTING = "data.mixture."
"""Before the name of each corpus."""
MAX_LINKS = 12
_loss = "{:.4f}".format
_count = "{:,.0f}".format
_percent = "{:.1f} %".format
_bytes = EngFormatter("B", places=1)
_bits = EngFormatter("bit/s", places=1)


class Cell(NamedTuple):
    text: str = ABSENT
    note: str = ""
    """Scope of the value, in small print."""


class Table(NamedTuple):
    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    """The first cell of a row is its name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, print its path, and return the exit status."""
    about = "Write a report about one or several runs, finished or still running."
    parser = Parser(prog=command_line("report"), description=about)
    run_help = "folder of a run or of an island, or location of a run of islands: a folder, a "
    run_help += "join file, s3://, gs:// or az://"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=run_help)
    out_help = "file to write (default: report.html in the folder of the first run, or in the "
    out_help += "current folder if there are only locations)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out_help)
    options = parser.parse_args(arguments)
    target: Path | None = options.out
    try:
        runs = open_runs(options.runs)
        for run in runs:
            there = len(run.workers)
            if there < run.size and not run.is_of_islands:
                text = f"warning: {run.folder} has the records of {there} of {run.size} workers"
                print(text, file=sys.stderr)
        target = target or runs[0].folder / "report.html"
        target.write_text(html_page(runs), encoding="utf-8", errors="replace")
    except OSError as error:
        remedy = "give a path that can be written"
        print(f"error: --out {target}: {error.strerror}: {remedy}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(target)
    return 0


def html_page(runs: Sequence[Run]) -> str:
    """Return a self-contained page for wide and narrow screens."""
    environment = Environment(
        loader=FileSystemLoader([Path(__file__).parent, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs side by side",
        runs=runs,
        describe=describe,
        facts=facts_table(runs),
        notes=notes(runs),
        figures=figures(runs),
        tables=detail_tables(runs),
        format_value=format_value,
    )


def describe(run: Run) -> str:
    """Describe a run in a line: what it is for, its data, its workers and its method."""
    workers = counted(run.size, "worker") if run.size else ""
    if run.history is not None:
        workers = f"{len({stay.name for stay in run.stays})} islands"
    elif run.is_of_islands:
        workers = f"{len(run.workers)} of {run.size} islands"
    method = METHODS.get(run.settings.get("diloco.method", ""), "")
    setup = ", ".join(filter(None, (workers, method)))
    mixture = (key.partition(MIXTURE_SETTING)[2] for key in run.settings)
    corpus = run.settings.get("data.corpus", "") or ", ".join(filter(None, mixture))
    tokenizer = run.settings.get("data.tokenizer", "")
    data = f"text {corpus}, tokenizer {tokenizer}" if corpus else ""
    return "; ".join(filter(None, (str(run.settings.get("run.description", "")), data, setup)))


# --- tables --------------------------------------------------------------------------------------


def facts_table(runs: Sequence[Run]) -> Table:
    """Return the facts of all runs. Leave out rows that are empty for all of them."""
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    rows = []
    for name in names:
        cells = [of_run.get(name, Cell()) for of_run in facts]
        if set(cells) != {Cell()}:
            rows.append([Cell(name), *cells])
    return Table("", ["", *(run.name for run in runs)], rows)


def detail_tables(runs: Sequence[Run]) -> list[Table]:
    """Return the workers and links of each run and the settings that differ, if there are any."""
    tables = []
    for run in runs:
        name = f", {run.name}" if len(runs) > 1 else ""
        members = _islands_table(run) if run.is_of_islands else _workers_table(run)
        news = _news_table(run)
        for table in (_mixtures_table(run), _verdicts_table(run), members, _links_table(run), news):
            tables.append(table._replace(heading=table.heading + name))
    return [table for table in (*tables, _differences_table(runs)) if table.rows]


def notes(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what is missing from the records."""
    for run in runs:
        if not run.last_step and run.history is None:
            yield f"{run.name} has not logged a step yet."
        if unreadable := sum(worker.unreadable for worker in run.workers):
            yield f"{run.name}: left out {unreadable} line(s) of metrics.jsonl, not readable."
        if not run.settings and run.history is None:
            yield f"{run.name} has no readable config.toml: its settings are unknown."
        counts = Counter(
            (worker.name, reason)
            for worker in run.workers
            for record in worker.rounds
            for reason in record.left_out
        )
        for (worker, reason), times in sorted(counts.items()):
            yield f"{run.name}: {worker} was left out of {times} recorded round(s), {reason}."
    if not any(run.exchanges or run.history is not None for run in runs):
        yield "No exchange was recorded: there is no timeline, cosine or drift to show."


def _facts(run: Run) -> dict[str, Cell]:
    """Return the facts of a run by their names in the table. Unknown ones are empty."""
    validated, shared_loss = run.last("loss/val")
    trained, loss = run.last("loss/train")
    names = [worker.name for worker in run.workers if worker.steps] or run.worker_names
    # What a number is of: `owner` the loss, `steps_of` the steps, `scope` the speed, `whose` the
    # shares, `sender` the bytes.
    owner = "all workers"
    steps_of = ""
    scope = "all workers"
    whose = ", all workers"
    sender = ", mean over workers"
    if run.is_of_islands:
        owner = f"own of {names[0]}"
        steps_of = f" of {names[0]}"
        scope = f"{len(names)} of {run.size} islands"
        whose = f", mean of {len(names)} islands" if len(names) > 1 else f", {owner}"
        sender = whose
    validation_note = f"nats per held-out token, step {validated:,}"
    byte_note = "of the same text, comparable between tokenizers"
    tokens = run.last("train/tokens")[1]
    elapsed = run.last("worker/elapsed_seconds")[1]
    days = "days, " if elapsed >= 86_400 else ""
    totals = run.totals
    kept = run.kept_time
    headline = run.history.headline if run.history else {}
    return {
        "loss of the shared model": _cell(shared_loss, _loss, validation_note),
        "in bits per byte": _cell(run.last("loss/bits_per_byte")[1], _loss, byte_note),
        "training loss": _cell(loss, _loss, f"nats per token, {owner}, step {trained:,}"),
        "tokens": _cell(tokens, _count, f"of the run, {counted(run.last_step, 'step')}{steps_of}"),
        **{name: Cell(text, "by its history") for name, text in headline.items()},
        "time": _cell(elapsed, clock, f"{days}h:mm:ss, up to the last logged step"),
        "tokens/s": _cell(run.tokens_per_second, _count, f"{scope}, median"),
        **_sent_bytes(run, sender),
        "hidden": _cell(hidden_percent(totals), _percent, f"of the exchanges' time{whose}"),
        "compute share": _cell(compute_percent(totals), _percent, f"of the training time{whose}"),
        "exposed communication": _cell(
            exposed_percent(totals), _percent, f"of the training time{whose}"
        ),
        "kept time": _cell(
            kept.get("run", math.nan),
            _percent,
            f"of the wall time, {kept.get('last hour', math.nan):.1f} % in the last hour",
        ),
    }


def _sent_bytes(run: Run, whose: str) -> dict[str, Cell]:
    """Return what each worker has sent, and what the baseline would send."""
    sent = run.sent_bytes
    gradients = run.averaged_gradients
    expected = float(run.baseline_bytes(run.totals.get("worker/steps", math.nan)))
    how = f"counted in the buffers{whose}"
    if gradients is not None:
        how = f"computed: {gradients.name} gradients, every step"
    parameters_of = {
        record.fragment: record.parameters for worker in run.workers for record in worker.rounds
    }
    applied = sum(parameters_of.values())
    # Before all fragments have taken a turn, a ratio says nothing.
    is_cycle = gradients is not None or applied >= (run.parameters or 0)
    times = f"{expected / sent:,.1f} times as much" if sent > 0 and is_cycle else ""
    compared = _cell(expected, _bytes, times)
    if run.size == 1:
        compared = Cell(note="one worker")
    return {"sent by each worker": _cell(sent, _bytes, how), BASELINE: compared}


def last_to_arrive(exchange: Exchange) -> tuple[int | None, float]:
    """Return the worker that held up an exchange, None if it is not known, and for how long.

    This needs no common clock: the last worker waits the shortest time for the others' headers.
    """
    waited = [NAN if record is None else record.waited_for_headers for record in exchange]
    if len(shortest := sorted(filter(math.isfinite, waited))) < 2:
        return None, NAN
    return waited.index(shortest[0]), shortest[1] - shortest[0]


def _workers_table(run: Run) -> Table:
    """Return who arrives last and who waits. The worker that was last most often is first."""
    arrivals = list(map(last_to_arrive, run.exchanges))
    last = np.array([np.nan if worker is None else worker for worker, _ in arrivals])
    late = np.array([by for _, by in arrivals])
    known = np.isfinite(last).sum()
    workers = sorted(range(len(run.workers)), key=lambda worker: -(last == worker).sum())
    rows = []
    for worker in workers:
        was_last = last == worker
        rows.append(
            [
                Cell(run.workers[worker].name),
                Cell(f"{was_last.sum():,} of {known:,}", "rounds") if known else Cell(),
                _cell(of_known(np.median, late[was_last]), brief, "median, where it was last"),
                _cell(of_known(np.max, late[was_last]), brief, "maximum"),
                # The median would mostly be zero.
                _cell(_mean_wait(run.workers[worker]), brief, "for an exchange, mean"),
            ]
        )
    columns = ["worker", "last to arrive", "late by", "at most", "training waited"]
    return Table("Workers", columns, rows if arrivals else [])


def _mean_wait(worker: Worker) -> float:
    return of_known(np.mean, np.array([record.waited_seconds for record in worker.rounds]))


def _islands_table(run: Run) -> Table:
    """Return when each island was there, and its own numbers if there are records of it."""
    workers = {worker.name: worker for worker in run.workers}
    rows = []
    end = max((stay.spans[-1][1] for stay in run.stays), default=0.0)
    for name in dict.fromkeys(stay.name for stay in run.stays):
        stays = [stay for stay in run.stays if stay.name == name]
        spans = [*(span for stay in stays for span in stay.spans), [end, end]]
        gaps = [(left, came - left) for (_, left), (came, _) in pairwise(spans)]
        away = [f"{time_text(at)} for {clock(gap)}" for at, gap in gaps if gap > LEAST_GAP]
        worker = workers.get(name, Worker(name))
        rows.append(
            [
                Cell(name),
                Cell(time_text(stays[0].spans[0][0]), "UTC"),
                Cell("; ".join(away) or "never", stays[-1].ended),
                Cell(f"{sum(stay.parts for stay in stays):,}", "merged"),
                Cell(f"{sum(stay.late_parts for stay in stays):,}", "one or more versions late"),
                _cell(_mean_wait(worker), brief, "own, for an exchange, mean"),
                _last_loss(run, worker),
            ]
        )
    columns = ["island", "came", "gone", "parts", "late", "training waited", "training loss"]
    return Table("Islands", columns, rows)


def _last_loss(run: Run, island: Worker) -> Cell:
    """Return the last training loss of an island, by its records or the history of its run."""
    losses = run.curve("loss/train", island)[1]
    if losses.size:
        return _cell(float(losses[-1]), _loss, "own, last")
    intervals = run.history.intervals.get(island.name, ()) if run.history else ()
    means = [interval.loss for interval in intervals if interval.loss is not None]
    return _cell(means[-1] if means else NAN, _loss, "own, mean of its last minutes")


def _mixtures_table(run: Run) -> Table:
    """Return the mixtures of corpora, in the order in which they were read."""
    rows = [
        [
            Cell(name),
            Cell(f"{record.step:,}", f"{100 * record.share:.3g} % of the run"),
            Cell(record.mixture.replace(" % ", f"{NO_BREAK}%{NO_BREAK}")),
        ]
        for name, record in run.mixtures
    ]
    return Table("Mixtures and phases", ["from", "after step", "mixture"], rows)


def _verdicts_table(run: Run) -> Table:
    """Return the verdicts about the workers, with their evidence."""
    rows = [
        [
            Cell(f"{verdict.culprit}: {verdict.what}"),
            Cell(f"{verdict.since:,}", f"{time_text(verdict.time)} UTC"),
            Cell(clock(end - verdict.time)),
            Cell(verdict.evidence),
        ]
        for verdict, end in run.verdicts
    ]
    return Table("Verdicts", ["who, what", "since step", "for", "evidence"], rows)


def _links_table(run: Run) -> Table:
    """Return the measured rate between every pair of workers."""
    rates = defaultdict[tuple[int, str], list[float]](list)
    for worker in run.workers:
        for record in worker.rounds:
            for sender, rate in record.received_bits_per_second_from.items():
                rates[sender, worker.name].append(rate)
    links = sorted((np.median(known), *pair, len(known)) for pair, known in rates.items())
    rows = [
        [
            Cell(f"worker {sender} to {receiver}"),
            Cell(_bits(rate), "median"),
            Cell(f"{rounds:,}", "rounds"),
        ]
        for rate, sender, receiver, rounds in links[:MAX_LINKS]
    ]
    return Table("Links, slowest first", ["from, to", "rate of a payload", "measured in"], rows)


def _news_table(run: Run) -> Table:
    """Return what the history of a run of islands says has happened, the newest first."""
    news = run.history.news if run.history is not None else ()
    rows = [[Cell(f"{time_text(at)} UTC"), Cell(text)] for at, text in reversed(news)]
    return Table("What happened", ["when", "what"], rows)


def _differences_table(runs: Sequence[Run]) -> Table:
    """Return the settings that differ between the runs with a config.toml."""
    runs = [run for run in runs if run.settings]
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        texts = [format_value(run.settings[key]) if key in run.settings else ABSENT for run in runs]
        if key not in NAMING_SETTINGS and len(set(texts)) > 1:
            rows.append([Cell(key), *map(Cell, texts)])
    return Table("Settings that differ", ["setting", *(run.name for run in runs)], rows)


def _cell(value: float, form: Callable[[float], str], note: str = "") -> Cell:
    return Cell(form(value), note) if math.isfinite(value) else Cell()
