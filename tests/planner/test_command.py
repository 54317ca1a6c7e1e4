"""python -m torchtitan_diloco.plan"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from torchtitan_diloco.config.loader import load_config, shipped_configs
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.plan import main
from torchtitan_diloco.planner.paper_table import paper_table

LINK = ["--bandwidth", "500Mbit", "--latency", "30ms"]
KNOWN = [*LINK, "--step-time", "0.3"]


def plan(*words: str) -> list[str]:
    return ["--config", "35m", *KNOWN, *words]


@pytest.mark.parametrize("name", shipped_configs())
def test_every_preset_can_be_planned_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--config", name, "--bandwidth", "1Gbit", "--latency", "30ms", "--step-time", "0.5"])
        == 0
    )
    text = capsys.readouterr().out
    assert f"{name}: " in text
    assert "extended model" in text, "and not the paper's"
    for row in (
        "utilisation",
        "sent by a worker",
        "peak",
        "memory of the device",
        "memory of the host",
        "hours",
        "risk",
    ):
        assert row in text
    assert "\n- present: " in text


def test_the_papers_table_needs_no_config_and_no_torch() -> None:
    code = "import sys; from torchtitan_diloco.plan import main; main(['--table']); sys.exit('torch' in sys.modules)"
    outcome = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    assert paper_table() in outcome.stdout
    assert "Paper's model" in outcome.stdout


def test_the_planner_is_imported_without_torch() -> None:
    code = "import sys, torchtitan_diloco.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


def test_the_papers_table_of_any_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "debug", "--step-time", "70ms", "--table"]) == 0
    text = capsys.readouterr().out
    assert "474,208 parameters, H = 10" in text
    assert text.count("\n| ") == 6


def test_the_step_time_from_the_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--config", "1b", *LINK, "--mfu", "40%", "--device", "h100", "--parallel.fsdp", "8"])
        == 0
    )
    by_name = capsys.readouterr().out
    assert (
        main(
            [
                "--config",
                "1b",
                *LINK,
                "--mfu",
                "0.4",
                "--peak-tflops",
                "989",
                "--parallel.fsdp",
                "8",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == by_name
    assert "8 x 989 TFLOP/s x 40 %" in by_name


def test_a_plan_becomes_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "slow.toml"
    words = [
        "--config",
        "1b.toml",
        "--bandwidth",
        "300Mbit",
        "--step-time",
        "0.5",
        "--diloco.workers",
        "4",
    ]
    assert main([*words, "--write", str(written)]) == 0
    text = written.read_text()
    assert 'extends = "1b.toml"' in text
    assert "Planned for 300 Mbit/s" in text
    loaded, base = flat_settings(load_config(str(written))), flat_settings(load_config("1b"))
    differing = {key for key, value in loaded.items() if value != base[key]} - {"run.name"}
    assert "diloco.workers" in differing
    assert differing <= {key for key in base if key.startswith("diloco.")}
    for key in differing:
        assert f"{key.rpartition('.')[2]} = " in text
    assert text.count(" = ") == 1 + len(differing), "it says only what differs"
    assert main([*words, "--write", str(written)]) == 2
    assert "there is such a file already" in capsys.readouterr().err
    assert written.read_text() == text


def test_a_config_of_ones_own_is_extended_from_anywhere(tmp_path: Path) -> None:
    own, variant = tmp_path / "own/1b.toml", tmp_path / "variants/1b.toml"
    for path in (own, variant):
        path.parent.mkdir()
    own.write_text(
        'extends = "1b.toml"\n[training]\nbatch_size = 2\n'.replace('"1b.toml"', '"35m.toml"')
    )
    assert main(["--config", str(own), *KNOWN, "--write", str(variant)]) == 0
    assert 'extends = "../own/1b.toml"' in variant.read_text()
    assert load_config(str(variant)).training.batch_size == 2


def test_a_variant_with_the_name_of_a_preset_extends_the_preset_and_not_itself(
    tmp_path: Path,
) -> None:
    variant = tmp_path / "35m.toml"
    assert main(plan("--write", str(variant))) == 0
    assert load_config(str(variant)).model.flavor == "35m"


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_curves_are_drawn(tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"curves.{ending}"
    assert main(plan("--plot", str(picture))) == 0
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG") if ending == "png" else b"data parallel" in content


MISTAKES = [
    (
        ["--config", "1b", *LINK],
        r"step time is not known: give --step-time .* or --mfu with --device or --peak-tflops",
    ),
    (["--config", "1b", *LINK, "--device", "H100"], r"what the hardware could do.*--mfu"),
    (
        ["--config", "1b", *LINK, "--mfu", "40%"],
        r"share of an unknown peak: give one of --device \(.*H100",
    ),
    (
        ["--config", "1b", *LINK, "--mfu", "40%", "--device", "abacus"],
        r'--device "abacus" is not known: take one of .*H100',
    ),
    (["--config", "1b", *LINK, "--mfu", "400%", "--device", "H100"], r"--mfu .* cannot be"),
    (["--config", "1b", *KNOWN, "--mfu", "40%"], r"give one of them"),
    (["--config", "1b", "--step-time", "0.5"], r"give --bandwidth, such as 2Gbit"),
    (
        ["--config", "1b", "--step-time", "0.5", "--bandwidth", "2Gfoo"],
        r'the unit "Gfoo" is no bandwidth; .*2Gbit',
    ),
    (["--config", "1b", "--step-time", "0.5", "--bandwidth", "2"], r"needs a unit"),
    (["--config", "1b", "--step-time", "0.5", "--bandwidth", "0Gbit"], r"check number and unit"),
    (
        ["--config", "1b", "--step-time", "0.5", "--bandwidth", "1Gbit,2Gbit,3Gbit"],
        r"lists 3 values, and there are 2 workers",
    ),
    (["--config", "1b", "--step-time", "0", "--bandwidth", "1Gbit"], r"step time of 0 s cannot be"),
    (["--config", "1b", "--step-time", "soon", "--bandwidth", "1Gbit"], r'--step-time "soon"'),
    (plan("--latency", "30"), r"--latency .* needs a unit"),
    (plan("--jitter", "300%"), r"jitter of 3 cannot be"),
    (plan("--utilisation", "100%"), r"cannot be planned for"),
    (plan("--diloco.workers", "1"), r"nothing goes between workers"),
    (plan("--diloco.workerz", "2"), r"did you mean diloco\.workers"),
    (["--config", "35n", *KNOWN], r"did you mean 35m"),
    (plan("--bandwith", "1Gbit"), r"--bandwith is unknown: did you mean --bandwidth\?"),
    (KNOWN, r"give --config"),
    (["--config", "35m", "--table"], r"step time is not known"),
    (plan("--plot", "curves.jpg"), r"ends in \.png or \.svg"),
    (plan("--plot", "nowhere/at/all.png"), r"no folder nowhere/at"),
    (plan("--table", "--write", "plan.toml"), r"--table prints a table and plans nothing"),
    (plan("--write", "plan.yaml"), r"ends in \.toml"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES, ids=[told for _, told in MISTAKES])
def test_mistakes_are_told_with_the_remedy(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert re.search(told, captured.err, re.S), captured.err
    assert not captured.out


def test_the_page_shows_the_table_that_is_printed() -> None:
    page = (REPOSITORY / "docs/planning.md").read_text()
    assert paper_table() in page


def test_the_pages_program_runs_as_written() -> None:
    import re

    (program,) = re.findall(
        r"^```python\n(.*?)^```", (REPOSITORY / "docs/planning.md").read_text(), re.M | re.S
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "%" in outcome.stdout


def test_what_a_toml_cannot_say_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "variant.toml"
    assert main(plan("--training.global_batch_size", "none", "--write", str(written))) == 2
    assert "training.global_batch_size = none cannot be said" in capsys.readouterr().err
    assert not written.exists()


def test_other_settings_of_the_run_go_into_the_variant(tmp_path: Path) -> None:
    written = tmp_path / "variant.toml"
    assert main(plan("--training.steps", "5000", "--write", str(written))) == 0
    assert load_config(str(written)).training.steps == 5000
