import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.processes import ProcessPool

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores
settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPool]:
    """Runs functions in several real gloo processes: `processes.run(function, size, *arguments)`."""
    pool = ProcessPool()
    yield pool
    pool.close()
