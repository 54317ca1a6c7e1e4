import sys
from pathlib import Path

import pytest

from benchmarks import backlog, core, parity, records, scale

VALUES = {"out": "/some/where", "prose": "texts/*.txt"}


def test_every_entry_is_a_command_that_its_benchmark_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules = {"benchmarks.scale": scale, "benchmarks.parity": parity}
    seen = list[Path]()

    def stop(out: Path, *_: object, **__: object) -> dict[object, core.Record]:
        """Stand in for the training: the command line was accepted."""
        seen.append(out)
        return {}

    monkeypatch.setattr(core, "train_all", stop)
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    monkeypatch.setattr(scale, "write_sources", lambda path: path.write_text('{"text": "x"}\n'))
    entries = backlog.read_entries()
    for entry in entries:
        words = entry.command(VALUES | {"out": str(tmp_path)}, 5)
        assert words[1] == entry.module
        monkeypatch.setattr(sys, "argv", ["benchmark", *words[2:]])
        with pytest.raises(SystemExit, match=r"nothing was measured|no run was finished"):
            modules[entry.module].main()
    assert len(seen) == len(entries)


def test_entries_run_in_order_until_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    called = list[str]()

    def call(command: list[str]) -> int:
        called.append(" ".join(command[1:]))
        now[0] += 100.0
        return len(called) - 1

    monkeypatch.setattr("benchmarks.backlog.time.monotonic", lambda: now[0])
    monkeypatch.setattr("benchmarks.backlog.subprocess.call", call)
    entries = [
        backlog.Entry("first", "a", "--out {out}"),
        backlog.Entry("other text", "b", "--corpus {prose} --out {out}"),
        backlog.Entry("second", "c", ""),
        backlog.Entry("third", "d", ""),
    ]
    lines = backlog.run_entries(dict(enumerate(entries, start=1)), {"out": "x y"}, 210.0)
    assert called == ["-m a --out x y --minutes 3", "-m c --minutes 1"]
    assert lines == [
        "1. first: done",
        "2. other text: left out, give --text 'prose=PATHS'",
        "3. second: exit code 1",
        "4. third: not begun, the time is over",
    ]
    assert "--out 'x y'" in capsys.readouterr().out, "as one would type it"


@pytest.mark.parametrize("text", ["prose", "prose=", "poems=x.txt"])
def test_texts_that_no_entry_reads_are_refused(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["backlog", "--minutes", "1", "--text", text])
    with pytest.raises(SystemExit) as ended:
        backlog.main()
    assert ended.value.code == 2
    assert "give NAME=PATHS; there are ['prose']" in capsys.readouterr().err
