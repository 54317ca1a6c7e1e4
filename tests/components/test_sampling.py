"""Samples of the text of the shared parameters, while a run trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from tests.components.test_resume import FP32, run
from tests.components.test_telemetry import telemetry
from tests.processes import ProcessPool
from tests.test_trainer import LOSS, curve, records, settings, train
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.sampling import Prompt, Sampler
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.loader import ConfigError
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.diloco.data_parallel import DataParallel
from torchtitan_diloco.export import __main__ as commands

PROMPT = "the <story>\n"
SHOWN = "sample/text_summary"
SAMPLED = {"validation.sample_every": 3, "validation.sample_prompt": PROMPT}


def test_all_workers_sample_the_shared_parameters(
    text: Path, processes: ProcessPool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is sharded over two processes. At the end, the text is that of the last checkpoint."""
    chosen = settings(text, **FP32, **SAMPLED, training__batch_size=3, optimizer__lr=0.02)
    chosen |= {"checkpoint.at_end": "true", "metrics.boards": "tensorboard"}
    folder = Path(processes.run(run, 4, chosen)[0])
    first, second = (records(folder, "sample", worker) for worker in (0, 1))
    assert [record["step"] for record in first] == [3, 6, 8]
    texts = [record["text"] for record in first]
    assert texts == [record["text"] for record in second]
    assert all(text.startswith(PROMPT) and len(text) > len(PROMPT) for text in texts)
    words = "generate", str(folder), "--prompt", PROMPT, "--tokens", "64", "--device", "cpu"
    assert commands.main(words) == 0
    assert capsys.readouterr().out == f"{texts[-1]}\n"
    board = EventAccumulator(str(folder / "worker-1")).Reload()
    shown = [event.tensor_proto.string_val[0].decode() for event in board.Tensors(SHOWN)]
    assert [line.removeprefix("    ") for line in shown[-1].split("\n")] == texts[-1].split("\n")


def test_samples_change_nothing_in_training(text: Path) -> None:
    chosen = settings(text)
    other = chosen | {key: str(value) for key, value in SAMPLED.items()}
    assert curve(train(chosen), LOSS) == curve(
        train(other | {"run.folder": str(text.parent / "sampled")}), LOSS
    )


class Broken(nn.Module):
    """A model whose logits are not finite, or that cannot read another length than 32."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem
        self.embedding = nn.Embedding(257, 4)

    def forward(self, tokens: Tensor, head: Any = F.linear) -> Any:
        if self.problem:
            raise RuntimeError(self.problem)
        return head(self.embedding(tokens) * torch.inf, self.embedding.weight)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("", "the logits are not finite: the training diverged; use an earlier checkpoint"),
        ("give 32 tokens\nat once", "give 32 tokens"),
    ],
)
def test_a_sample_that_fails_is_only_logged(
    problem: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Broken(problem)

    outer = DataParallel(model)
    tokenizer = build_tokenizer("bytes")
    sampler = Sampler(
        1, Prompt([], [5]), sequence_length=32, tokenizer=tokenizer, model=model, outer=outer
    )
    with telemetry(tmp_path) as own:
        assert sampler.sample(3, own) >= 0
    assert caplog.messages == [f"no sample after step 3: {reason}"]
    assert records(tmp_path, "sample") == []
    assert model.training


def test_mistakes_in_the_prompt_are_named(text: Path) -> None:
    message = r'sample_prompt = "a": is only used with validation.sample_every: set that too, or'
    with pytest.raises(ConfigError, match=message):
        load_config("debug", {"validation.sample_prompt": "a"})
    long = settings(text, **SAMPLED | {"validation.sample_prompt": "z" * 33})
    message = r'prompt = "z+" has 33 tokens, more than training.sequence_length = 32: shorten it'
    with pytest.raises(UserError, match=message):
        train(long)
