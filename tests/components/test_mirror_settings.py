"""Mirrors that cannot be used, before a run starts."""

from pathlib import Path

import pytest

from torchtitan_diloco.config import ConfigError, load_config
from torchtitan_diloco.launching.preflight import missing


def test_settings_that_cannot_be_a_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.mirror: is run.folder, or in it"):
        load_config("debug", {"run.folder": "a", "checkpoint.mirror": "a/b"})
    with pytest.raises(ConfigError, match=r"checkpoint.adopt = true: is only used with"):
        load_config("debug", {"checkpoint.adopt": "true"})
    config = load_config("debug", {"checkpoint.mirror": "s3://bucket/a"})

    monkeypatch.setattr("torchtitan_diloco.launching.preflight.find_spec", lambda _: None)
    assert any(
        "install obstore: " in line and "[bucket]" in line and "pip install" in line
        for line in missing(config)
    )
    monkeypatch.undo()
    assert not any("obstore" in line for line in missing(config))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "location is missing; use the newest join file of this site"),
        ('location = "s3://a"\naccess_key_id = "b"', "secret_access_key is missing"),
    ],
)
def test_a_mirror_that_cannot_be_is_listed_before_a_run_starts(
    tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "join.toml"
    path.write_text(content)
    config = load_config("debug", {"checkpoint.mirror": str(path)})
    assert any(f"checkpoint.mirror: {path}: {says}" in line for line in missing(config))
    config = load_config("debug", {"checkpoint.mirror": "https://host/a"})
    assert any("https://host/a: there is no such kind of store" in line for line in missing(config))
