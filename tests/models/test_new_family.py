"""The model that docs/data-and-models.md adds to FLAVORS is trained, planned and used."""

import re
import shlex
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.components.test_resume import run
from tests.conftest import REPOSITORY
from tests.export.reading import validation_of
from tests.processes import ProcessPool
from tests.programs import Program
from tests.test_trainer import curve, records, settings, words
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.diloco.config import Fragments
from torchtitan_diloco.export import __main__ as commands
from torchtitan_diloco.export.weights import load_initial_weights, open_saved
from torchtitan_diloco.models import FLAVORS, build_model
from torchtitan_diloco.models.interface import (
    describe,
    flops_per_token,
    init_weights,
    parameter_counts,
)
from torchtitan_diloco.planner.prediction import Workload

PAGE = (REPOSITORY / "docs/data-and-models.md").read_text()
NAME = "means"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
STREAMING = {
    "model.flavor": NAME,
    "diloco.method": "streaming",
    "diloco.workers": 2,
    "diloco.sync_every": 4,
    "diloco.fragments.layers_per_fragment": 1,
    "training.batch_size": 3,
    "checkpoint.at_end": "true",
}


def program_of_page() -> str:
    """Return the program of the page that adds a model."""
    (program,) = re.findall(r"^```python\n([^`]*^FLAVORS\[.*?)^```", PAGE, re.M | re.S)
    return str(program)


def add_model(path: Path) -> None:
    """Run a file that adds a model, as a module."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)


@pytest.fixture
def means(tmp_path: Path) -> Iterator[Path]:
    """Add the model of the page, and return its file."""
    path = tmp_path / f"{NAME}.py"
    path.write_text(program_of_page())
    add_model(path)
    yield path
    del FLAVORS[NAME], sys.modules[NAME]


def run_means(path: Path, chosen: dict[str, str]) -> str:
    add_model(path)
    try:
        return run(chosen)
    finally:
        del FLAVORS[NAME], sys.modules[NAME]


def test_the_command_of_the_page_trains_it(text: Path, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").write_text(program_of_page())
    (command,) = re.findall(rf"^\.venv/bin/torchrun (.* {NAME}\.py .*)$", PAGE, re.M)
    small = settings(text, **STREAMING)
    del small["diloco.workers"], small["diloco.method"], small["model.flavor"]
    output = run_torchrun([*TORCHRUN, *command.split()], small, tmp_path)
    losses = curve(records(Path(small["run.folder"])), "loss/val")
    assert losses[-1] < losses[0]
    (control,) = re.findall(r"to compare with data parallelism, run +(.*)", output)
    few = {"run.folder": "control", "training.steps": "2"}
    run_torchrun(shlex.split(control), few, tmp_path)


def run_torchrun(command: list[str], chosen: dict[str, str], folder: Path) -> str:
    """Train the model of the page with a command and settings, and return the output."""
    assert command[:3] == TORCHRUN
    given = [*command[3:], *words(chosen)]
    with Program(folder / "console.txt", given, main=TORCHRUN[2], folder=folder) as program:
        output = program.end()
    assert f"{NAME}, Means, vocabulary 320" in output
    return output


def test_it_trains_in_shards_and_its_checkpoint_is_used(
    means: Path, text: Path, processes: ProcessPool, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = settings(text, activation_checkpoint__mode="full", **STREAMING)
    folder = Path(processes.run(run_means, 4, means, chosen)[0])
    losses = curve(records(folder), "loss/val")
    assert losses[-1] < losses[0]

    saved = open_saved(folder)
    assert type(saved.model).__name__ == "Means"
    assert validation_of(saved).loss == pytest.approx(losses[-1], abs=1e-4)
    assert commands.main(["generate", str(folder), "--tokens", "3", "--device", "cpu"]) == 0
    assert commands.main(["export", str(folder), "--out", str(means.parent / "base")]) == 0
    again = build_model(saved.config.model, 320, 32).to_empty(device="cpu")
    load_initial_weights(again, str(means.parent / "base"), saved.tokenizer)
    for name, value in saved.model.state_dict().items():
        assert torch.equal(again.get_parameter(name), value), name
    for name in ("hf", "torchtitan"):
        capsys.readouterr()
        assert commands.main(["export", str(folder), "--format", name]) == 2
        assert "Means is not the decoder that other programs know" in capsys.readouterr().err
    load = Workload.of(load_config("debug", chosen), vocabulary=320)
    assert len(load.fragments(Fragments(layers_per_fragment=1))) == 3


def test_what_it_does_not_have_is_refused_or_has_a_default(means: Path) -> None:
    model = build_model(Model(flavor=means.stem), 320, 32)
    counts = parameter_counts(model)
    assert counts == {"total": 320 * 96 + 4 * 97 * 96, "embedding": 320 * 96}
    assert flops_per_token(model, 32) == 6 * counts["total"]
    assert describe(model) == "Means"
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
    message = r"document_mask = true: Means does not read end_of_document, .* set it to false"
    with pytest.raises(UserError, match=message):
        build_model(Model(flavor=means.stem, document_mask=True), 320, 32)


class WithoutBlocks(nn.Module):
    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList()


class WithBuffer(nn.Module):
    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.register_buffer("angles", Tensor())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WithoutBlocks, r"WithoutBlocks has no `blocks`: put its layers in an nn\.ModuleList"),
        (WithBuffer, r"WithBuffer has a buffer, angles: compute it in `forward`"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    kind: type[nn.Module], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FLAVORS, "wrong", kind)
    with pytest.raises(UserError, match=message):
        build_model(Model(flavor="wrong"), 320, 32)
