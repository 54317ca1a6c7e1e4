"""The page as a real browser shows it: on a telephone and on a wide screen, by day and by night."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.pictures.contrast import contrast
from tests.report.browser import DESKTOP, PHONE, find_browser, measure
from torchtitan_diloco.report.__main__ import main

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None,
    reason="no Chromium or Chrome that starts on this machine: pages are not looked at",
)


def look_at(page: Path, folder: Path, **options: Any) -> dict[str, Any]:
    assert BROWSER is not None
    return measure(BROWSER, page, folder, **options)


def hexadecimal(colour: str) -> str:
    channels = re.findall(r"\d+", colour)[:3]
    return "#" + "".join(f"{int(channel):02x}" for channel in channels)


@pytest.mark.parametrize(
    ("size", "dark"), [(PHONE, True), (DESKTOP, False)], ids=["telephone by night", "screen by day"]
)
@pytest.mark.parametrize(
    "names",
    [["streaming"], ["streaming", "running", "data_parallel"]],
    ids=["one run", "three runs"],
)
def test_the_page_is_readable(
    names: list[str],
    size: tuple[int, int],
    dark: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    page = tmp_path / "report.html"
    folders = [str(request.getfixturevalue(name)) for name in names]
    assert main([*folders, "--out", str(page)]) == 0
    seen = look_at(page, tmp_path, size=size, dark=dark)

    assert seen["viewport"] == size[0]
    assert seen["page"] <= size[0], "the page is wider than the window"
    assert seen["too_wide"] == []
    assert seen["loads"] == [], "the page must be whole in itself"

    titles = [picture["title"] for picture in seen["pictures"]]
    for title in (
        "Loss over tokens",
        "Bandwidth",
        "Where the time went",
        "The last",
        "Cosine",
        "Drift",
    ):
        assert any(found.startswith(title) for found in titles), title
    assert seen["hidden_pictures"] > 0, "those for the other width"
    for picture in seen["pictures"]:
        assert 0.85 * min(size[0], 480) < picture["width"] <= size[0], picture
        assert picture["height"] > 60, picture
    assert seen["cut_texts"] == []
    assert seen["overlapping_texts"] == []
    assert seen["smallest_text"] >= 9.5

    ground, text, picture_text = (
        hexadecimal(seen[key]) for key in ("ground", "text", "picture_text")
    )
    assert contrast(ground, text) > 7
    assert contrast(ground, picture_text) > 7
    assert (contrast(ground, "#000000") < contrast(ground, "#ffffff")) == dark


def test_the_look_sees_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<!DOCTYPE html><html><head><link rel="stylesheet" href="https://example.com/a.css">'
        "<style>@font-face { font-family: far; src: url(https://example.com/a.woff) } p { font-family: far }</style></head>"
        '<body><div style="width: 700px">wide</div><p>far</p><img src="missing.png">'
        '<svg class="picture" viewBox="0 0 100 50" width="100"><text x="10" y="20">one</text><text x="12" y="20">other</text>'
        '<text x="90" y="40">cut off</text></svg></body></html>'
    )
    seen = look_at(page, tmp_path, size=PHONE)
    assert seen["page"] > PHONE[0]
    assert "DIV" in seen["too_wide"]
    assert sorted(seen["loads"]) == ["font-src", "img-src", "style-src-elem"]
    assert seen["cut_texts"] == ["cut off"]
    assert seen["overlapping_texts"] == [["one", "other"]]
