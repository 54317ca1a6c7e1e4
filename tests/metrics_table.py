"""Print the table of all metrics, as they are declared.

    .venv/bin/python -m tests.metrics_table [--write]

docs/report-and-plan.md has this table, tests/components/test_metrics.py compares them, and --write
renews it.
"""

import sys

from tests.conftest import REPOSITORY
from torchtitan_diloco.components.metrics import METRICS

PAGE = REPOSITORY / "docs/report-and-plan.md"
BEGIN = "<!-- metrics: .venv/bin/python -m tests.metrics_table --write -->\n\n"
END = "\n<!-- end of metrics -->"
HEAD = "| metric | unit | | of the | merged |\n|---|---|---|---|---|\n"


def table() -> str:
    """Return a row of Markdown for each metric."""
    rows = [
        f"| `{name}` | {metric.unit} | {metric.meaning} | {metric.scope.value} | {metric.merging} |"
        for name, metric in sorted(METRICS.items())
    ]
    return HEAD + "\n".join(rows) + "\n"


def main() -> None:
    print(table())
    if "--write" in sys.argv[1:]:
        before, _, after = PAGE.read_text().partition(BEGIN)
        _, _, after = after.partition(END)
        PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
