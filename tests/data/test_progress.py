import io
import sys

import pytest

import torchtitan_diloco.data.progress as progress_module
from torchtitan_diloco.data.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_TERMINAL_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "_PLAIN_SECONDS", 0.0)


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, total_bytes: int | None) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress("job", total_bytes)
    progress.update(25, "1 M tokens")
    progress.update(50, "2 M tokens")
    progress.finish()
    return stream.getvalue()


def test_a_terminal_has_one_line_that_goes_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal(), total_bytes=100)
    assert "\n" not in text
    assert "\r\033[Kjob: 2 M tokens, 50.0% of the text, about 0 s left" in text
    assert text.endswith("\r\033[K")


def test_elsewhere_lines_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, io.StringIO(), total_bytes=100)
    assert [line.split(", about")[0] for line in text.splitlines()] == [
        "job: 1 M tokens, 25.0% of the text",
        "job: 2 M tokens, 50.0% of the text",
    ]


def test_unknown_size_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO(), total_bytes=None).splitlines()[-1] == "job: 2 M tokens"
