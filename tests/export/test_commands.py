"""The commands export and generate on checkpoints of real runs."""

import os
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.components.test_resume import FP32, assert_same, checkpoint, chosen, run, tensors
from tests.conftest import REPOSITORY, save_tokenizer, write_text
from tests.export.reading import read_weights, validation_of
from tests.processes import ProcessPool
from tests.test_trainer import VALIDATION, curve, records
from torchtitan_diloco.components.copies import Copies
from torchtitan_diloco.config import load_config
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.diloco.state_dict import shared_parameter_name
from torchtitan_diloco.export import __main__ as commands
from torchtitan_diloco.export.weights import load_initial_weights, open_saved
from torchtitan_diloco.islands.config import Islands
from torchtitan_diloco.models import build_model
from torchtitan_diloco.store import open_store

COMMANDS = "generate", "export"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def trained(corpus: Path, processes: ProcessPool) -> Path:
    """Return a run of two workers, each sharded over two processes, with saves every 4 steps."""
    file = save_tokenizer(corpus.parent / "own.json", 260)
    changes = FP32 | {"data.tokenizer": file, "validation.every": 8, "optimizer.lr": 0.02}
    return Path(processes.run(run, 4, chosen(corpus, "run", **changes))[0])


def shared_parameters(folder: Path, step: int) -> dict[str, torch.Tensor]:
    prefix = shared_parameter_name("")
    found = tensors(checkpoint(folder, step)).items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}


def printed(capsys: Capture, *words: object) -> str:
    """Run a command, not on a GPU, and return all that it prints."""
    device = [] if words[0] == "export" else ["--device", "cpu"]
    assert commands.main([*map(str, words), *device]) == 0
    return "".join(capsys.readouterr())


# --- weights --------------------------------------------------------------------------------------


def test_export_writes_the_shared_parameters(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    base = trained / "export" / "step-00000016-safetensors"
    expected = shared_parameters(trained, 16)
    assert str(base) in printed(capsys, "export", trained)
    assert_same(read_weights(base), expected)
    config = load_config(str(base / "config.toml"))
    assert (config.run.folder, config.data.tokenizer) == ("", str(base / "tokenizer.json"))
    modes = {path.name: path.stat().st_mode & 0o777 for path in base.iterdir()}
    assert set(modes.values()) == {base.stat().st_mode & 0o666}, "the user's umask"

    half = tmp_path / "half"
    path = checkpoint(trained, 16, worker=1)
    printed(capsys, "export", path, "--dtype", "bfloat16", "--out", half)
    assert_same(read_weights(half), {name: one.bfloat16() for name, one in expected.items()})
    model = build_model(config.model, 320, config.training.sequence_length).to_empty(device="cpu")
    load_initial_weights(model, str(base), build_tokenizer(config.data.tokenizer))
    assert_same(model.state_dict(), expected)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (
            {"heads": 1, "kv_heads": 1, "rotary_base": 9.0},
            r"--model.heads \d+ --model.kv_heads \d+",
        ),
        ({"feed_forward": 24}, "--model.feed_forward 48"),
    ],
)
def test_an_export_starts_no_other_model_or_tokenizer(
    trained: Path,
    tmp_path: Path,
    capsys: Capture,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    remedy: str,
) -> None:
    """Also if all its tensors fit, and whatever else its settings have."""
    base = tmp_path / "base"
    printed(capsys, "export", trained, "--out", base)
    config = load_config(str(base / "config.toml"))
    tokenizer = build_tokenizer(config.data.tokenizer)
    other = build_model(replace(config.model, **changes), 320, config.training.sequence_length)
    with pytest.raises(ValueError, match=f"is of another model: for it, set {remedy}$"):
        load_initial_weights(other, str(base), tokenizer)
    model = build_model(config.model, 320, config.training.sequence_length).to_empty(device="cpu")
    with pytest.raises(
        ValueError, match=r'has another tokenizer than data.tokenizer = "bytes": set --data'
    ):
        load_initial_weights(model, str(base), build_tokenizer("bytes"))
    longer: dict[str, Any] = {"rotary_base": 500.0, "norm_epsilon": 0.1}
    longer_model = build_model(replace(config.model, **longer), 320, 64).to_empty(device="cpu")
    load_initial_weights(longer_model, str(base), tokenizer)
    said = [line for line in caplog.messages if "was trained with" in line][-1]
    assert "with model.rotary_base = 10000.0, model.norm_epsilon = 1e-06, and" in said
    settings = base / "config.toml"
    for text in (
        settings.read_text().replace("[data]", "[data]\nunknown = 1"),
        "[model]\nflavor = 3",
        "no TOML",
    ):
        settings.write_text(text)
        load_initial_weights(model, str(base), tokenizer)
    settings.unlink()
    load_initial_weights(model, str(base), tokenizer)


def test_settings_of_an_export_start_a_job_though_it_is_of_an_island(
    trained: Path, tmp_path: Path
) -> None:
    saved = open_saved(trained)
    islands = replace(saved.config.islands, name="a", begin=2, sync=True)
    commands.save_for_another_run(
        tmp_path, replace(saved, config=replace(saved.config, islands=islands)), torch.float32
    )
    assert load_config(str(tmp_path / "config.toml")).islands == Islands()


def test_the_shared_parameters_are_those_of_any_worker(trained: Path, corpus: Path) -> None:
    """With data parallelism, they are the model."""
    changes = {"diloco.method": "none", "training.stop_after": 2}
    parallel = Path(run(chosen(corpus, "parallel", **changes)))
    for folder, step, kind in ((trained, 8, "outer"), (parallel, 2, "model")):
        saved = tensors(checkpoint(folder, step))
        islands = folder.parent / f"islands-{kind}"
        shutil.copytree(folder, islands / "island-1")
        for workers in (folder, *folder.glob("worker-*"), islands):
            for name, value in open_saved(workers, step).model.state_dict().items():
                assert torch.equal(value, saved[f"{kind}/{name}"])


# --- the loss and the text ------------------------------------------------------------------------


def test_the_loss_of_a_checkpoint_is_the_one_that_the_run_printed(trained: Path) -> None:
    """Fragments are in flight in the checkpoints of steps 8 and 16."""
    losses = curve(records(trained), VALIDATION)
    assert len(set(losses)) == 2
    for step, expected in zip((8, 16), losses, strict=True):
        assert validation_of(open_saved(trained, step)).loss == pytest.approx(expected, abs=1e-4)


def test_the_loss_of_a_mixture_is_the_mean_that_the_run_printed(
    corpus: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    texts = []
    for name, content in {
        "words": corpus.read_text()[:60_000],
        "digits": "0123456789 " * 3000,
    }.items():
        for number in range(4):  # a document is the least that is held out
            path = tmp_path / f"{name}-{number}.txt"
            path.write_text(content[number * 9 :])
        texts.append(str(tmp_path / f"{name}-*.txt"))
    weights = {"data.corpus": "", "data.mixture": f"{texts[0]}=3 {texts[1]}=1"}
    changes = FP32 | weights | {"data.validation_fraction": 0.25, "validation.sequences": 16}
    (folder, _) = processes.run(run, 2, chosen(corpus, tmp_path / "mixed", **changes))
    expected = curve(records(Path(folder)), VALIDATION)[-1]
    result = validation_of(open_saved(Path(folder)))
    words, digits = (result.of_corpora[text].loss for text in texts)
    assert result.loss == pytest.approx(expected, abs=1e-4)
    assert result.loss == pytest.approx(0.75 * words + 0.25 * digits)
    assert abs(words - digits) > 0.1


def test_the_seed_sets_the_text(trained: Path, capsys: Capture) -> None:
    words = "generate", trained, "--tokens", 20, "--prompt", "the sto"
    first, again, other = (printed(capsys, *words, "--seed", seed) for seed in (0, 0, 1))
    assert first.startswith("the sto")
    assert first == again != other


def test_prompts_are_continued_as_each_alone(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("the\n\n \nwith a longer beginning\na\n")
    greedy = "generate", trained, "--tokens", 12, "--temperature", 0
    alone = []
    for prompt in ("the sto", "the", "with a longer beginning", "a"):
        commands.main([*map(str, greedy), "--device", "cpu", "--prompt", prompt])
        alone.append(capsys.readouterr().out)
    expected = [f"==> {number} of 4 <==\n{text}" for number, text in enumerate(alone, start=1)]
    for size in (8, 3):
        together = *greedy, "--prompt", "the sto", "--prompt-file", lines, "--batch-size", size
        assert printed(capsys, *together).startswith("".join(expected))


def test_the_evaluation_harness_measures_the_same(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of docs/data-and-models.md. The harness counts no end of the document."""
    if find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed (pip install '.[examples]')")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    assert "--include_path examples --tasks own_text" in (
        (REPOSITORY / "docs/data-and-models.md").read_text()
    )
    monkeypatch.chdir(REPOSITORY)
    printed(capsys, "export", trained, "--format", "hf", "--out", tmp_path / "hf")
    results = simple_evaluate(
        model="hf",
        model_args=f"pretrained={tmp_path}/hf,dtype=float32",
        tasks=["own_text"],
        task_manager=TaskManager(include_path="examples"),
        batch_size=1,
        device="cpu",
    )
    saved = open_saved(trained)
    data = replace(saved.config.data, validation_corpus="README.md")
    validation = replace(saved.config.validation, sequences=999)
    config = replace(saved.config, data=data, validation=validation)
    ours = validation_of(replace(saved, config=config))
    assert results["results"]["own_text"]["bits_per_byte,none"] == pytest.approx(
        ours.bits_per_byte, rel=0.02
    )


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("export", "nowhere", r"/nowhere: it does not exist; give the folder of a run, such as"),
        ("generate", "full", r"there is no run in .*/full: it has no worker-0, and no manifest"),
        ("generate", "full/file", r"there is no run in .*/full/file: it is a file; give the"),
        ("generate", "outputs", r"outputs has 3 runs in it: name one, such as outputs/last$"),
        ("generate", "empty", r"empty has no complete checkpoint yet: wait for its first save, or"),
        (
            "generate",
            "mirror",
            r"mirror is a checkpoint\.mirror, .* give the run\.folder of its run",
        ),
        ("generate", "run --step 7", r"--step 7: .*run has no checkpoint .* it has 4, 8, 12, 16"),
        ("export", "run/worker-0/step-00000008 --step 16", r"--step 16: .* step; it has 8"),
        ("generate", "run --temperature nan", r"--temperature nan: give"),
        ("generate", f"run --seed {2**63}", r"--seed \d+: give a whole number from 0 to 2\^63"),
        (
            "generate",
            f"run --prompt {'zx' * 40}",
            r'--prompt "(zx){20}" has 80 tokens, more than training.sequence_length = 32: shorten',
        ),
        (
            "generate",
            "run --prompt-file long",
            r"--prompt-file long, line 2 has 33 tokens, more than training.sequence_length = 32: s",
        ),
        (
            "generate",
            "run --prompt-file full/file",
            r"--prompt-file full/file has no prompt: write one on each line",
        ),
        (
            "generate",
            "run --prompt-file full",
            r"--prompt-file full cannot be read \(Is a directory\): give a text file",
        ),
        (
            "generate",
            "run --prompt-file latin",
            r"--prompt-file latin cannot be read \(it is not UTF-8\): give a text file",
        ),
        ("export", "run --out full", r"full is not empty; choose another folder"),
        ("export", "run --out full --format hf", r"full is not empty; choose another folder"),
        ("export", "run --out full/file/out", r"cannot be written"),
    ],
)
def test_a_mistake_is_one_line(
    trained: Path,
    tmp_path: Path,
    command: str,
    arguments: str,
    message: str,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty/worker-0", "full"):
        Path(name).mkdir(parents=True)
    Path("full/file").touch()
    Path("long").write_text(f"a\n{'z' * 33}\n")
    Path("latin").write_bytes(b"caf\xe9")
    copies = Copies(open_store("mirror"))
    copies.take_over("this start")
    copies.save(checkpoint(trained, 8), 0, "this start")
    Path("run").symlink_to(trained)
    for time, name in enumerate(("of-islands/island-1", "last", "first")):
        shutil.copytree(trained / "worker-0", Path("outputs", name, "worker-0"))
        os.utime(Path("outputs", Path(name).parts[0]), times=(time % 2, time % 2))
    assert commands.main([command, *arguments.split()]) == 2
    output = capsys.readouterr()
    assert re.match(rf"error: .*{message}", output.err)
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert [path.name for path in Path("full").iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [([], "a command is missing"), (["outputs/run"], "outputs/run is no")],
)
def test_the_module_needs_a_command(words: list[str], problem: str, capsys: Capture) -> None:
    assert commands.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {problem}")
    assert error.endswith(": begin with one of generate, export\n")


def test_a_damaged_file_or_another_tokenizer_is_named(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "run"
    own = trained.parent / "own.json"
    before = own.read_bytes()
    shutil.copytree(trained / "worker-0", folder / "worker-0")
    file = checkpoint(folder, 16) / "rank-0.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    for command in COMMANDS:
        assert commands.main([command, str(folder)]) == 2
        expected = r"error: .*step-00000016/rank-0.safetensors has different content.* --step"
        assert re.match(expected, capsys.readouterr().err)
    printed(capsys, "generate", folder, "--step", 12, "--tokens", 1)
    try:
        save_tokenizer(own, 259)
        for command in COMMANDS:
            assert commands.main([command, str(folder), "--step", "12"]) == 2
            expected = r"trained with another tokenizer than data.tokenizer = .*own.json"
            assert re.search(expected, capsys.readouterr().err)
    finally:
        own.write_bytes(before)
    assert not (folder / "export").exists()
