"""Build the documentation as a site: `python scripts/build_site.py [FOLDER]` (build/site).

The README is the first page, and pages of docs/ and of the root folder follow. Sphinx reads them as
GitHub does (CommonMark with tables), and a link or an anchor that leads nowhere is an error. The
site loads nothing from other hosts, so that it can be read, and searched, from a disk.
"""

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
RECORDS = [REPOSITORY / f"benchmarks/records/{name}.md" for name in ("loss", "speed")]
FIRST = REPOSITORY / "README.md"
SECTIONS = {
    "Train": (
        "which",
        "two-machines",
        "two-notebooks",
        "launching",
        "data-and-models",
        "algorithm",
        "checkpoint",
        "preemptible",
        "report-and-plan",
    ),
    "Islands": ("islands", "islands-reference"),
    "Look up": ("own-loop", "own-parts", "troubleshooting", "words"),
    "Results": ("measurements", "loss", "speed", "downstream", "tried"),
    "Develop": ("AGENTS", "CONTRIBUTING", "SECURITY", "CHANGELOG"),
}
"""Pages by their headings beside the text. Those of docs/ that are not here come after Results."""
LINK = re.compile(r"""(?<=\]\()(?!\w+:|#)([^)#\s]+)|(?<=\ssrc=")(?!\w+:)([^"]+)""")
"""A relative target in Markdown, or of an image in HTML."""
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.M | re.S)
SETTINGS = """
project = "torchtitan_diloco"
author = copyright = "The torchtitan_diloco authors"
html_title = "torchtitan_diloco"
html_theme = "furo"
html_copy_source = html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
"""
STYLE = """
img { background: #fff; } /* charts have dark text on nothing */
@media (min-width: 97em) { .content { width: 58em; } } /* wide tables, where there is room */
"""


def main(arguments: Sequence[str]) -> int:
    """Build the site, and return the exit status: of Sphinx, or 2 if it is not installed."""
    parser = argparse.ArgumentParser(prog="build_site.py", allow_abbrev=False)
    parser.add_argument("folder", nargs="?", type=Path, default=REPOSITORY / "build" / "site")
    folder = parser.parse_args(arguments).folder
    try:
        import furo  # noqa: F401
        import myst_parser  # noqa: F401
        from sphinx.cmd.build import build_main
    except ImportError as error:
        remedy = "`./scripts/build_site.sh` installs the extra docs"
        print(f"error: {error.name} is not installed: {remedy}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        write_source(source)
        # -E -a: all pages anew; --fail-on-warning: also a link that leads nowhere.
        options = ["-E", "-a", "-q", "--fail-on-warning", "--keep-going"]
        cache = str(Path(temporary) / "cache")
        status = int(build_main([*options, "-d", cache, str(source), str(folder)]))
    if status == 0:
        print(f"the site is in {folder}: open {folder / 'index.html'}")
    return status


def write_source(source: Path) -> None:
    """Write all pages side by side, as Sphinx wants them below one folder."""
    shutil.copytree(DOCS / "images", source / "images")
    (source / "static").mkdir()
    (source / "static" / "site.css").write_text(STYLE, encoding="utf-8")
    (source / "conf.py").write_text(SETTINGS, encoding="utf-8")
    pages = pages_by_section()
    for page in [FIRST, *(page for section in pages.values() for page in section)]:
        text = moved_links(page, source)
        if page == FIRST:
            text += "".join(table_of(name, section) for name, section in pages.items())
        (source / name_of(page)).write_text(text, encoding="utf-8")


def pages_by_section() -> dict[str, list[Path]]:
    there = [*REPOSITORY.glob("*.md"), *DOCS.glob("*.md"), *RECORDS]
    places = {page.stem: page for page in there}
    sections = {name: [places.pop(stem) for stem in stems] for name, stems in SECTIONS.items()}
    others = sorted(page for page in places.values() if page.parent == DOCS)
    sections["Results"] += others
    return sections


def table_of(name: str, pages: Sequence[Path]) -> str:
    """Return a list of pages, which is shown beside the text only."""
    stems = "\n".join(name_of(page).removesuffix(".md") for page in pages)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {name}\n\n{stems}\n```\n"


def name_of(page: Path) -> str:
    return "index.md" if page == FIRST else page.name


def moved_links(page: Path, source: Path) -> str:
    """Return the text of a page whose links lead where pages are side by side.

    Copy the files that are no pages. Code is left as it is.
    """

    def moved(link: re.Match[str]) -> str:
        path = (page.parent / link[0]).resolve()
        is_page = path.parent in (REPOSITORY, DOCS) or path in RECORDS
        if path.suffix == ".md" and is_page:
            return name_of(path)
        if path.is_relative_to(DOCS):
            return str(path.relative_to(DOCS))
        if path.is_file():
            copy = source / path.relative_to(REPOSITORY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        return str(path.relative_to(REPOSITORY))

    parts = CODE.split(page.read_text(encoding="utf-8"))  # prose, code, prose, ...
    parts[::2] = [LINK.sub(moved, prose) for prose in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
