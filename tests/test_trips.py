"""The files that CONTRIBUTING.md lists are those that a run enters."""

import re

import pytest

from tests.trips import BEGIN, END, PAGE, follow


@pytest.mark.long
def test_the_page_lists_the_files_that_a_run_enters() -> None:
    section = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    listed = {
        match[1]: (int(match[2]), set(re.findall(r"`([^`]+)`", match[3])))
        for match in re.finditer(
            r"^- \*\*(.+?)\*\* \((\d+)\): (.*(?:\n  .*)*)", section, re.MULTILINE
        )
    }
    followed = {name: (len(files), set(files)) for name, files in follow().items()}
    assert listed == followed, "renew them: .venv/bin/python -m tests.trips --write"
