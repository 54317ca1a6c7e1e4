"""Bytes are counted in the buffers sent: the kernel's interface counter must agree."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.diloco.bytes_on_the_wire import CASES, NO_NETWORK, VALUES
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import Quantization
from torchtitan_diloco.diloco.transport import HEADER_BYTES


def test_the_interface_counts_what_we_count() -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "tests.diloco.bytes_on_the_wire"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if outcome.returncode == NO_NETWORK:
        pytest.skip(f"no network namespace here: {outcome.stderr.strip()}")
    assert outcome.returncode == 0, outcome.stderr
    measured = json.loads(outcome.stdout.splitlines()[-1])
    assert [(workers, codec) for workers, codec, _, _ in measured] == CASES
    for workers, codec, counted, on_the_wire in measured:
        assert counted <= on_the_wire <= 1.02 * counted, f"{workers} workers, {codec}"
        directions = (
            workers if workers == 2 else 2 * (workers - 1)
        )  # of the whole fragment, all workers together
        payloads = directions * build_codec(Quantization(codec=codec)).wire_bytes(VALUES)
        assert counted == pytest.approx(payloads + workers * (workers - 1) * HEADER_BYTES, abs=64)
        if codec.startswith("fp4"):
            assert 8 * counted <= 4.25 * directions * VALUES, "with headers, scales and padding"
