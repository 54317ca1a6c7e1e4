"""torchtitan-diloco compare"""

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from benchmarks.network import enter
from tests.conftest import REPOSITORY
from tests.network import network_of
from tests.ports import free_port
from tests.programs import Main, Program
from tests.waiting import wait_until
from torchtitan_diloco.base.hardware import available_cores
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components import run_plan
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.launching.launch import main as launch
from torchtitan_diloco.machines import compare, trial
from torchtitan_diloco.machines.trial import Trial
from torchtitan_diloco.planner.prediction import Workload

SMALL = shlex.split(
    "--config debug --run.device cpu --model.layers 2 --training.batch_size 2 "
    "--training.sequence_length 64 --training.steps 200 "
    f"--data.cache_folder '{REPOSITORY}/.cache/corpora'"  # a trial may run in another folder
)
QUICK = ["--seconds", "0.5s", "--diloco.link.streams", "2"]
ROW = re.compile(r"\| (\* )?(\S.*?) +\| ([\d,.]+)[\d,. ]* +\| [\d. ]+ +\| [\d.x ]+ ")


def compare_on_busy_cores(words: list[str]) -> int:
    """Run `compare`, and give advice after few steps, on cores that other tests use."""
    with patch.object(compare, "doubts_about", lambda *_: ()):
        return compare.main([*SMALL, *QUICK, *words])


def started(folder: Path, words: Sequence[str]) -> Program:
    """Start `compare` in a folder. It is killed at the end of its context."""
    folder.mkdir(exist_ok=True)
    return Program(
        folder / "log.txt",
        words,
        main=compare_on_busy_cores,
        folder=folder,
        variables=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def inside(holder: int, main: Main, words: list[str]) -> int:
    """Run a program in the network of another process."""
    enter(holder)
    return main(words)


def rows_of(printed: str) -> dict[str, float]:
    return {name: float(speed.replace(",", "")) for _, name, speed in ROW.findall(printed)}


def check_answer(first: str, second: str) -> None:
    """Check what both machines have printed, but for their own ways to start."""
    tables = [text[text.index("\ndebug: ") : text.index("\nwrote ")] for text in (first, second)]
    assert tables[0] == tables[1]
    rows = list(rows_of(tables[0]))
    kinds = "", "", "data parallelism", "DiLoCo, H 10", "streaming, H 10", "streaming, 4 bits"
    assert all(row.startswith(kind) for row, kind in zip(rows, kinds, strict=False))
    assert all(row.endswith(" alone") for row in rows[:2])
    assert tables[0].count("| * ") == 1
    for said in ("round trip", "bit/s with 1 TCP stream", " in the slower direction"):
        assert said in tables[0]


def start_line(printed: str) -> tuple[dict[str, str], list[str]]:
    """Return the environment and the command of the line that starts the run: that of both
    machines, or of one alone, if the other was much slower in these seconds."""
    how, line = printed.splitlines()[-2:]
    words = shlex.split(line)
    count = next(number for number, word in enumerate(words) if "=" not in word)
    variables = dict(word.split("=", 1) for word in words[:count])
    assert variables.pop("OMP_NUM_THREADS") == "1", "as in the measurement"
    assert how == (
        "to start the run, on this machine:"
        if variables
        else "to start the run, on the machine of that row:"
    )
    return variables, words[count:]


@pytest.mark.timeout(300)
def test_two_machines_are_compared(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    places = tmp_path / "first", tmp_path / "second"
    words = ["--endpoint", endpoint]
    with started(places[0], [*words, "--listen"]) as first, started(places[1], words) as second:
        for program in (first, second):
            program.end()
        check_answer(first.printed(), second.printed())
        for rank, program in enumerate((first, second)):
            variables, line = start_line(program.printed())
            nodes = {"NNODES": "2", "NODE_RANK": str(rank), "RDZV_ENDPOINT": endpoint}
            assert not variables or nodes.items() <= variables.items()
            written = places[rank] / "outputs/debug-two-machines.toml"
            config = from_command_line(["--config", str(written)])
            assert config.diloco.workers == (2 if variables else 1)
            assert line[line.index("--config") + 1] == "outputs/debug-two-machines.toml"
        texts = [(place / "outputs/debug-two-machines.toml").read_text() for place in places]
        assert texts[0] == texts[1]


@pytest.mark.timeout(300)
def test_two_machines_with_a_slow_link_and_the_line_that_starts_them(tmp_path: Path) -> None:
    with network_of(2, up=20, down=20) as network, ExitStack() as started:

        def start(machine: int, name: str, main: Main, words: list[str], **more: str) -> Program:
            """Start a program on a machine."""
            variables = {"OMP_NUM_THREADS": "1", **network.rank_variables(machine), **more}
            program = Program(
                tmp_path / f"{machine}/{name}.txt",
                words,
                main=partial(inside, network.namespace(machine).pid, main),
                variables=os.environ | variables,
            )
            return started.enter_context(program)

        programs = []
        for machine in range(2):
            words = ["--endpoint", f"{network.address(0)}:29500", *["--listen"] * (machine == 0)]
            words += ["--write", str(tmp_path / f"{machine}/best.toml")]
            programs.append(start(machine, "compare", compare_on_busy_cores, words))
        printed = [program.end() for program in programs]
        check_answer(*printed)
        assert "bit/s with 2 TCP streams in the slower direction" in printed[0]
        rows = rows_of(printed[0])
        assert [*rows][:2] == ["10.0.0.1 alone", "10.0.0.2 alone"]
        assert rows["data parallelism"] < rows["streaming, 4 bits, H 10, tau 1"]
        (rate,) = re.findall(r"; ([\d.]+) Mbit/s with 1 TCP stream, ", printed[0])
        assert 14 < float(rate) < 21
        runs = []
        for machine in range(2):
            variables, words = start_line(printed[machine])
            assert words[1:4] == ["-m", "torchtitan_diloco", "train"]
            more = ["--training.steps", "12", "--run.folder", str(tmp_path / f"run-{machine}")]
            more += ["--validation.every", "0", "--metrics.boards", "none"]
            runs.append(start(machine, "run", launch, [*words[4:], *more], **variables))
        first, _ = [run.end() for run in runs]
        assert "step 12/12  loss" in first


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("forks")
def test_one_machine_answers_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "doubts_about", lambda *_: ())
    written = tmp_path / "new/best.toml"
    words = [*SMALL, *QUICK, "--bandwidth", "50Mbit", "--write", str(written)]
    assert compare.main(words) == 0
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    assert [name for name in rows if name.endswith("alone")] == ["this machine alone"]
    assert "link: 50 Mbit/s, latency 0 s one way, as given" in printed
    assert "NNODES=2 NODE_RANK=0 RDZV_ENDPOINT=NODE0:29500 " in printed
    text = written.read_text()
    assert text.startswith("# Written by `compare`: ")
    assert "50 Mbit/s" in text.splitlines()[0]
    config = from_command_line(SMALL)
    compare._check(config, written)  # it may be written again


CALM = trial.StepTimes(
    device="CPU, 2 cores",
    mean_seconds=0.5,
    deviation=0.01,
    count=30,
    queued=0.1,
    crowded="",
    block_seconds=[0.48, *[0.5] * (trial.BLOCKS - 2), 0.52],
)
DOUBTFUL = [
    ({"count": 3}, "has measured 3 steps, and advice needs 10: give --seconds 6s"),
    ({"queued": 0.5}, "was short of cores: its training thread waited for one in 50% of the time"),
    ({"crowded": "load 8.0 on 2 cores"}, "was crowded: load 8.0 on 2 cores; stop them"),
]


def answer(
    path: Path, times: trial.StepTimes, bandwidth: str = "100Mbit", price: str = "0"
) -> None:
    """Print the answer to steps of one machine."""
    words = [*SMALL, "--bandwidth", bandwidth, "--write", str(path)]
    options = compare._parse(words)[0]
    config = from_command_line([*SMALL, "--diloco.workers", "2", "--price.per_gb", price])
    load = Workload.of(config, vocabulary=320)
    link = compare._given_link(options)
    compare._answer(options, config, load, machines=(["here"], [times]), link=link, rank=0)


@pytest.mark.parametrize(("changes", "reason"), DOUBTFUL, ids=[reason for _, reason in DOUBTFUL])
def test_doubtful_steps_give_a_table_but_no_advice(
    changes: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "best.toml"
    answer(written, msgspec.structs.replace(CALM, **changes))
    printed = capsys.readouterr().out
    assert "data parallelism" in rows_of(printed)
    assert "| * " not in printed
    assert f"no settings are written, as these speeds may be wrong:\n- here {reason}" in printed
    assert not written.exists()


@pytest.mark.parametrize(
    ("changes", "is_advised"),
    [
        ({"block_seconds": [0.4, 0.625] * (trial.BLOCKS // 2)}, True),
        ({"queued": 0.5}, False),
        ({"crowded": "load 8.0"}, False),
    ],
)
def test_steps_that_vary_and_busy_cores_give_ranges(
    changes: dict[str, Any],
    is_advised: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer(tmp_path / "calm.toml", CALM)
    assert " ... " not in capsys.readouterr().out
    noisy = msgspec.structs.replace(CALM, **changes)
    answer(tmp_path / "noisy.toml", noisy)
    printed = capsys.readouterr().out
    least = min(noisy.block_seconds)
    most = max(noisy.block_seconds)
    speeds = rf"{128 / most:.0f} \.\.\. {128 / least:.0f}"  # a step has 128 tokens
    alone = next(line for line in printed.splitlines() if "here alone" in line)
    assert re.match(rf"\| (\* )?here alone +\| {speeds} +\| .* \| 1.00 x ", alone), alone
    assert f"{least * 1e3:.1f} ms to {most * 1e3:.1f} ms on average over 1/8 of" in printed
    assert printed.count("| * ") == is_advised
    assert (tmp_path / "noisy.toml").exists() == is_advised


def test_a_price_makes_the_traffic_money(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(tmp_path / "free.toml", CALM)
    assert "cost of a run" not in capsys.readouterr().out
    answer(tmp_path / "paid.toml", CALM, price="1000")
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| ")
    ]
    columns = cells[0]
    assert columns[-1] == "cost of a run"
    sent = columns.index("GB up a run")
    rows = {row[0].removeprefix("* "): row for row in cells[2:]}
    assert rows["here alone"][sent:] == ["", ""]
    gradients = rows["data parallelism"]
    assert float(gradients[-1].replace(",", "")) == pytest.approx(
        2 * 1000 * float(gradients[sent]), rel=0.05
    )


def test_settings_that_were_written_before_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "best.toml"
    former = tmp_path / "best.before.toml"
    answer(written, CALM)
    first = written.read_text()
    answer(written, CALM)
    assert not former.exists()
    answer(written, CALM, bandwidth="1Mbit")
    assert f"; what it said before is in {former}\n" in capsys.readouterr().out
    assert (former.read_text(), written.read_text() != first) == (first, True)


def test_a_run_has_the_threads_that_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given ones, or those of the ranks of the run that are on this machine."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = from_command_line(SMALL)
    sizes = {"workers": 2, "vocabulary": 320}
    cores = available_cores()
    for trials, processes, threads in ((1, 1, cores), (2, 1, cores // 2), (2, 64, 1)):
        running = Trial(SMALL, config, processes=processes, trials=trials, **sizes)
        assert running.threads == max(1, threads)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Trial(SMALL, config, processes=1, trials=2, **sizes).threads == 3
    answer(tmp_path / "best.toml", CALM)
    assert " OMP_NUM_THREADS=3 " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.timeout(200)
def test_the_other_machine_ends(tmp_path: Path) -> None:
    """With an error, which both say, or killed in a measurement, of which nothing stays."""
    endpoint = f"127.0.0.1:{free_port()}"
    listens = ["--endpoint", endpoint, "--listen"]
    other = ["--endpoint", endpoint, "--diloco.sync_every", "20"]
    with started(tmp_path / "a", listens) as first, started(tmp_path / "b", other) as second:
        expected = "diloco.sync_every: 10 on machine 0, 20 on machine 1"
        for program in (first, second):
            assert f"error: the two machines differ: {expected}" in program.end(2)
    words = ["--endpoint", endpoint, "--seconds", "1h"]
    with (
        started(tmp_path / "a", [*words, "--listen"]) as first,
        started(tmp_path / "b", words) as second,
    ):
        ready = "so far, the last of"
        wait_until(lambda: ready in second.printed(), ready, second.console, seconds=150)
        launchers_and_ranks = 4
        assert len(processes_in(tmp_path)) >= 2 + launchers_and_ranks
        second.kill()
        assert "error: machine 1 has ended: its console says why" in first.end(2)
    wait_until(lambda: not processes_in(tmp_path), "the end of the trials", seconds=30)


def processes_in(folder: Path) -> list[int]:
    """Return the processes that work in a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (place / "cwd").resolve(strict=True).is_relative_to(folder):
                found.append(int(place.name))
    return found


# --- mistakes -------------------------------------------------------------------------------------

ALONE = ["--config", "debug", "--bandwidth", "1Gbit"]
MISTAKES = [
    ([], "give a model with --config"),
    (["--config", "100mm", "--bandwidth", "1Gbit"], '--config = "100mm": no such file; .* 100m'),
    (["--config", "debug"], "give --endpoint HOST:PORT on both machines, or --bandwidth"),
    (
        ["--config", "debug", "--endpoint", "node0"],
        "--endpoint node0: give HOST:PORT, such as node0:",
    ),
    (["--config", "debug", "--endpoint", "node0:0"], "--endpoint node0:0: give HOST:PORT"),
    (["--config", "debug", "--endpoint", "node0:http"], "--endpoint node0:http: give HOST:PORT"),
    (
        [*ALONE[:2], "--bandwidth", "0Gbit"],
        "--bandwidth must be above 0: give --bandwidth, such as",
    ),
    ([*ALONE, "--endpoint", "node0:29500"], "--bandwidth: with --endpoint node0:29500, the link"),
    ([*ALONE, "--listen"], "--listen is only used with --endpoint"),
    (
        ["--config", "debug", "--endpoint", "a:1", "--latency", "1ms"],
        "--latency: with --endpoint, it is measured",
    ),
    ([*ALONE, "--seconds", "0s"], "--seconds 0s: give a time above 0"),
    ([*ALONE, "--diloco.workers", "4"], "diloco.workers = 4: compare is for 2 machines"),
    ([*ALONE, "--islands.local", "2"], "remove the settings of islands"),
    ([*ALONE, "--training.batch_sise", "4"], 'training.batch_sise = "4": unknown key'),
    ([*ALONE, "--training.global_batch_size", "9"], "global_batch_size = 9 is not a multiple of 2"),
    ([*ALONE, "--write", "there.toml"], "--write there.toml: another file exists"),
    (
        [*ALONE, "--write", "there.toml/best.toml"],
        "--write there.toml/best.toml: .*: give the path",
    ),
    ([*ALONE, "--write", "folder"], "--write folder: Is a directory: give the path"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[told for _, told in MISTAKES])
def test_mistakes_are_one_line(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").write_text("[run]\n")
    (tmp_path / "folder").mkdir()
    assert compare.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error), error
    assert error.count("\n") <= 2, "a mistake in a setting has a headline"


@pytest.mark.parametrize("text", ["100", "1Gfoo", "fast", "-1Gbit"])
def test_a_bandwidth_needs_a_unit(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        compare.main(["--config", "debug", f"--bandwidth={text}"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f'"{text}" is not a bandwidth: give 2Gbit, 200Mbit/s or 25MB/s' in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [["--listen"], []])
def test_nobody_else_comes(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    address = f"127.0.0.1:{free_port()}"
    assert compare.main([*SMALL, "--endpoint", address, "--wait", "0.1s", *words]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(f"error: --endpoint {address}: .* within 0.1 s.*: run the same command", last)


@pytest.mark.parametrize("name", ["1b", "4b", "llama-8b"])
def test_a_preset_that_does_not_fit_into_memory(
    name: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_plan, "available_memory_bytes", lambda: 8 * 2**30)
    words = ["--config", name, "--bandwidth", "1Gbit", "--run.device", "cpu"]
    assert compare.main(words) == 2
    assert re.match(
        r"error: [\d,]+ parameters need [\d.]+ GiB on this machine \(.*\), and 8.0 GiB "
        r"are available: use more .*\n$",
        capsys.readouterr().err,
    )


def test_other_code_and_torch_are_named() -> None:
    """Facts are compared by `find_differences`, which has its own tests."""
    config = from_command_line(SMALL)
    told = list[compare.Machine]()

    class Other:
        rank = 0
        other = "machine 1"

        def exchange(self, mine: compare.Machine) -> list[compare.Machine]:
            told.append(mine)
            theirs = mine.facts | {key: "other" for key in mine.facts if key.startswith(changed)}
            return [mine, compare.Machine("node1", theirs)]

    options = compare._parse([*SMALL, "--endpoint", "a:1"])[0]
    for changed in ("code", "torch", "device", "processes", "training.batch_size"):
        with pytest.raises(UserError, match=rf"the two machines differ: {changed}.* on ma"):
            compare._agree(Other(), config, options, 1)  # type: ignore[arg-type]
    folder = replace(config, run=replace(config.run, folder="/elsewhere"))
    changed = "nothing"
    names = compare._agree(Other(), folder, options, 1)  # type: ignore[arg-type]
    assert names == [told[-1].name, "node1"]
    assert told[-1].facts == told[0].facts, "folders may differ"
