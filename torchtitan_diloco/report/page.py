"""The report as one HTML page and as Markdown."""

import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from torchtitan_diloco.report.charts import css_variables
from torchtitan_diloco.report.facts import Table, detail_tables, facts_table, notes, setting_text
from torchtitan_diloco.report.figures import figures
from torchtitan_diloco.report.run_records import Run
from torchtitan_diloco.utils import markdown_table

METHODS = {"streaming": "Streaming DiLoCo", "none": "data parallelism"}


def html_page(runs: Sequence[Run]) -> str:
    """Return a self-contained page for wide and narrow screens, light and dark."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs side by side",
        css_variables=css_variables(),
        runs=runs,
        describe=describe,
        facts=facts_table(runs),
        notes=notes(runs),
        figures=figures(runs),
        tables=detail_tables(runs),
        setting_text=setting_text,
    )


def describe(run: Run) -> str:
    workers = f"{run.workers} worker{'s' * (run.workers > 1)}" if run.workers else ""
    method = METHODS.get(run.settings.get("diloco.method", ""), "")
    setup = ", ".join(filter(None, (workers, method)))
    return "; ".join(filter(None, (str(run.settings.get("run.description", "")), setup)))


def markdown(runs: Sequence[Run]) -> str:
    """Return the report without figures, for a terminal or an issue."""
    parts = [_markdown_table(facts_table(runs))]
    parts += [_markdown_text(note) for note in notes(runs)]
    for table in detail_tables(runs):
        parts += [f"## {_markdown_text(table.heading)}", _markdown_table(table)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    cells = [[f"{text} ({note})" if note else text for text, note in row] for row in table.rows]
    columns, *rows = ([*map(_markdown_text, row)] for row in (table.columns, *cells))
    return markdown_table(columns, rows)


def _markdown_text(text: str) -> str:
    """Escape the characters of Markdown's markup."""
    return re.sub(r"([\\|`*_\[\]<>#])", r"\\\1", " ".join(text.split()))
