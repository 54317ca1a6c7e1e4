"""The page as a headless Chromium shows it, on a telephone and on a wide screen."""

import html
import json
import re
import shutil
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from torchtitan_diloco.report.page import main

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PHONE = (390, 844)
DESKTOP = (1280, 900)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=2000 --dump-dom"
)
FORBID_LOADING = """<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<script>
const loads = [];
addEventListener("securitypolicyviolation", (event) => loads.push(event.effectiveDirective));
</script>"""
MEASURE = """<script>
addEventListener("load", () => setTimeout(() => {
  const rect = (element) => element.getBoundingClientRect();
  const look = (element) => getComputedStyle(element);
  const charts = [...document.querySelectorAll("svg.chart")].filter((one) => rect(one).width > 0);
  const texts = (chart) => [...chart.querySelectorAll("text")];
  const cut = (text, chart) => rect(text).left < rect(chart).left - 1
    || rect(text).right > rect(chart).right + 1 || rect(text).bottom > rect(chart).bottom + 1;
  const meet = (one, other) =>
    Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1 &&
    Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 3;
  parent.postMessage([NUMBER, JSON.stringify({
    viewport: innerWidth,
    too_wide: [...document.body.querySelectorAll("*")]
      .filter((element) => !element.closest(".scroll, pre, svg"))
      .filter((element) => rect(element).right > innerWidth + 0.5).map((one) => one.tagName),
    widths: charts.map((chart) => rect(chart).width),
    cut: charts.flatMap((chart) =>
      texts(chart).filter((text) => cut(text, chart)).map((text) => text.textContent)),
    overlapping: charts.flatMap((chart) => texts(chart).flatMap((one, place, all) =>
      all.slice(place + 1).filter((other) => meet(rect(one), rect(other)))
        .map((other) => [one.textContent, other.textContent]))),
    smallest_text: Math.min(...charts.flatMap((chart) => texts(chart).map((text) =>
      parseFloat(look(text).fontSize) * rect(chart).width / chart.viewBox.baseVal.width))),
    loads,
  })], "*");
}, 200));
</script>"""
WINDOW = """<!DOCTYPE html>
<script>addEventListener("message", ({data: [number, measured]}) => {
  document.documentElement.setAttribute(`data-measured${number}`, measured);
});</script>
<iframe src="measured0.html" style="SIZE; border: 0"></iframe>
<iframe src="measured1.html" style="SIZE; border: 0"></iframe>"""
"""A browser window cannot be as narrow as a telephone, a frame can."""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")


def as_elements(page: str) -> str:
    """Return a page whose charts are no images, so that their texts can be measured."""

    def element(image: re.Match[str]) -> str:
        drawn = b64decode(image[1]).decode()
        return drawn[drawn.index("<svg") :].replace("<svg", '<svg class="chart"', 1)

    return re.sub(r'<img [^>]*src="data:image/svg\+xml;base64,([^"]*)">', element, page)


def measure(folder: Path, size: tuple[int, int]) -> list[dict[str, Any]]:
    """Show report0.html and report1.html, and return what was measured on each."""
    for number in range(2):
        text = as_elements((folder / f"report{number}.html").read_text())
        text = text.replace("<head>", f"<head>{FORBID_LOADING}", 1)
        text = text.replace("</body>", f"{MEASURE.replace('NUMBER', str(number))}</body>")
        (folder / f"measured{number}.html").write_text(text)
    window = WINDOW.replace("SIZE", f"width: {size[0]}px; height: {size[1]}px")
    (folder / "window.html").write_text(window)
    command = [
        str(BROWSER),
        *FLAGS.split(),
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={max(size[0], 600)},{2 * size[1]}",
        (folder / "window.html").as_uri(),
    ]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    found = dict(re.findall(r'data-measured([01])="([^"]*)"', outcome.stdout))
    assert len(found) == 2, outcome.stderr[-2000:]
    return [json.loads(html.unescape(found[number])) for number in ("0", "1")]


@pytest.fixture(scope="module")
def pages(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a page of one run, and one of three runs."""
    folder = tmp_path_factory.mktemp("pages")
    names = ["streaming", "running", "data-parallel"]
    for number, shown in enumerate((names[:1], names)):
        page = str(folder / f"report{number}.html")
        assert main([*(str(runs / name) for name in shown), "--out", page]) == 0
    return folder


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "wide"])
def test_pages_are_readable(size: tuple[int, int], pages: Path) -> None:
    for seen, charts in zip(measure(pages, size), (8, 6), strict=True):
        assert seen["viewport"] == size[0]
        assert (seen["too_wide"], seen["loads"]) == ([], [])
        assert len(seen["widths"]) == charts
        assert min(seen["widths"]) > 0.85 * min(size[0], 480)
        assert (seen["cut"], seen["overlapping"]) == ([], [])
        assert seen["smallest_text"] >= 9.5
