"""A class that derives from LanguageModel and is in MODELS can be trained, planned and used."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.components.test_resume import run
from tests.export.reading import validation_of
from tests.processes import ProcessPool
from tests.test_trainer import curve, records, settings
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.diloco.config import Fragments
from torchtitan_diloco.export import __main__ as commands
from torchtitan_diloco.export.weights import open_saved
from torchtitan_diloco.models import MODELS, LanguageModel
from torchtitan_diloco.models.base import Head
from torchtitan_diloco.planner.prediction import Workload


class Mixer(LanguageModel):
    """A stack of gated causal means with a head of its own."""

    def __init__(self, config: Model, vocab_size: int, sequence_length: int) -> None:
        super().__init__(config, vocab_size, sequence_length)
        width = config.width or 16
        self.shape = f"{config.layers} means of {width}"
        self.embed = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(config.layers or 2)
        )
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: Tensor, head: Head = F.linear) -> Any:
        hidden = self.embed(tokens)
        positions = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)[:, None]
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden.cumsum(dim=1) / positions))
        return head(hidden, self.head.weight)

    def initial_std(self, name: str, parameter: Tensor) -> float:
        return 0.02 if name == "embed.weight" else float(parameter.shape[1]) ** -0.5

    def parameter_counts(self) -> dict[str, int]:
        total = sum(parameter.numel() for parameter in self.parameters())
        return {"total": total, "embedding": self.embed.weight.numel()}

    def flops_per_token(self, length: int) -> int:
        counts = self.parameter_counts()
        return 6 * (counts["total"] - counts["embedding"]) + length


def run_mixer(chosen: dict[str, str]) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(MODELS, "debug", Mixer)
        return str(run(chosen))


def test_a_new_family_trains_in_shards_and_its_checkpoint_is_used(
    text: Path,
    processes: ProcessPool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    streaming = {"diloco.method": "streaming", "diloco.sync_every": 4}
    streaming |= {"diloco.fragments.layers_per_fragment": 1, "checkpoint.at_end": "true"}
    streaming |= {"activation_checkpoint.mode": "full"}
    chosen = settings(text, **streaming)
    (folder, *_) = processes.run(run_mixer, 2, chosen)
    losses = curve(records(Path(folder)), "loss/val")
    assert losses[-1] < losses[0]

    monkeypatch.setitem(MODELS, "debug", Mixer)
    saved = open_saved(Path(folder))
    assert isinstance(saved.model, Mixer)
    assert validation_of(saved).loss == pytest.approx(losses[-1], abs=1e-4)
    assert commands.main(["generate", folder, "--tokens", "3"]) == 0
    assert commands.main(["export", folder]) == 0
    assert commands.main(["export", folder, "--format", "hf"]) == 2
    assert "has no form in transformers" in capsys.readouterr().err
    load = Workload.of(load_config("debug", chosen), vocabulary=320)
    assert len(load.fragments(Fragments(layers_per_fragment=1))) == 3
