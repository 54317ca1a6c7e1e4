"""The fit of what few rounds cost."""

from pathlib import Path

import msgspec
import pytest

from benchmarks import core, rounds


def written(folder: Path, seeds: int) -> list[core.Record]:
    """Return records in which a run costs 200 / rounds percent, and a beginning halves that."""
    found = list[core.Record]()
    for seed in range(seeds):
        for count in (25, 50, 100, 200):
            control = 1.0 + seed / 10
            losses = {
                f"data parallel, {count} rounds": control,
                f"streaming, H=30, {count} rounds": control * (1 + 2 / count),
                f"streaming, H=30, {count} rounds, beginning 0.1": control * (1 + 1 / count),
            }
            common = {"text": "stdlib", "seed": seed}
            found += [common | {"run": name, "loss": loss} for name, loss in losses.items()]
    lines = [msgspec.json.encode(record).decode() for record in found]
    (folder / "parity-rounds-text-2026-01-01-cpu.jsonl").write_text("\n".join(lines) + "\n")
    return found


def test_a_power_law_is_found(tmp_path: Path) -> None:
    found = written(tmp_path, seeds=2)
    gaps = rounds.find_gaps(found, "")
    assert sorted(gaps) == [0, 1]
    law = rounds.fit(gaps[0])
    assert law.exponent == 1.0
    assert law.at(400) == pytest.approx(0.5)
    assert rounds.fit({25: -0.1, 100: 0.1, 400: 0.0}).exponent in rounds.EXPONENTS


def test_the_table_says_what_is_measured_and_what_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, seeds=1)
    monkeypatch.setattr("sys.argv", ["rounds", "--records", str(tmp_path), "--at", "400"])
    rounds.main()
    printed = capsys.readouterr().out
    assert "no beginning: loss against data parallelism, %" in printed
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]
    assert ["25", "1", "+8.00", "+8.00", "+8.00"] in rows
    assert ["400", "0", "", "+0.25", "+0.25"] in rows, "with a beginning"
    assert ["the fit, and the exponents p", "", "", "200 / rounds^1.00", "1.00"] in rows
    assert ["mean from 100 rounds on", "2", "+1.50, standard error 0.50", "", ""] in rows
