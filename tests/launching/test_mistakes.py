"""A mistake on one node ends the run on all nodes, with the same exit code and its cause."""

from pathlib import Path

import pytest

from tests.launching.running import Running, start
from tests.ports import free_port
from tests.test_trainer import settings, words

OWN = {"data.corpus": "text-{worker}.txt", "data.shard_by": "own"}


def start_node(
    number: int, port: int, text: Path, console: Path, *arguments: str, **changes: object
) -> Running:
    """Start a node of two, with one worker each, whose settings are for a run of eight steps."""
    chosen = settings(text, **{"diloco.workers": 2, "diloco.method": "streaming", **changes})
    variables = {"NNODES": "2", "NODE_RANK": str(number), "RDZV_ENDPOINT": f"localhost:{port}"}
    program = ["train", "--run.device", "cpu", *words(chosen), *arguments]
    return start(console, program, folder=text.parent, **variables)


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_corpus_that_one_node_lacks(text: Path, tmp_path: Path, faulty: int) -> None:
    text.rename(tmp_path / f"text-{1 - faulty}.txt")
    port = free_port()
    nodes = [
        start_node(number, port, text, tmp_path / f"console-{number}", **OWN) for number in range(2)
    ]
    try:
        codes = [node.wait() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    cause = f"text-{faulty}.txt: no such regular file; check its path"
    for number, node in enumerate(nodes):
        printed = node.printed()
        elsewhere = "" if number == faulty else f" (on rank {faulty})"
        (line,) = (line for line in printed.splitlines() if "error:" in line)
        assert line.startswith(f"[rank {number}] error: "), printed
        assert cause in line, printed
        assert line.endswith(elsewhere), printed
        assert "started again" not in printed
        assert "Traceback" not in printed
    assert codes == [2, 2]
