"""The report as text, for a terminal or an issue."""

from collections.abc import Sequence

from torchtitan_diloco.report.figures import TRAINED
from torchtitan_diloco.report.notes import notes
from torchtitan_diloco.report.run_records import Run
from torchtitan_diloco.report.tables import (
    Table,
    differences_table,
    facts_table,
    links_table,
    workers_table,
)
from torchtitan_diloco.report.words import sparkline


def markdown(runs: Sequence[Run]) -> str:
    parts = [_table(facts_table(runs))]
    curves = [(run.name, sparkline([loss for _, loss in run.curve(TRAINED)])) for run in runs]
    parts += [f"Training loss of {_text(name)}: `{curve}`" for name, curve in curves if curve]
    parts += [_text(note) for note in notes(runs)]
    for run in runs:
        of = f", {_text(run.name)}" if len(runs) > 1 else ""
        for heading, table in (
            ("Workers", workers_table(run)),
            ("Links, the slowest first", links_table(run)),
        ):
            if table.rows:
                parts += [f"## {heading}{of}", _table(table)]
    differences = differences_table(runs)
    if differences.rows:
        parts += ["## Settings that differ", _table(differences)]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    """With columns of one width each, to be read as it stands."""
    rows = [[_text(name) for name in table.head]]
    rows += [
        [_text(cell.text + (f" ({cell.note})" if cell.note else "")) for cell in cells]
        for cells in table.rows
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.head))]
    rows.insert(1, ["-" * max(3, width) for width in widths])
    return "\n".join(
        f"| {' | '.join(text.ljust(width) for text, width in zip(row, widths, strict=True))} |"
        for row in rows
    )


def _text(text: str) -> str:
    """Nothing of it is taken for a mark of the format."""
    line = " ".join(text.split())
    return "".join(
        f"\\{character}" if character in "\\|`*_[]<>#" else character for character in line
    )
