import os
import random
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.processes import ProcessPool
from torchtitan_diloco.utils import STOP_SIGNALS

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores
settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")

for number in (
    STOP_SIGNALS
):  # nohup and background jobs ignore some, and all that is started here would inherit it
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )

REPOSITORY = Path(__file__).parents[1]


def page_commands(page: str, out: Path) -> list[list[str]]:
    """Return the words of the commands in a page's ```shell blocks, which a test runs in its own
    process. tests/test_docs.py runs ```bash blocks."""
    text = (REPOSITORY / "docs" / page).read_text()
    lines = "".join(re.findall(r"^```shell\n(.*?)^```", text, re.M | re.S)).splitlines()
    return [shlex.split(line.replace("$OUT", str(out)), comments=True) for line in lines]


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPool]:
    """Run functions in several gloo processes: `processes.run(function, size, *arguments)`."""
    pool = ProcessPool()
    yield pool
    pool.close()


WORDS = [
    "the",
    "a",
    "one",
    "lake",
    "bird",
    "stone",
    "sings",
    "falls",
    "rests",
    "over",
    "under",
    "near",
    "old",
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng = random.Random(0)
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(rng.choices(WORDS, k=12)) + "." for _ in range(3000)))
    return path
