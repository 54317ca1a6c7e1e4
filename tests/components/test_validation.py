"""Which held-out text a run validates on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.validation import HeldOut, open_held_out, shares_in_mean
from torchtitan_diloco.config import Config, load_config
from torchtitan_diloco.config.schema import Phase
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.distributed.world import World

BYTES = build_tokenizer("bytes")
ALONE = World(rank=0, size=1, workers=1, device=torch.device("cpu"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run that reads one corpus, and later also one whose held-out text is too short."""
    lines = "".join(f'{{"text": "{str(number) * 200}"}}\n' for number in range(10))
    (tmp_path / "long.jsonl").write_text(lines)
    (tmp_path / "single.txt").write_text("a few words " * 40)
    (tmp_path / "short.jsonl").write_text(f'{{"text": "{"a" * 200}"}}\n{{"text": "b"}}\n')
    config = load_config("debug", {"training.sequence_length": "32"})
    data = replace(config.data, corpus=str(tmp_path / "long.jsonl"), cache_folder=str(tmp_path))
    return replace(config, data=data)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("single.txt", "the text is a single piece: add text"),
        ("short.jsonl", "the validation split of .* is shorter than one sequence: it has 2 tokens"),
    ],
)
def test_a_corpus_that_is_only_in_a_phase_needs_no_held_out_text(
    config: Config,
    name: str,
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = config.data.corpus
    later = str(tmp_path / name)

    def names(config: Config) -> list[str]:
        opened = open_held_out(config, BYTES, ALONE, each_worker_has_its_own=False)
        shares = shares_in_mean(opened, {first: 1.0, later: 1.0})
        assert sum(shares.values()) == 1.0, "also while the other one is read"
        return [corpus.name for corpus in opened]

    phased = replace(config.data, phases=(Phase(0.5, {first: 1.0, later: 1.0}),))
    assert names(replace(config, data=phased)) == [first]
    (warning,) = caplog.messages
    assert warning.startswith(f"{later} is only read in a phase, and is not validated: ")

    mixed = replace(config.data, corpus="", mixture={first: 0.5, later: 0.5})
    with pytest.raises(UserError, match=reason):
        names(replace(config, data=mixed))

    alone = replace(config.data, phases=(Phase(0.5, {later: 1.0, first: 0.0}),))
    with pytest.raises(UserError, match=reason):
        names(replace(config, data=alone))


def test_a_corpus_of_a_phase_is_validated_if_it_has_held_out_text(
    config: Config, tmp_path: Path
) -> None:
    first = config.data.corpus
    later = tmp_path / "other.jsonl"
    later.write_text(Path(first).read_text().replace("3", "x"))
    phased = replace(config.data, phases=(Phase(0.5, {str(later): 1.0}),))
    opened = open_held_out(
        replace(config, data=phased), BYTES, ALONE, each_worker_has_its_own=False
    )
    for mixture, shares in zip(phased.mixtures, ([1.0, 0.0], [0.0, 1.0]), strict=True):
        assert shares_in_mean(opened, mixture) == dict(
            zip((first, str(later)), shares, strict=True)
        )


def test_a_corpus_that_is_only_for_validation_is_all_of_the_mean(config: Config) -> None:
    separate = replace(config.data, corpus="stdlib", validation_corpus=config.data.corpus)
    held_out = HeldOut(separate.validation_corpus, "shown", batches=[], sequences=1, text_bytes=1)
    assert shares_in_mean([held_out], separate.weights) == {"shown": 1.0}
