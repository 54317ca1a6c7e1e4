"""Two nodes that train one run, of which one is stopped."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launching.running import start
from tests.ports import free_port
from tests.test_trainer import settings, words


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_node_ends_the_others_at_once(
    text: Path, tmp_path: Path, signalled: int
) -> None:
    """They do not wait for its launcher, which may have had the store. All are to start again."""
    many = {"training.steps": 10**6, "training.global_batch_size": 24, "diloco.workers": 2}
    chosen = settings(text, **many, diloco__method="streaming", checkpoint__at_end="true")
    meeting = dict[str, Any](NNODES="2", NPROC="1", RDZV_ENDPOINT=f"localhost:{free_port()}")
    command = ["train", "--run.device", "cpu", *words(chosen)]
    nodes = [
        start(tmp_path / f"node-{rank}", command, NODE_RANK=str(rank), **meeting)
        for rank in range(2)
    ]
    try:
        nodes[0].wait_for("validation after step 4")
        nodes[signalled].process.send_signal(signal.SIGINT)
        codes = [node.wait() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    printed = nodes[0].printed() + nodes[1].printed()
    assert codes[signalled] == 128 + signal.SIGINT, printed
    assert codes[1 - signalled] == 128 + signal.SIGTERM, printed
    assert "Traceback" not in printed
    assert "barrier" not in printed
