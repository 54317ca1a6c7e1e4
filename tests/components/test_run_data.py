"""Which corpora a run reads, and where a resumed run goes on in them."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.run_data import RunData
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.schema import Config, Phase
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


# --- the order of the corpora ---------------------------------------------------------------------

LENGTH = 7
STEPS = 60
MIXTURE = st.permutations("abc").flatmap(
    lambda names: st.fixed_dictionaries({name: st.integers(1, 3).map(float) for name in names})
)
Start = tuple[dict[str, float], dict[str, float], int]
"""Mixture, mixture of the second half of the run, and steps until the run ends or is resumed."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run whose corpora a, b and c have a sequence of their own for each sample."""
    folder = tmp_path_factory.mktemp("mixed")
    for name in "abc":
        rows = (f"{name}{number:06d}" for number in range(STEPS + 1))
        (folder / f"{name}.txt").write_text("".join(rows))
    settings = {
        "data.corpus": str(folder),
        "data.cache_folder": str(folder / "cache"),
        "data.validation_fraction": "0",
        "data.shuffle": "false",
        "training.sequence_length": str(LENGTH),
        "training.batch_size": "1",
    }
    return load_config("debug", settings)


@given(st.lists(st.tuples(MIXTURE, MIXTURE, st.integers(0, 20)), min_size=2, max_size=3))
@example([({"a": 1, "b": 1}, {"a": 1, "b": 1}, 3), ({"b": 1, "a": 1}, {"a": 1, "b": 1}, 3)])
@example([({"a": 1, "b": 1}, {"c": 1, "a": 1}, 33), ({"a": 1, "b": 1}, {"a": 2, "c": 1}, 9)])
def test_a_resumed_run_reads_each_sample_once_in_any_order_of_the_corpora(
    mixed: Config, starts: list[Start]
) -> None:
    saved = None
    counts = Counter[str]()
    step = 0
    for mixture, later, steps in starts:
        phase = Phase(0.5, {f"{mixed.data.corpus}/{name}.txt": later[name] for name in later})
        weights = {f"{mixed.data.corpus}/{name}.txt": mixture[name] for name in mixture}
        settings = replace(mixed.data, mixture=weights, phases=(phase,))
        data = RunData(replace(mixed, data=settings), BYTES, ALONE, saved=saved)
        plan = RunPlan(
            parameters=1,
            embedding_parameters=0,
            accumulation=1,
            tokens_per_step=LENGTH,
            total_steps=STEPS,
            start_step=step,
            start_tokens=step * LENGTH,
        )
        data.begin(plan, data.position.samples, data.position, stream=None)
        for inputs, _ in islice(data.loader, steps):
            row = BYTES.decode(inputs[0].tolist())
            assert row == f"{row[0]}{counts[row[0]]:06d}"
            counts[row[0]] += 1
        step += steps
        saved = data.saved_position()
