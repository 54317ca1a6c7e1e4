"""The page as a headless Chromium shows it, on a telephone in the dark and on a wide screen."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from torchtitan_diloco.report.__main__ import main

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PHONE, DESKTOP = (390, 844), (1280, 900)
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
  parent.postMessage(JSON.stringify({
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
    colours: [look(document.documentElement).backgroundColor, look(document.body).color],
    loads,
  }), "*");
}, 200));
</script>"""
WINDOW = """<!DOCTYPE html><html style="color-scheme: light dark">
<script>addEventListener("message", (event) => {
  document.documentElement.dataset.measured = event.data;
});</script>
<iframe src="measured.html" style="width: WIDTHpx; height: HEIGHTpx; border: 0"></iframe>"""
"""A browser window cannot be as narrow as a telephone, a frame can."""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")


def measure(page: Path, size: tuple[int, int], dark: bool) -> dict[str, Any]:
    folder = page.parent
    text = page.read_text().replace("<head>", f"<head>{FORBID_LOADING}", 1)
    (folder / "measured.html").write_text(text.replace("</body>", f"{MEASURE}</body>"))
    window = WINDOW.replace("WIDTH", str(size[0])).replace("HEIGHT", str(size[1]))
    (folder / "window.html").write_text(window)
    command = [
        str(BROWSER),
        *FLAGS.split(),
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={max(size[0], 600)},{size[1]}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        (folder / "window.html").as_uri(),
    ]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<html[^>]* data-measured="([^"]*)"', outcome.stdout)
    assert found is not None, outcome.stderr[-2000:]
    measured: dict[str, Any] = json.loads(html.unescape(found[1]))
    return measured


def luminance(colour: str) -> float:
    """Return the relative luminance (WCAG) of a CSS colour."""
    channels = [int(channel) / 255 for channel in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(("size", "dark"), [(PHONE, True), (DESKTOP, False)], ids=["phone", "wide"])
@pytest.mark.parametrize("several", [False, True], ids=["one run", "three runs"])
def test_page_is_readable(
    several: bool,
    size: tuple[int, int],
    dark: bool,
    streaming: Path,
    running: Path,
    data_parallel: Path,
    tmp_path: Path,
) -> None:
    page = tmp_path / "report.html"
    folders = [streaming, running, data_parallel] if several else [streaming]
    assert main([*map(str, folders), "--out", str(page)]) == 0
    seen = measure(page, size, dark)
    assert seen["viewport"] == size[0]
    assert (seen["too_wide"], seen["loads"]) == ([], [])
    assert len(seen["widths"]) == (10 if several else 8)
    assert min(seen["widths"]) > 0.85 * min(size[0], 480)
    assert (seen["cut"], seen["overlapping"]) == ([], [])
    assert seen["smallest_text"] >= 9.5
    background, text = map(luminance, seen["colours"])
    low, high = sorted((background, text))
    assert (high + 0.05) / (low + 0.05) > 7
    assert (background < text) == dark
