"""Print the table of all metrics, as they are declared.

    .venv/bin/python -m tests.metrics_table [--write]

docs/report-and-plan.md has this table, tests/components/test_metrics.py compares them, and --write
renews it.
"""

import sys

from tests.conftest import REPOSITORY
from torchtitan_diloco.components.metrics import METRICS

PAGE = REPOSITORY / "docs/report-and-plan.md"
BEGIN = "<!-- metrics: .venv/bin/python -m tests.metrics_table --write -->\n"
END = "\n<!-- end of metrics -->"
HEAD = "\n| metric | unit | | of the | merged |\n|---|---|---|---|---|\n"


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
        before, begin, after = PAGE.read_text().partition(BEGIN)
        _, end, after = after.partition(END)
        assert end, f"{PAGE} has no markers for the table"
        PAGE.write_text(before + begin + table() + end + after)


if __name__ == "__main__":
    main()
