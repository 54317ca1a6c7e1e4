from pathlib import Path

import pytest
import torch

from benchmarks import records


def test_records_say_how_they_were_made_without_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--minutes", "9", "--out", "/tmp/x", "--work=/tmp/y", "--corpus", "/tmp/z/*.md"]
    made_by = records.provenance("benchmarks.scale", words, torch.device("cpu"))
    assert made_by.command == ".venv/bin/python -m benchmarks.scale --minutes 9 --corpus '*.md'"
    assert torch.__version__ in made_by.versions
    path = tmp_path / records.file_name("scale", made_by)
    assert path.name == f"scale-{made_by.date[:10]}-cpu.jsonl"
    records.write(path, records.stamped([{"loss": 1.5}], made_by))
    (record,) = records.read("scale", [tmp_path])
    assert (record["loss"], record["commit"]) == (1.5, made_by.commit)
    assert records.read("other", [tmp_path]) == []
    # Where there is no git, as on a machine that got a copy of the files.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COMMIT", "0123456789ab")
    assert records.read_commit() == "0123456789ab"


def test_all_records_of_the_repository_can_be_read_and_name_no_folder_of_a_machine() -> None:
    for path in records.RECORDS.glob("*.jsonl"):
        kind = path.name.partition("-")[0]
        assert records.read(kind, [path.parent]), path
        assert "/tmp/" not in path.read_text(), path
