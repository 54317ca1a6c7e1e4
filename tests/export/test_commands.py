"""The commands on what a run has saved: export, generate and validate, on real runs."""

import json
import random
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from tests.conftest import WORDS
from tests.processes import ProcessPool
from tests.test_checkpoint import chosen, flip, last, run, tensors, truncate
from tests.test_trainer import curve, join, records
from torchtitan_diloco import generate, validate
from torchtitan_diloco.components.checkpoint_folder import fingerprint, read_manifest
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.loader import config_from_text
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.data.tokenizer import build_tokenizer, format_ranks
from torchtitan_diloco.export import __main__ as export
from torchtitan_diloco.export.dense import load_safetensors
from torchtitan_diloco.saved_model import open_saved
from torchtitan_diloco.trainer import Trainer

VALIDATION = "validation/loss_nats_per_token_global"
STREAMING = {
    "diloco.method": "streaming",
    "diloco.sync_every": 6,
    "diloco.overlap.delay": 3,
    "checkpoint.every": 8,
}
COMMANDS = {"export": export.main, "generate": generate.main, "validate": validate.main}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("runs") / "text.txt"
    path.write_text("\n".join(" ".join(rng.choices(WORDS, k=12)) + "." for _ in range(3000)))
    return path


@pytest.fixture(scope="module")
def trained(words: Path) -> Path:
    """A run of one process, with an outer loop and checkpoints and validations after steps 8, 16 and 24."""
    return Path(run(chosen(words, "run", **STREAMING)))


@pytest.fixture(scope="module")
def sharded(words: Path, processes: ProcessPool) -> Path:
    """A run of one worker, sharded over two processes."""
    wanted = chosen(words, "sharded", **STREAMING, data__tokenizer=ranks_file(words.parent))
    return Path(processes.run(run, 2, wanted)[0])


@pytest.fixture(scope="module")
def two_workers(words: Path, processes: ProcessPool) -> Path:
    return Path(processes.run(run, 2, chosen(words, "workers", **STREAMING, diloco__workers=2))[0])


def ranks_file(folder: Path) -> Path:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"st": 256, b"ing": 257, b"si": 258}
    (folder / "own.tiktoken").write_bytes(format_ranks(ranks))
    return folder / "own.tiktoken"


def outer(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = tensors(checkpoint).items()
    return {
        name.removeprefix("shared/outer/"): value
        for name, value in found
        if name.startswith("shared/outer/")
    }


def loss_told(text: str) -> float:
    found = re.search(r"loss (\d+\.\d+), perplexity", text)
    assert found is not None, text
    return float(found[1])


# --- export ----------------------------------------------------------------------------------------------------------


def test_the_exported_weights_are_the_outer_parameters_bit_for_bit(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(sharded)]) == 0
    folder = sharded / "export" / "step-00000024-safetensors"
    assert str(folder) in capsys.readouterr().out
    exported, expected = load_safetensors(folder), outer(last(sharded))
    assert exported.keys() == expected.keys()
    for name, value in exported.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name]), name

    config = load_config(str(folder / "config.toml"))
    assert config.run.folder == ""
    assert config.data.tokenizer == str(folder / "tokenizer.tiktoken")
    info = json.loads((folder / "tokenizer-info.json").read_text())
    assert info["fingerprint"] == build_tokenizer(config.data.tokenizer).fingerprint
    assert (info["file"], info["vocab_size"]) == ("tokenizer.tiktoken", 260)

    out = tmp_path / "half"
    assert export.main([str(last(sharded)), "--dtype", "bfloat16", "--out", str(out)]) == 0
    for name, value in load_safetensors(out).items():
        assert torch.equal(value, expected[name].bfloat16()), name


def test_another_run_starts_from_an_export(sharded: Path, tmp_path: Path) -> None:
    assert export.main([str(sharded), "--out", str(tmp_path / "base")]) == 0
    changes = {
        "model.weights": str(tmp_path / "base"),
        "run.folder": str(tmp_path / "run"),
        "optimizer.lr": "1e-9",
    }
    config = load_config(str(tmp_path / "base" / "config.toml"), changes | {"training.steps": "8"})
    folder = Trainer(config, join(config)).run()
    before, after = curve(records(sharded), VALIDATION)[-1], curve(records(folder), VALIDATION)[-1]
    assert after == pytest.approx(before, abs=1e-3)
    assert export.main([str(folder)]) == 0
    again = load_config(str(folder / "export" / "step-00000008-safetensors" / "config.toml"))
    assert (again.model.weights, again.checkpoint.resume) == ("", "auto")


def test_the_workers_own_parameters(two_workers: Path) -> None:
    saved = tensors(two_workers / "checkpoints" / "step-00000016")
    found = []
    for worker in (0, 1):
        opened = open_saved(two_workers, 16, f"worker-{worker}")
        found.append(opened.tensors["embedding.weight"])
        assert all(
            torch.equal(value, saved[f"worker-{worker}/model/{name}"])
            for name, value in opened.tensors.items()
        )
    assert not torch.equal(*found)


def test_a_run_with_data_parallelism_has_one_set_of_parameters(words: Path) -> None:
    folder = Path(run(chosen(words, "parallel", checkpoint__every=0, training__steps=4)))
    opened, saved = open_saved(folder), tensors(last(folder))
    assert opened.weights == "shared"
    assert all(
        torch.equal(value, saved[f"worker-0/model/{name}"])
        for name, value in opened.tensors.items()
    )


def test_what_the_outer_loop_does_not_hold_is_taken_from_the_first_worker(
    trained: Path, tmp_path: Path
) -> None:
    path = tmp_path / "step-00000024"
    shutil.copytree(last(trained), path)
    shared = {f"outer/{name}": value for name, value in outer(path).items()}
    shared.pop("outer/norm.weight")
    shutil.rmtree(path / "shared")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            {name: value + 1 for name, value in shared.items()},
            checkpoint_id=path / "shared",
            no_dist=True,
        )
    manifest = read_manifest(path)
    files = {
        name: known for name, known in manifest.files.items() if not name.startswith("shared/")
    }
    files |= {f"shared/{file.name}": fingerprint(file) for file in (path / "shared").iterdir()}
    (path / "manifest.json").write_text(replace(manifest, files=files).to_json())
    found, own = open_saved(path).tensors, tensors(path)["worker-0/model/norm.weight"]
    assert torch.equal(found["norm.weight"], own)
    assert all(
        torch.equal(found[name.removeprefix("outer/")], value + 1) for name, value in shared.items()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_computes_what_the_shared_parameters_do(
    sharded: Path, tmp_path: Path, dtype: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = str(tmp_path / "hf")
    assert (
        export.main(
            [str(sharded), "--step", "16", "--format", "hf", "--dtype", dtype, "--out", out]
        )
        == 0
    )
    saved = open_saved(sharded, 16)
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, torch_dtype="auto")
    text = "the stone sings over the lake"
    tokens = saved.tokenizer.encode(text).tolist()
    assert AutoTokenizer.from_pretrained(out)(text)["input_ids"] == tokens
    ids = torch.tensor([tokens])
    with torch.no_grad():
        found, expected = model(ids).logits, saved.model.to(getattr(torch, dtype))(ids)
    bound = 1e-5 if dtype == "float32" else 1e-2
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def test_weights_are_not_written_over(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(trained), "--out", str(tmp_path / "out")]
    assert export.main(words) == 0
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    for format in ("safetensors", "hf"):
        assert export.main([*words, "--format", format]) == 2
        assert re.match(
            r"error: .*model.safetensors exists; choose another folder", capsys.readouterr().err
        )
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "file").write_text("")
    assert export.main([str(trained), "--out", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err


# --- validate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["trained", "sharded", "two_workers"])
def test_the_loss_is_the_one_that_the_run_printed(
    which: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the middle of the run, with fragments under way."""
    folder: Path = request.getfixturevalue(which)
    printed = curve(records(folder), VALIDATION)
    for step, expected in zip((8, 16, 24), printed, strict=True):
        assert validate.main([str(folder), "--step", str(step), "--device", "cpu"]) == 0
        told = capsys.readouterr()
        assert loss_told(told.out) == pytest.approx(expected, abs=1e-4)
        assert "224 tokens (7 sequences of 32)" in told.out
        assert f"step {step}, shared parameters" in told.err
    assert len(set(printed)) == 3


def test_other_text_other_batches_and_other_weights(
    two_workers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(*more: str) -> float:
        assert validate.main([str(two_workers), "--device", "cpu", "--step", "16", *more]) == 0
        return loss_told(capsys.readouterr().out)

    (tmp_path / "other.txt").write_text("0123456789 " * 200)
    usual = loss()
    assert loss("--batch-size", "3") == pytest.approx(usual, abs=1e-4)
    assert loss("--corpus", str(tmp_path / "other.txt")) > usual + 1
    assert loss("--sequences", "20") != usual
    assert loss("--weights", "worker-1") != usual


# --- generate --------------------------------------------------------------------------------------------------------


def test_text_is_written_and_repeatable(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*more: str) -> str:
        assert generate.main([str(trained), "--device", "cpu", "--tokens", "20", *more]) == 0
        told = capsys.readouterr()
        assert "checkpoints/step-00000024, step 24, shared parameters" in told.err
        return told.out

    first = text("--prompt", "the sto")
    assert first.startswith("the sto")
    assert first == text("--prompt", "the sto")
    assert first != text("--prompt", "the sto", "--seed", "1")
    assert text("--temperature", "0") == text("--top-k", "1", "--seed", "5")
    both = text("--prompt", "the sto", "--count", "2")
    assert both.startswith(f"--- 1 of 2, seed 0\n{first}--- 2 of 2, seed 1\nthe sto")


def test_characters_come_whole() -> None:
    tokenizer = build_tokenizer("bytes")
    tokens = tokenizer.encode("aé€🐦.").tolist()
    assert list(generate.as_text(tokenizer, tokens)) == ["a", "é", "€", "🐦", "."]
    assert list(generate.as_text(tokenizer, tokens[:2])) == ["a", "\N{REPLACEMENT CHARACTER}"]
    assert list(generate.as_text(tokenizer, [*tokens[1:2], ord("b"), 100_000])) == [
        "\ufffdb",
        "\ufffd",
    ]


# --- what can go wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["nowhere"], r"nowhere does not exist: name the folder of a run"),
        (
            ["empty"],
            r"empty has no complete checkpoint: name the folder of a run .* checkpoint.every",
        ),
        (
            ["run", "--step", "7"],
            r"--step 7: .*run has no checkpoint of that step; there are 8, 16, 24",
        ),
        (
            ["run/checkpoints/step-00000008", "--step", "16"],
            r"--step 16: .* is the checkpoint of step 8; leave --step out",
        ),
        (
            ["run", "--weights", "worker-1"],
            r"--weights worker-1: .*step-00000024 has no such .*; there are shared, worker-0",
        ),
        (["run", "--weights", "own"], r"--weights own: .*there are shared, worker-0"),
    ],
)
def test_a_wrong_input_is_told_in_a_line(
    trained: Path, command: str, wanted: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained.parent / "empty").mkdir(exist_ok=True)
    name, *more = wanted
    assert COMMANDS[command]([str(trained.parent / name), *more]) == 2
    told = capsys.readouterr()
    assert re.match(rf"error: .*{message}", told.err)
    assert (told.out, told.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("harm", "told"), [(truncate, "has .* bytes instead of"), (flip, "has other content")]
)
def test_a_damaged_file_is_named(
    trained: Path, tmp_path: Path, harm: Any, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    harm(last(tmp_path / "run") / "shared" / "__0_0.distcp")
    for main in COMMANDS.values():
        assert main([str(tmp_path / "run")]) == 2
        assert re.search(
            rf"error: .*step-00000024/shared/__0_0.distcp {told}.*--step 16 takes",
            capsys.readouterr().err,
        )
    assert not (tmp_path / "run" / "export").exists()
    assert generate.main([str(tmp_path / "run"), "--step", "16", "--tokens", "1"]) == 0
    assert generate.main([str(tmp_path / "run"), "--weights", "worker-0", "--tokens", "1"]) == 0


def test_another_tokenizer_in_its_place_is_told(
    sharded: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks, before = words.parent / "own.tiktoken", ranks_file(words.parent).read_bytes()
    told = last(sharded) / "manifest.json"
    as_saved = told.read_text()
    try:
        same_size = {bytes([byte]): byte for byte in range(256)} | {
            b"ts": 256,
            b"gni": 257,
            b"is": 258,
        }
        ranks.write_bytes(format_ranks(same_size))
        for name, main in COMMANDS.items():
            assert (
                main(
                    [
                        str(sharded),
                        *(["--out", str(words.parent / "never")] if name == "export" else []),
                    ]
                )
                == 2
            )
            assert re.search(
                r"trained with another tokenizer than data.tokenizer = .*own.tiktoken",
                capsys.readouterr().err,
            )
        with pytest.raises(ValueError, match="trained with another tokenizer"):
            run(chosen(words, "sharded", **STREAMING, data__tokenizer=ranks))
        more = {b"word%d" % number: 259 + number for number in range(80)}
        ranks.write_bytes(before + format_ranks(more))
        told.write_text(
            replace(read_manifest(told.parent), tokenizer="").to_json()
        )  # as in a checkpoint of before
        assert validate.main([str(sharded)]) == 2
        assert re.search(
            r"is of another model: embedding.weight is \(320, 32\) .*\(384, 32\).*Put back",
            capsys.readouterr().err,
        )
    finally:
        told.write_text(as_saved)
        ranks.write_bytes(before)


@pytest.mark.parametrize(("flag", "value"), [("--sequences", "0"), ("--batch-size", "-1")])
def test_validate_needs_something_to_read(
    trained: Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate.main([str(trained), flag, value]) == 2
    assert f"error: {flag} {value} is too few" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--tokens", "-1"), ("--temperature", "-1"), ("--top-p", "0"), ("--count", "0")],
)
def test_generate_refuses_what_it_cannot_do(
    trained: Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main([str(trained), flag, value]) == 2
    assert re.search(rf"error: .*{value}", capsys.readouterr().err)


# --- the saved configuration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["debug", "1b"])
def test_settings_as_text_are_the_config(name: str) -> None:
    changes = {
        "diloco.fragments.pattern": "explicit",
        "diloco.fragments.modules": '[["blocks.0", "embedding"], ["blocks.1"]]',
        "run.description": "None",
        "optimizer.lr": "1e-5",
    }
    config = load_config(name, changes)
    texts = {key: str(value) for key, value in flat_settings(config).items()}
    assert config_from_text(texts, "manifest.json") == config


def test_settings_that_cannot_be_read_are_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"manifest.json: model.lairs = .*a setting that this program does not have",
    ):
        config_from_text({"model.lairs": "2"}, "manifest.json")
    for text in ("two", "-3", "(", "1.5"):
        with pytest.raises(
            ValueError, match=r"manifest.json: model.layers = .*must be .*: is the file damaged"
        ):
            config_from_text({"model.layers": text}, "manifest.json")
