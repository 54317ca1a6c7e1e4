import gc
import logging
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.processes import ProcessPool
from tests.programs import popen
from tests.store.fixtures import bucket as bucket
from tests.store.fixtures import bucket_server as bucket_server
from tests.store.fixtures import place as place
from tests.store.fixtures import seaweed as seaweed
from tests.store.fixtures import store as store
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.process import STOP_SIGNALS
from torchtitan_diloco.data.tokenizer import train_tokenizer

REPOSITORY = Path(__file__).parents[1]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores
# What tests start finds this package, also where another copy of it is installed.
paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(paths)
settings.register_profile("deterministic", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("deterministic")

# Read when `datasets` or `transformers` is imported. Nothing is left in the home of the user.
_home = tempfile.TemporaryDirectory()
_modules = f"{_home.name}/modules"
os.environ |= {"HF_HOME": _home.name, "HF_MODULES_CACHE": _modules, "HF_HUB_OFFLINE": "1"}

# `nohup` and background jobs ignore some signals, and all that is started here would inherit it.
for number in STOP_SIGNALS:
    if signal.getsignal(number) is signal.SIG_IGN:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)


@pytest.hookimpl(trylast=True)  # after others have deselected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each process of xdist begin with its part of the tests that take longest, so that none of
    them is left when the others have ended. `--dist worksteal` gives each process a share of
    consecutive tests."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    longest = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    end = 0
    ordered = list[pytest.Item]()
    for worker in range(workers):
        end += (len(items) - end) // (workers - worker)
        ordered += longest[worker::workers]
        most = max(0, end - len(ordered))
        ordered += others[:most]
        others = others[most:]
    items[:] = ordered + others


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of the collections with which each run begins."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def package_logging() -> Iterator[None]:
    """Undo what a run in this process sets up: its handler holds the stdout of a test."""
    yield
    logger.handlers = []
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what this process starts be programs of `tests.programs`, which need not import torch."""
    monkeypatch.setattr(subprocess, "Popen", popen)


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPool]:
    """Run functions in several gloo processes: `processes.run(function, size, *arguments)`."""
    pool = ProcessPool()
    yield pool
    pool.close()


SENTENCE = "the a one lake bird stone sings falls rests over under near old"
WORDS = SENTENCE.split()


def write_text(folder: Path) -> Path:
    rng = random.Random(0)
    path = folder / "text.txt"
    path.write_text("\n".join(" ".join(rng.choices(WORDS, k=12)) + "." for _ in range(3000)))
    return path


def save_tokenizer(path: Path, vocab_size: int) -> str:
    """Train a byte-level BPE on the README, and save its `tokenizer.json`."""
    content, _ = train_tokenizer([(REPOSITORY / "README.md").read_text()], vocab_size)
    path.write_text(content)
    return str(path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)
