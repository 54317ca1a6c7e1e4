"""The report as one HTML page: whole in itself, without a script, for a wide screen and a telephone, by day and by night."""

from collections.abc import Sequence
from html import escape

from torchtitan_diloco.pictures.svg import stylesheet, to_svg
from torchtitan_diloco.report.figures import Figure, figures
from torchtitan_diloco.report.notes import notes
from torchtitan_diloco.report.run_records import Run
from torchtitan_diloco.report.style import STYLE
from torchtitan_diloco.report.tables import (
    Cell,
    Table,
    differences_table,
    facts_table,
    links_table,
    workers_table,
)


def html_page(runs: Sequence[Run]) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs side by side"
    body = [
        f"<header><h1>{_text(title)}</h1>{_subtitle(runs)}</header>",
        _facts(facts_table(runs)),
        *(f'<p class="note">{_text(note)}</p>' for note in notes(runs)),
        f'<section class="figures">{"".join(map(_figure, figures(runs)))}</section>',
        *(_workers_and_links(run, named=len(runs) > 1) for run in runs),
        _differences(runs),
        *(_settings(run, named=len(runs) > 1) for run in runs),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{stylesheet()}{STYLE}</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{_lines(body)}\n</main></body></html>\n'


def _subtitle(runs: Sequence[Run]) -> str:
    words = (
        [description(run) for run in runs]
        if len(runs) == 1
        else [f"{run.name}: {description(run)}" for run in runs]
    )
    return "".join(f"<p>{_text(line)}</p>" for line in words if line)


def description(run: Run) -> str:
    """What somebody wrote about the run, and how its workers were kept together."""
    told = run.settings.get("run.description", '""')[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    workers = "" if run.workers is None else f"{run.workers} worker{'s' if run.workers > 1 else ''}"
    method = {'"streaming"': "Streaming DiLoCo", '"none"': "data parallelism"}.get(
        run.settings.get("diloco.method", ""), ""
    )
    return "; ".join(filter(None, [told, ", ".join(filter(None, [workers, method]))]))


def _figure(figure: Figure) -> str:
    picture = to_svg(figure.scene)
    if figure.narrow is None:
        kind = "figure"
    else:
        kind = 'figure class="wide"'
        picture = (
            f'<div class="broad">{picture}</div><div class="narrow">{to_svg(figure.narrow)}</div>'
        )
    return f"<{kind}>{picture}<figcaption>{_text(figure.caption)}</figcaption></figure>"


def _workers_and_links(run: Run, *, named: bool) -> str:
    of = f", {run.name}" if named else ""
    parts = []
    workers, links = workers_table(run), links_table(run)
    if workers.rows:
        parts.append(f"<h2>{_text(f'Workers{of}')}</h2>{_table(workers)}")
    if links.rows:
        parts.append(f"<h2>{_text(f'Links{of}')}</h2><p>The slowest first.</p>{_table(links)}")
    return "".join(parts)


def _differences(runs: Sequence[Run]) -> str:
    table = differences_table(runs)
    return f"<h2>Settings that differ</h2>{_table(table)}" if table.rows else ""


def _settings(run: Run, *, named: bool) -> str:
    if not run.settings:
        return ""
    of = f", {run.name}" if named else ""
    lines = "\n".join(f"{key} = {value}" for key, value in run.settings.items())
    return f"<details><summary>{_text(f'All settings{of}')}</summary><pre>{_text(lines)}</pre></details>"


def _facts(table: Table) -> str:
    """Of a single run: beside each other, so that the pictures begin high on the page."""
    if len(table.head) > 2:
        return _table(table)
    return f"<dl>{''.join(f'<div><dt>{_cell(name)}</dt><dd>{_cell(fact)}</dd></div>' for name, fact in table.rows)}</dl>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in table.head)
    rows = "".join(
        f'<tr><th scope="row">{_cell(first)}</th>{"".join(f"<td>{_cell(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in table.rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    return _text(cell.text) + (f" <small>{_text(cell.note)}</small>" if cell.note else "")


def _text(text: str) -> str:
    return escape(text)


def _lines(parts: Sequence[str]) -> str:
    return "\n".join(filter(None, parts))
