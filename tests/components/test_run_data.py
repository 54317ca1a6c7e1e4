"""Which corpora a run reads."""

from pathlib import Path

import pytest
import torch

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.run_data import RunData
from torchtitan_diloco.config import load_config
from torchtitan_diloco.data.prepare import prepare
from torchtitan_diloco.data.text import open_corpus
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.distributed.world import World

BYTES = build_tokenizer("bytes")
ALONE = World(rank=0, size=1, workers=1, device=torch.device("cpu"))


def open_data(**changes: object) -> RunData:
    settings = {key.replace("__", "."): str(value) for key, value in changes.items()}
    return RunData(load_config("debug", settings), BYTES, ALONE)


# --- validation on other text than is trained on --------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a folder of two texts, and another text."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name in ("texts/a.txt", "texts/b.txt", "other.txt"):
        Path(name).write_text(f"the text of {name}")
    return tmp_path


def make_shards(name: str, validation_fraction: float) -> None:
    prepare(open_corpus("texts"), BYTES, Path(name), validation_fraction=validation_fraction)


@pytest.mark.parametrize("spelling", ["./{}", "{}/", "{folder}/{}", "texts/../{}"])
@pytest.mark.parametrize("name", ["texts", "shards"])
def test_a_corpus_that_is_trained_on_is_refused_for_validation_under_another_spelling(
    name: str, spelling: str, folder: Path
) -> None:
    make_shards("shards", validation_fraction=0)
    changes = {
        "data__mixture": f"other.txt=1 {name}=1",
        "data__validation_corpus": spelling.format(name, folder=folder),
    }
    with pytest.raises(UserError, match=f'same tokens as "{name}" of data.mixture, which is train'):
        open_data(**changes)
    open_data(**changes, validation__every=0)


@pytest.mark.usefixtures("folder")
def test_the_held_out_part_of_shards_is_accepted_under_another_spelling() -> None:
    make_shards("shards", validation_fraction=0.5)
    open_data(data__corpus="shards", data__validation_corpus="./shards")
