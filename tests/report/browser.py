"""A headless Chromium that opens a page and tells what it looks like."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PHONE, DESKTOP = (390, 844), (1280, 900)

WATCH = """
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<script>
const loads = [];
addEventListener("securitypolicyviolation", (event) => loads.push(event.effectiveDirective));
</script>
"""
"""Forbids the page to load anything, and notes what it tries to."""
MEASURE = """
<script>
addEventListener("load", () => setTimeout(() => {  // fonts are asked for when all is laid out
  const rect = (element) => element.getBoundingClientRect();
  const shown = (element) => rect(element).width > 0;
  const outside = (inner, outer) =>
    Math.min(inner.left - outer.left, outer.right - inner.right, inner.top - outer.top, outer.bottom - inner.bottom) < -1;
  const meet = (one, other) =>
    Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1 &&
    Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 3;
  const pictures = [...document.querySelectorAll("svg.picture")].filter(shown);
  const texts = pictures.map((picture) => [...picture.querySelectorAll("text")]);
  const look = (element) => getComputedStyle(element);
  const boxed = (element) => element.closest(".scroll, pre, svg");
  const measured = {
    viewport: innerWidth,
    page: document.documentElement.scrollWidth,
    too_wide: [...document.body.querySelectorAll("*")]
      .filter((element) => !boxed(element) && rect(element).right > innerWidth + 0.5).map((element) => element.tagName),
    pictures: pictures.map((picture) => ({
      title: picture.getAttribute("aria-label"), width: rect(picture).width, height: rect(picture).height,
    })),
    hidden_pictures: document.querySelectorAll("svg.picture").length - pictures.length,
    cut_texts: pictures.flatMap((picture, number) =>
      texts[number].filter((text) => outside(rect(text), rect(picture))).map((text) => text.textContent)),
    overlapping_texts: texts.flatMap((inside) => inside.flatMap((one, number) =>
      inside.slice(number + 1).filter((other) => meet(rect(one), rect(other)))
        .map((other) => [one.textContent, other.textContent]))),
    smallest_text: Math.min(...pictures.flatMap((picture, number) => texts[number].map((text) =>
      parseFloat(look(text).fontSize) * rect(picture).width / picture.viewBox.baseVal.width))),
    ground: look(document.documentElement).backgroundColor,
    text: look(document.body).color,
    picture_text: look(texts[0][0]).fill,
    loads,
  };
  parent.postMessage(JSON.stringify(measured), "*");
}, 200));
</script>
"""

WINDOW = """<!DOCTYPE html>
<html style="color-scheme: light dark">
<script>addEventListener("message", (event) => { document.documentElement.dataset.measured = event.data; });</script>
<body style="margin: 0"><iframe src="measured.html" style="width: WIDTHpx; height: HEIGHTpx; border: 0"></iframe></body>
"""
"""Around the page, because no window of the browser is as narrow as a telephone."""


def find_browser() -> str | None:
    """One that starts: some systems have a script of this name that only says where to get it."""
    for path in filter(None, map(shutil.which, NAMES)):
        if (
            subprocess.run(
                [path, "--version"], capture_output=True, timeout=60, check=False
            ).returncode
            == 0
        ):
            return path
    return None


def measure(
    browser: str, page: Path, folder: Path, *, size: tuple[int, int], dark: bool = False
) -> dict[str, Any]:
    """What a copy of the page, with a script that looks at it, says of itself in a window of this size."""
    copy, window = folder / "measured.html", folder / "window.html"
    text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{WATCH}", 1)
    copy.write_text(text.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    window.write_text(WINDOW.replace("WIDTH", str(size[0])).replace("HEIGHT", str(size[1])))
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={max(size[0], 600)},{size[1]}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        window.as_uri(),
    ]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<html[^>]* data-measured="([^"]*)"', outcome.stdout)
    assert found is not None, f"{browser} did not show the page:\n{outcome.stderr[-2000:]}"
    measured: dict[str, Any] = json.loads(html.unescape(found[1]))
    return measured
