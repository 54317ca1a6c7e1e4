import re
from pathlib import Path

import pytest

from benchmarks import core
from benchmarks.parity import Run, Table, print_losses, read_tables

TABLES = read_tables().tables
RUN = {"training.steps": "20", "run.seed": "0", "diloco.workers": "1"}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_runs_are_valid_distinct_and_of_equal_tokens(table: Table) -> None:
    found = set()
    for name in table.controls:
        run = table.settings(name)
        is_own = run.get("data.shard_by") == "own"  # corpora that are made before the runs
        config = core.load(run | ({"data.corpus": "clusters-{worker}"} if is_own else {}))
        sequences = config.diloco.workers * config.training.batch_size
        assert sequences == config.training.global_batch_size, name
        tokens = config.training.steps * sequences * config.training.sequence_length
        assert table.steps == config.training.steps or table.tokens == tokens, name
        found.add(frozenset(run.items()))
    assert len(found) == len(table.controls), "no run has two names"
    assert set(table.papers) <= set(table.controls)


def test_a_finished_run_is_not_repeated_and_an_interrupted_one_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []

    def train(folder: Path, *_: object, **__: object) -> list[core.Record]:
        folder.mkdir(parents=True, exist_ok=True)
        started.append(folder)
        if len(started) == 2:
            raise SystemExit("interrupted")
        if len(started) == 3:
            raise core.CutError
        speed = {"speed/tokens_per_second": 1.0, "train/tokens": 200}
        start = {"kind": "start", "parameters": 10, "workers": 2}
        loss = {"loss/val": float(len(started)), "loss/bits_per_byte": 1.0}
        return [start, {"step": 20} | speed, {"step": 20} | loss]

    monkeypatch.setattr(core, "train", train)
    runs = {Run(seed, "run"): RUN | {"run.seed": str(seed)} for seed in range(2)}
    with pytest.raises(SystemExit):
        core.train_all(tmp_path, runs)
    assert [result["loss"] for result in core.train_all(tmp_path, runs).values()] == [1.0]
    for _ in range(2):
        results = core.train_all(tmp_path, runs)
        assert [result["loss"] for result in results.values()] == [1.0, 4.0]
    assert started[1] == started[2] == started[3] != started[0]
    with pytest.raises(SystemExit, match="other settings"):
        core.kept(started[0].parent, {"run.seed": "2"}, dict)


def test_losses_are_compared_with_the_control_and_with_the_first_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = {"data parallel": [2.0, 4.0], "data parallel, Muon": [1.0, 2.0]}
    losses["streaming, Muon, M=2, H=10"] = [1.01, 2.06]
    results = {
        Run(seed, name): {"loss": loss, "saving": 38.7 if "streaming" in name else 0.0}
        for name, found in losses.items()
        for seed, loss in enumerate(found)
    }
    print_losses(TABLES["bytes"], results)
    title, *_, control, run = capsys.readouterr().out.strip().splitlines()
    assert "after 3,000 steps = 1.5M tokens" in title
    assert control.count("%") == 1
    cells = "streaming, Muon, M=2, H=10 | 1/39 | 2 | 1.5350 (1.0100 ... 2.0600) | "
    cells += "+2.00 (+1.00 ... +3.00) % | -49.00 (-49.50 ... -48.50) % |"
    assert re.sub(" +", " ", run).startswith(f"| {cells}")
