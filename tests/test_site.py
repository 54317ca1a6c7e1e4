"""The site of the documentation: complete, strict about links, alone, and fit for a telephone."""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.report.test_page_in_browser import BROWSER, FLAGS, PHONE

BUILDER = "scripts/build_site.py"
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Attributes of elements from which a browser loads something without being asked to."""
NOT_LOADED = ("genindex.html", "search.html")
MEASURE = """<script>addEventListener("load", () => parent.postMessage(["NAME",
  [...document.querySelectorAll(".content *")]
    .filter((element) => !element.closest(".table-wrapper, pre, svg, aside, .visually-hidden"))
    .filter((element) => element.getBoundingClientRect().right > innerWidth + 0.5)
    .map((element) => element.outerHTML.slice(0, 80))], "*"));</script>"""
"""Which elements are cut off. Tables and code scroll by themselves."""
WINDOW = """<!DOCTYPE html><html><script>
const found = {};
addEventListener("message", ({data: [name, cut]}) => {
  found[name] = cut;
  document.documentElement.setAttribute("data-found", JSON.stringify(found));
});</script>"""

needs_sphinx = pytest.mark.skipif(
    find_spec("sphinx") is None or find_spec("furo") is None or find_spec("myst_parser") is None,
    reason="needs Sphinx, MyST and Furo (extra docs)",
)


def build(repository: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(repository / BUILDER), str(site)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def copy_pages(folder: Path) -> None:
    """Copy what the site is built from."""
    for name in ("docs", "examples", "scripts", "benchmarks/records"):
        shutil.copytree(REPOSITORY / name, folder / name)
    for page in REPOSITORY.glob("*.md"):
        shutil.copy(page, folder)


class Loaded(HTMLParser):
    """Collects what a page loads from a file or a host."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets = list[str]()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get(LOADING.get(tag, ""))
        if target is not None:
            self.targets.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    done = build(REPOSITORY, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"the site is in {folder}: open {folder / 'index.html'}\n"
    return folder


@needs_sphinx
def test_every_page_is_there_and_nothing_comes_from_other_hosts(site: Path) -> None:
    pages = {path.stem for path in (REPOSITORY / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}
    for page in site.glob("*.html"):
        for target in Loaded(page).targets:
            assert not re.match(r"\w+:|//", target), f"{page.name} loads {target}"
            path = page.parent / re.split("[?#]", target)[0]
            assert path.exists() or page.name in NOT_LOADED, f"{page.name} loads {target}"
    for sheet in site.rglob("*.css"):
        text = re.sub(r"url\((['\"]?)data:.*?\1\)", "", sheet.read_text())
        assert not re.search(r"@import|url\(\s*['\"]?(\w+:)?//", text), sheet


@needs_sphinx
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
def test_pages_fit_a_telephone_and_can_be_searched(site: Path, tmp_path: Path) -> None:
    """In one window with a frame for each page, as a window cannot be as narrow as a telephone."""
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    names = sorted(path.name for path in folder.glob("*.html"))
    frames = [WINDOW]
    for name in names:
        page = folder / name
        script = MEASURE.replace("NAME", name)
        page.write_text(page.read_text().replace("</body>", f"{script}</body>"))
        frames.append(f'<iframe src="{name}" style="width: {PHONE[0]}px; border: 0"></iframe>')
    (folder / "window.html").write_text("\n".join(frames))

    def shown(page: str) -> str:
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [str(BROWSER), *FLAGS.split(), profile, f"file://{folder}/{page}"]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=120)

    (found,) = re.findall(r'data-found="([^"]*)"', shown("window.html"))
    assert json.loads(html.unescape(found)) == {name: [] for name in names}
    assert re.search(r"found [1-9]\d* pages? matching", shown("search.html?q=fp4_e3m0"))
    assert "did not match any documents" in shown("search.html?q=nosuchwordanywhere")


@needs_sphinx
def test_links_that_lead_nowhere_are_errors(tmp_path: Path) -> None:
    copy_pages(tmp_path)
    wrong = "\n[a](nowhere.md) [b](algorithm.md#no-such-heading) ![c](images/none.svg) [d](#none)\n"
    page = tmp_path / "docs" / "checkpoint.md"
    page.write_text(page.read_text() + wrong)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for target in ("nowhere.md", "no-such-heading", "images/none.svg", "none'"):
        assert re.search(rf"checkpoint\.md.*WARNING.*{target}", done.stderr), done.stderr


def test_without_sphinx_one_line_says_what_to_run() -> None:
    run = f"runpy.run_path({BUILDER!r}, run_name='__main__')"
    program = f"import sys, runpy; sys.modules['furo'] = None; {run}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    error = "error: furo is not installed: `./scripts/build_site.sh` installs the extra docs\n"
    assert (done.returncode, done.stderr) == (2, error)
