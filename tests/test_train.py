"""Test that all a run needs is listed before it starts, and how its processes start and end."""

import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import torchtitan_diloco.trainer
from tests.processes import DIED, ProcessPool
from tests.test_trainer import settings, words
from torchtitan_diloco.base.formatting import clock, few_digits
from torchtitan_diloco.base.hardware import GIB, GLOO_INTERFACE
from torchtitan_diloco.base.user import FENCED, LOCAL_ISLANDS, WORKER_LOST, UserError
from torchtitan_diloco.components import run_plan
from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.run_plan import (
    check_memory,
    log_early_end,
    plan_run,
)
from torchtitan_diloco.config import Config, load_config
from torchtitan_diloco.config.parts import OPTIMIZERS
from torchtitan_diloco.config.schema import Checkpoint, Compile, Training
from torchtitan_diloco.data.tokenizer import main as train_tokenizer
from torchtitan_diloco.diloco.config import DiLoCoConfig, OuterOptimizer, Overlap
from torchtitan_diloco.distributed.collectives import RanksLostError
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.islands import IslandFencedError
from torchtitan_diloco.launching.launch import folder_of_run
from torchtitan_diloco.launching.launch import main as launch
from torchtitan_diloco.launching.preflight import check_inputs, missing
from torchtitan_diloco.launching.rank import join
from torchtitan_diloco.train import main
from torchtitan_diloco.trainer import Trainer


def test_an_island_whose_slot_is_taken_has_an_exit_code_of_its_own(text: Path) -> None:
    with patch.object(Trainer, "run", side_effect=IslandFencedError("its slot was taken")):
        assert main(words(settings(text))) == FENCED


def test_an_error_of_the_program_keeps_its_traceback(text: Path) -> None:
    with (
        patch.object(torchtitan_diloco.trainer, "find_start", lambda *_, **__: clock(math.nan)),
        pytest.raises(ValueError, match="cannot convert float NaN") as caught,
    ):
        main(words(settings(text)))
    assert caught.traceback[-1].name == "clock"


def test_the_id_of_torchrun_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("debug")
    own = load_config("debug", {"run.folder": "runs/a"})
    alone = [folder_of_run(config) for _ in range(2)]  # a process without torchrun
    assert len(set(alone)) == 2
    monkeypatch.setenv("RANK", "0")
    for run_id in ("none", ""):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        assert folder_of_run(own) == "runs/a"
        with pytest.raises(ValueError, match=r"give --run\.folder FOLDER, or .* --rdzv-id ID"):
            folder_of_run(config)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert folder_of_run(config) == "outputs/debug-job-7"


def _join_alone() -> str:
    if os.environ["RANK"] == "1":
        return "never came"
    wanted = {"diloco.workers": "2", "distributed.init_timeout_seconds": "1"}
    with pytest.raises(RanksLostError) as lost:
        join(load_config("debug", {**wanted, "run.device": "cpu"}))
    return str(lost.value)


def test_a_process_that_others_do_not_reach_says_over_which_interface(
    processes: ProcessPool,
) -> None:
    reason, _ = processes.run(_join_alone, 2)
    assert "could not connect to all other processes over the lo" in reason
    assert "distributed.init_timeout_seconds = 1): " in reason


def _exit_code_beside_a_loss(chosen: dict[str, str], where: str) -> int:
    """Return the exit code of a rank if the other one is killed where it calls a function."""
    dies = os.environ["RANK"] == "1"
    with patch(where, lambda *_, **__: os._exit(9)) if dies else nullcontext():
        return main(words(chosen))


@pytest.mark.parametrize("where", ["Trainer._agree", "claim_run_folder"])
def test_a_rank_that_is_lost_at_the_start_is_named_by_the_others(
    text: Path, processes: ProcessPool, where: str
) -> None:
    """Such as one that the system kills for its memory: they are not taken for the cause."""
    chosen = settings(text, diloco__workers=2)
    place = f"torchtitan_diloco.trainer.{where}"
    codes = processes.run(_exit_code_beside_a_loss, 2, chosen, place, dying={1})
    assert codes == [WORKER_LOST, DIED]


def _end_after_a_late_signal(chosen: dict[str, str]) -> list[int]:
    """Return the codes with which a rank ends its launcher, if the other one gets a signal after
    the last step."""
    finish = Checkpointer.finish
    ends = list[int]()

    def interrupted(checkpointer: Checkpointer, seconds_left: Callable[[], float]) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)
        finish(checkpointer, seconds_left)

    with (
        patch.object(Checkpointer, "finish", interrupted),
        patch("torchtitan_diloco.launching.rank.end_run", ends.append),
        patch.dict(os.environ, LOCAL_RANK="0"),  # as on nodes of their own
    ):
        assert main(words(chosen)) == 0
    return ends


def test_a_signal_after_the_last_step_is_known_on_all_nodes(
    text: Path, processes: ProcessPool
) -> None:
    """The launcher of the node that got it does not come to the barrier at the end."""
    chosen = settings(text, diloco__workers=2)
    assert processes.run(_end_after_a_late_signal, 2, chosen) == [[0], []]


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [("return 0", 0, ""), ("return 3", 3, ""), ("raise OSError('odd')", 1, "OSError: odd\n")],
)
def test_a_process_ends_without_clean_up(body: str, code: int, said: str) -> None:
    """Exit handlers would tell the other ranks that a rank which fails has ended in order."""
    program = (
        "import atexit\nfrom torchtitan_diloco.base.process import run_and_exit\n"
        f"atexit.register(print, 'goodbye')\ndef main(_):\n    print('kept')\n    {body}\n"
        "run_and_exit(main, [])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, "kept\n"), "what was printed is not lost"
    assert done.stderr.endswith(said)


# --- what a run needs -----------------------------------------------------------------------------


def test_all_that_is_missing_is_listed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        patch("torchtitan_diloco.launching.preflight.find_spec", return_value=None),
        patch("shutil.which", return_value=None),
        patch("sys.executable", str(tmp_path / "python")),
        patch("torch.cuda.is_available", return_value=False),
        patch("subprocess.Popen", side_effect=AssertionError("a process was started")),
    ):
        words = (
            "--config 1b --metrics.boards wandb:x mlflow:y --islands.local 2 --run.device cuda "
            "--checkpoint.mirror ftp://name:password@host/run"
        )
        assert launch(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 8 things to do before this run can start:")
    assert '\n  run.device = "cuda", but torch sees no GPU here: use "auto" or "cpu"' in error
    extras = re.findall(r"install ([\w-]+): .*\[(\w+)\]'", error)
    assert extras == [("wandb", "wandb"), ("mlflow", "mlflow"), ("datasets", "c4")]
    assert (
        "\n  checkpoint.mirror: ftp://host/run: there is no such kind of store; give a folder"
        in error
    )
    assert "password" not in error
    assert "\n  metrics.boards: mlflow:y: set MLFLOW_TRACKING_URI to the address of the" in error
    source = "--source hf:allenai/c4/en:train"
    assert f"tokenizer {source} --vocab-size 32000 --out data/c4-32k.json" in error
    assert re.search(rf"prepare {source} .* --max-tokens 25\d{{9}}\n", error), "20 a parameter"
    changed = load_config("1b", {"data.tokenizer": "new.json"})
    replaced = [line.replace("new.json", "data/c4-32k.json") for line in missing(changed)]
    assert replaced == [*missing(load_config("1b"))], "of the size that is trained by default"
    with patch("torchtitan_diloco.launching.preflight.find_spec", return_value=None):
        own = {"data.corpus": "stdlib", "data.tokenizer": "bytes"}
        assert not [*missing(load_config("35m", own))], "nothing is read from the hub"
    assert launch(["--config", "llama-8b", "--print-config"]) == 2
    download = "hf download meta-llama/Llama-3.1-8B --local-dir data/Llama-3.1-8B"
    error = capsys.readouterr().err
    assert download in error
    assert "data.tokenizer" not in error, "it comes with the weights"
    assert re.search(r"prepare .* --begin-token", error)


def test_a_corpus_of_a_mixture_that_is_not_there_is_named() -> None:
    config = debug(data__mixture="stdlib=1 nothere=2")
    with pytest.raises(UserError, match=r'data\.mixture: the corpus "nothere" does not exist: '):
        check_inputs(config)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1234.56, "1,234.6"), (1.0, "1.0"), (0.9, "0.9"), (0.04321, "0.043"), (0.0, "0")],
)
def test_small_values_keep_their_digits(value: float, shown: str) -> None:
    assert few_digits(value, 1) == shown


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    check_inputs(debug(run__folder=str(tmp_path / "new/run")))
    (file := tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf'run.folder = "{file}/run": {file} is not a writable'):
        check_inputs(debug(run__folder=f"{file}/run"))


def test_what_is_missing_hides_no_mistake_of_the_model() -> None:
    words = {"diloco__link__interface": "eth9", "model__kv_heads": "2"}
    with pytest.raises(UserError, match=r"(?s)^2 things .*eth9.*kv_heads = 2 does not divide"):
        check_inputs(debug(**words))
    words |= {"data__tokenizer": "nothere.json"}  # which is read to build the model
    with pytest.raises(UserError, match=r"(?s)^2 things .*eth9.*nothere.json"):
        check_inputs(debug(**words))


def test_interfaces_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [name for _, name in socket.if_nameindex()]
    remedy = f"choose one of {', '.join(there)}, or remove"
    with pytest.raises(UserError, match=rf'link.interface = "eth9": eth9 is not a .*: {remedy}'):
        check_inputs(debug(diloco__link__interface="eth9"))
    monkeypatch.setenv(GLOO_INTERFACE, f"{there[0]},eth9")
    with pytest.raises(
        UserError, match=rf"{GLOO_INTERFACE}=.*: eth9 is not a network .*: {remedy}"
    ):
        check_inputs(debug())
    monkeypatch.setenv(GLOO_INTERFACE, f"{there[0]},{there[0]}")
    check_inputs(debug())


def test_a_join_file_that_is_not_there() -> None:
    no_file = r"islands\.join: no\.toml: there is no such join file; copy it to this machine"
    with pytest.raises(UserError, match=no_file):
        check_inputs(debug(islands__join="no.toml", islands__name="a"))


def debug(**changed: str) -> Config:
    return load_config("debug", {key.replace("__", "."): one for key, one in changed.items()})


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    weights = tmp_path / "weights"
    words = f"--source README.md --vocab-size 400 --pieces 9 --out {own}"
    train_tokenizer(words.split())
    check_inputs(debug(data__tokenizer=str(own)))
    with pytest.raises(UserError, match=r"model\.vocab_size = 300 is below the .* of 400"):
        check_inputs(debug(data__tokenizer=str(own), model__vocab_size="300"))
    weights.mkdir()
    given: dict[str, Any] = {"model__weights": str(weights)}
    with pytest.raises(UserError, match=r"the folder has no model\*.safetensors"):
        check_inputs(debug(**given))
    (weights / "model.safetensors").touch()
    names = "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"
    config = dict.fromkeys(names, 8) | {"model_type": "llama", "vocab_size": 320}
    (weights / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"is of another model: for it, set .*--model\.layers 8"):
        check_inputs(debug(**given))
    (tmp_path / "run/worker-0/step-00000001").mkdir(parents=True)
    check_inputs(debug(**given, run__folder=f"{tmp_path}/run"))  # goes on from its checkpoints


ALONE = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
NONE = DiLoCoConfig(method="none")
WITHOUT_MOMENTUM = DiLoCoConfig(outer_optimizer=OuterOptimizer("sgd"))


WAITING = DiLoCoConfig(overlap=Overlap(delay=0))
NO_SAVES = Checkpoint(every_minutes=0, at_end=False)
STATE = "parameters, gradients and optimizer"
COMES_ON_TOP = "activations come on top"


@pytest.mark.parametrize(
    ("ranks", "optimizer", "diloco", "checkpoint", "needed", "parts"),
    [
        (1, "adamw", NONE, NO_SAVES, 16, f"(16.0 {STATE}; {COMES_ON_TOP})"),
        (2, "adamw", NONE, Checkpoint(), 44, f"(32.0 {STATE} + 12.0 copies of a save; "),
        (2, "adamw", DiLoCoConfig(), NO_SAVES, 56, f"(32.0 {STATE} + 24.0 outer state; "),
        (2, "adamw", DiLoCoConfig(), Checkpoint(), 104, " + 24.0 outer state + 48.0 copies of a "),
        (1, "adamw", WAITING, Checkpoint(), 48, " + 12.0 outer state + 20.0 copies of a save; "),
        (1, "muon", WITHOUT_MOMENTUM, Checkpoint(), 38, "(13.0 parameters, "),
    ],
)
def test_what_does_not_fit_into_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    optimizer: str,
    diloco: DiLoCoConfig,
    checkpoint: Checkpoint,
    needed: int,
    parts: str,
) -> None:
    """A quarter of the parameters are embeddings, which are AdamW's with either optimizer."""
    plan = plan_run(Training(steps=10), 1, GIB, GIB // 4, optimizer=OPTIMIZERS[optimizer])
    config = replace(Config(), diloco=diloco, checkpoint=checkpoint)
    check = partial(check_memory, plan, ALONE, config)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(run_plan, "available_memory_bytes", lambda: needed * GIB)
    check()
    monkeypatch.setattr(run_plan, "available_memory_bytes", lambda: needed * GIB - 1)
    with pytest.raises(ValueError, match=rf"need {needed}.0 GiB on .*--config 35m") as refused:
        check()
    assert parts in str(refused.value)


def test_a_batch_whose_activations_do_not_fit_is_named_before_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks with 1 GiB of state each, and 8 GiB of activations for 64 sequences."""
    caplog.set_level(logging.WARNING)
    config = replace(debug(training__batch_size="64"), diloco=NONE, checkpoint=NO_SAVES)
    plan = plan_run(
        Training(steps=10),
        ranks=1,
        parameters=GIB // 16,
        embedding_parameters=0,
        optimizer=OPTIMIZERS["adamw"],
        activation_bytes=8 * GIB,
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def check(available: int, config: Config = config) -> None:
        monkeypatch.setattr(run_plan, "available_memory_bytes", lambda: available)
        check_memory(plan, ALONE, config)

    check(18 * GIB)
    assert caplog.messages == []
    check(18 * GIB - 1)
    (warning,) = caplog.messages
    assert warning.startswith("training.batch_size = 64: the activations of 2 ranks need about 16.")
    assert 'lower it to 63, or set activation_checkpoint.mode = "full"' in warning
    with pytest.raises(UserError, match=r"6\.0 GiB are available: lower it to 16, or set"):
        check(6 * GIB)
    with pytest.raises(UserError, match=r"lower training.sequence_length and it, or set"):
        check(2 * GIB)
    check(2 * GIB, replace(config, compile=Compile(enable=True)))
    assert len(caplog.messages) == 2, "compiled blocks keep less"


def test_an_island_that_stops_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `islands.local` by the folder of all islands, not by its own."""
    caplog.set_level(logging.INFO)
    log_early_end(Config(), Path("runs/island-1"), 4, "left after {}".format)
    monkeypatch.setenv(LOCAL_ISLANDS, "all runs")
    log_early_end(Config(), Path("runs/island-1"), 4, "left after {}".format)
    resumes = "left after a signal; the same command with --run.folder {} resumes it"
    assert caplog.messages == [resumes.format(one) for one in ("runs/island-1", "'all runs'")]
