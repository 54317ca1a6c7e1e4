"""What a run needs is listed at once, before any process starts."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from torchtitan_diloco.config import Config, load_config
from torchtitan_diloco.data.train_tokenizer import main as train_tokenizer
from torchtitan_diloco.launch import main
from torchtitan_diloco.log import UserError
from torchtitan_diloco.preflight import check_inputs, missing


def test_all_that_is_missing_is_listed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        patch("torchtitan_diloco.preflight.find_spec", return_value=None),
        patch("shutil.which", return_value=None),
        patch("sys.executable", str(tmp_path / "python")),
        patch("subprocess.Popen", side_effect=AssertionError("a process was started")),
    ):
        assert main(["--config", "1b", "--metrics.wandb", "x", "--islands.local", "2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 5 things to do before this run can start:")
    extras = re.findall(r"install ([\w-]+): .*\[(\w+)\]'", error)
    assert extras == [("wandb", "wandb"), ("datasets", "c4"), ("nats-server", "islands")]
    source = "--source hf:allenai/c4/en:train"
    assert f"tokenizer {source} --vocab-size 32000 --out data/c4-32k.json" in error
    assert re.search(rf"prepare {source} .* --max-tokens 25\d{{9}}\n", error), "20 a parameter"
    with patch("torchtitan_diloco.preflight.find_spec", return_value=None):
        own = {"data.corpus": "stdlib", "data.tokenizer": "bytes"}
        assert not [*missing(load_config("35m", own))], "nothing is read from the hub"
    assert main(["--config", "llama-8b", "--print-config"]) == 0
    download = "hf download meta-llama/Llama-3.1-8B --local-dir data/Llama-3.1-8B"
    error = capsys.readouterr().err
    assert download in error
    assert "data.tokenizer" not in error, "it comes with the weights"
    assert re.search(r"prepare .* --begin-token", error)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    check_inputs(settings(run__folder=str(tmp_path / "new/run")))
    (file := tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf'run.folder = "{file}/run": {file} is no folder that'):
        check_inputs(settings(run__folder=f"{file}/run"))


def test_a_join_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"islands.join = 'no.txt': No such file"):
        check_inputs(settings(islands__join="no.txt", islands__name="a"))


def settings(**changed: str) -> Config:
    changed = {key.replace("__", "."): value for key, value in changed.items()}
    return load_config("debug", changed)


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    own, weights = tmp_path / "own.json", tmp_path / "weights"
    words = f"--source README.md --vocab-size 400 --pieces 9 --out {own}"
    train_tokenizer(words.split())
    check_inputs(settings(data__tokenizer=str(own)))
    with pytest.raises(UserError, match=r"model\.vocab_size = 300 is below the .* of 400"):
        check_inputs(settings(data__tokenizer=str(own), model__vocab_size="300"))
    weights.mkdir()
    given: dict[str, Any] = {"model__weights": str(weights)}
    with pytest.raises(UserError, match=r"the folder has no model\*.safetensors"):
        check_inputs(settings(**given))
    (weights / "model.safetensors").touch()
    names = "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"
    config = dict.fromkeys(names, 8) | {"model_type": "llama", "vocab_size": 320}
    (weights / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"is of another model: for it, set .*--model\.layers 8"):
        check_inputs(settings(**given))
    (tmp_path / "run/worker-0/step-00000001").mkdir(parents=True)
    check_inputs(settings(**given, run__folder=f"{tmp_path}/run"))  # goes on from its checkpoints
