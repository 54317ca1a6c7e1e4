"""Write a report about one or several runs.

.venv/bin/torchtitan-diloco report outputs/RUN [outputs/RUN ...]
.venv/bin/torchtitan-diloco report join.txt
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_diloco.log import Parser, command_line
from torchtitan_diloco.report.page import html_page
from torchtitan_diloco.report.run_records import open_runs

ABOUT = "Write a report about one or several runs, finished or still going on."
RUN_HELP = "folder of a run or of an island, or join file of a run of islands"
OUT_HELP = "file to write (default: report.html in the folder of the first run)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    parser = Parser(prog=command_line("report"), description=ABOUT)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help=RUN_HELP)
    add("--out", type=Path, metavar="FILE", help=OUT_HELP)
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
        print(target)
    except OSError as error:
        print(f"error: {target} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
