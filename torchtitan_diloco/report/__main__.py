"""One page about a run, or about several side by side.

python -m torchtitan_diloco.report outputs/RUN [outputs/RUN ...]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_diloco.pictures.files import check_picture_path, write_picture
from torchtitan_diloco.pictures.timeline_chart import timeline_chart
from torchtitan_diloco.report.markdown import markdown
from torchtitan_diloco.report.page import html_page
from torchtitan_diloco.report.run_records import open_runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_diloco.report",
        description="Write a page about a run, or about several side by side.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="(default: report.html in the first run's folder; --format md: the terminal)",
    )
    parser.add_argument(
        "--format",
        choices=("html", "md"),
        default="html",
        help="html: a page with pictures (default); md: tables as text",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="instead of a page: the last exchanges of one run as a picture, .svg or .png",
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    try:
        if options.timeline is not None:
            _draw_timeline(options.runs, options.timeline)
        else:
            _write(options.runs, options.out, options.format)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _draw_timeline(paths: Sequence[Path], target: Path) -> None:
    check_picture_path(target, "--timeline")
    if len(paths) > 1:
        raise ValueError(f"--timeline is of one run, and {len(paths)} are given: name the one")
    (run,) = open_runs(paths)
    if not run.rounds:
        raise ValueError(
            f"{run.folder} has no exchanges to draw: take a run of several workers with diloco.method streaming"
        )
    write_picture(timeline_chart(run.rounds), target)
    print(target)


def _write(paths: Sequence[Path], out: Path | None, form: str) -> None:
    runs = open_runs(paths)
    if form == "md" and out is None:
        print(markdown(runs), end="")
        return
    target = runs[0].folder / "report.html" if out is None else out
    try:
        target.write_text(
            html_page(runs) if form == "html" else markdown(runs),
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise ValueError(
            f"--out {target} cannot be written ({error.strerror}): name a file in a folder of yours"
        ) from None
    print(target)


if __name__ == "__main__":
    sys.exit(main())
