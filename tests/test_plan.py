"""torchtitan-diloco plan"""

import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, page_commands
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.loader import load_config, shipped_configs
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.plan import main
from torchtitan_diloco.planner.paper import paper_table

LINK = ["--bandwidth", "500Mbit", "--latency", "30ms"]
KNOWN = [*LINK, "--step-time", "0.3"]


def plan(*words: str) -> list[str]:
    return ["--config", "35m", *KNOWN, *words]


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", shipped_configs())
def test_every_preset_can_be_planned_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--config", name, *KNOWN)
    for part in (f"{name}: ", "extended model", "utilisation", "sent by a worker", "hours", "risk"):
        assert part in text


def test_the_papers_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert paper_table() in output(capsys, "--table")
    assert paper_table() in (REPOSITORY / "docs/planning.md").read_text()


def test_the_papers_table_of_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--config", "debug", "--step-time", "70ms", "--table")
    assert "474,208 parameters" in text
    assert text.count("\n| ") == 7


def test_step_times(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--bandwidth", "100Mbit", "--step-time", "0.3,0.5s"]
    text = output(capsys, "--config", "35m", *words)
    assert "100 Mbit/s for the slowest worker" in text
    assert "300 ms / 500 ms of compute" in text
    shared = ["--config", "1b", *LINK, "--mfu", "40%", "--parallel.fsdp", "8"]
    by_name = output(capsys, *shared, "--device", "h100")
    assert by_name == output(capsys, *shared, "--peak-tflops", "989")
    assert "FLOP / (8 x 989 TFLOP/s x 40 %)" in by_name


def test_the_plan_is_written_as_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "here.toml"
    words = ["--config", "1b", "--bandwidth", "300Mbit", "--step-time", "0.5"]
    words += ["--diloco.workers", "4", "--write", str(written)]
    output(capsys, *words)
    text = written.read_text()
    assert 'extends = "1b.toml"' in text
    assert "Planned for 300 Mbit/s" in text
    loaded, base = flat_settings(load_config(str(written))), flat_settings(load_config("1b"))
    changed = {key for key, value in loaded.items() if value != base[key]} - {"run.name"}
    assert "diloco.workers" in changed
    assert all(key.startswith("diloco.") for key in changed)
    assert text.count(" = ") == 1 + len(changed), "only what differs"
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert written.read_text() == text


def test_a_written_config_extends_from_anywhere(tmp_path: Path) -> None:
    own, variant = tmp_path / "own/1b.toml", tmp_path / "variants/1b.toml"
    for path in (own, variant):
        path.parent.mkdir()
    own.write_text('extends = "35m.toml"\n[training]\nbatch_size = 2\n')
    words = ["--config", str(own), *KNOWN, "--training.steps", "5000", "--write", str(variant)]
    assert main(words) == 0
    assert 'extends = "../own/1b.toml"' in variant.read_text()
    training = load_config(str(variant)).training
    assert (training.batch_size, training.steps) == (2, 5000)


STEP = ["--config", "1b", "--step-time", "0.5"]
MISTAKES = [
    (["--config", "1b", *LINK], r"step time is not known: give --step-time .* or --mfu with"),
    (["--config", "1b", *LINK, "--mfu", "40%"], r"give either --device \(.*H100"),
    (["--config", "1b", *KNOWN, "--mfu", "40%"], r"--mfu: not allowed with argument --step-time"),
    (STEP, r"give --bandwidth, as in 2Gbit"),
    ([*STEP, "--bandwidth", "1Gbit", "--step-time", "1,2,3"], r"lists 3 values: give one, or 2"),
    (plan("--step-time", "0"), r"step times above 0"),
    (plan("--step-time", "soon"), r'--step-time: "soon"'),
    (plan("--utilisation", "100%"), r"below 100%"),
    (plan("--diloco.workers", "1"), r"there are no links"),
    (plan("--diloco.workerz", "2"), r"did you mean diloco\.workers"),
    (plan("--bandwith", "1Gbit"), r"--bandwith is unknown: did you mean --bandwidth\?"),
    (KNOWN, r"give a model"),
    (["--config", "35m", "--table"], r"step time is not known"),
    (plan("--table", "--write", "plan.toml"), r"--table plans nothing"),
    (plan("--write", "nowhere/plan.toml"), r"no folder nowhere"),
    (plan("--write", "plan.yaml"), r"ends in \.toml"),
    (plan("--training.global_batch_size", "none", "--write", "x.toml"), r"cannot be written"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[told for _, told in MISTAKES])
def test_mistakes_name_the_remedy(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error, re.S), error
    assert not list(tmp_path.iterdir())


def test_the_program_in_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs/planning.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(program, {})
    assert "%" in capsys.readouterr().out


def test_the_commands_in_the_docs_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a probe, which starts a real run."""
    commands = page_commands("planning.md", tmp_path)
    assert len(commands) > 5
    for program, *words in commands:
        if program == "./run_train.sh":
            assert from_command_line(words) is None, "--print-config"
        else:
            assert (program, words[0]) == (".venv/bin/torchtitan-diloco", "plan")
            assert main(words[1:]) == 0, capsys.readouterr().err
