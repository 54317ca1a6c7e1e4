"""Run every ```bash block of the README and of docs/, from the root of the repository.

One training of twelve steps serves all pages. Of every other training the settings are checked, and
the folder that it names gets a copy of that run. Commands of `.venv/bin/` run in this process,
which has imported torch already. `./run_tests.sh` only starts pytest. outputs/ is an empty folder.
`.ci/walk` runs all of them as printed, in a fresh clone with nothing prepared, in some 20 minutes.
What cannot run here (a network, many nodes) is fenced as ```text, what another test runs as
```shell.
"""

import fcntl
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.processes import ProcessPool
from torchtitan_diloco.cli import COMMANDS
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.loader import run_warnings
from torchtitan_diloco.diloco import transport

README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
SHORT = (
    "--training.steps 12 --lr_schedule.warmup_steps 1 --validation.sequences 8 "
    "--training.batch_size 2 --metrics.tensorboard false"
)


def blocks(page: Path, language: str = "bash") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def start(*command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    outcome = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert outcome.returncode == 0, f"{shlex.join(command)}\n\n{outcome.stdout[-4000:]}"
    return outcome.stdout


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by the first command of the README, of twelve steps, for all processes of pytest."""
    assert blocks(README)[0] == "./run_train.sh\n"
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if parallel else base) / "docs-run"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            output = start("./run_train.sh", *SHORT.split(), "--run.folder", str(folder))
            for expected in (
                "each fragment every 10 steps, applied 1 steps later",
                "step 12/12  loss ",
                "loss of the shared model",
                "sent between workers",
                "data parallelism would send",
                "its loss at equal tokens",
                "communication hidden",
                f"     ./run_train.sh --config {folder}/config.toml --diloco.method none\n",
                f"torchtitan-diloco report {folder}\n",
            ):
                assert expected in output, output
    return folder


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name
)
def test_blocks_run_as_written(
    page: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as they follow on each other: they share a folder."""
    monkeypatch.chdir(REPOSITORY)
    for block in blocks(page):
        block = re.sub(r"\boutputs/", f"{tmp_path}/", block)
        program = re.fullmatch(r".venv/bin/python (.*) <<'END'\n(.*)END\n", block, re.S)
        if program:
            monkeypatch.setattr(sys, "argv", shlex.split(program[1]))
            exec(program[2], {})
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while "=" in words[0]:  # NPROC=4 ./run_train.sh
                words.pop(0)
            if words[0] == "./run_train.sh":
                config = from_command_line(words[1:])
                if config is not None and page == README:
                    assert run_warnings(config, config.training.steps) == [], line
                if config is not None and config.run.folder:
                    shutil.copytree(trained, config.run.folder, dirs_exist_ok=True)
            elif words[0].startswith(".venv/bin/"):
                run_module(words, monkeypatch)
            else:
                assert words == ["./run_tests.sh"], f"{page.name}: {line}"
                start(*words, "--version")


def run_module(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program, name, *more = words
    assert program == ".venv/bin/torchtitan-diloco"
    file, *first = COMMANDS[name][0].split()
    module = f"torchtitan_diloco.{file}"
    monkeypatch.setattr(sys, "argv", [module, *first, *more])
    code: object = None
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    assert not code, shlex.join(words)


def _run_program(text: str) -> str:
    with redirect_stdout(StringIO()) as output:
        exec(text, {})
    return output.getvalue()


def test_the_readmes_own_loop_runs_as_written(processes: ProcessPool) -> None:
    (program,) = blocks(README, "python")
    assert (
        "start it with: .venv/bin/torchrun --standalone --nproc-per-node 2 own_loop.py" in program
    )
    first, second = processes.run(_run_program, 2, program)
    assert "1.layers.0, 1.layers.2" in first
    assert re.search(r"worker 1: loss \d+\.\d+, \d+\.\d+ MB sent", second)


BARE = re.compile(
    r"(?<![\w./-])(?<!-m )(?:(?:python3?|torchrun|tensorboard) -|pip install|hf download|"
    r"torchtitan-diloco (?:[a-z-]+ )+[-$./\"A-Z|])"
)
"""Commands that need a PATH with `.venv/bin`."""
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"].keys()
SOURCES = [
    *(REPOSITORY / "docs/images").glob("*.svg"),
    *(
        path
        for name in ("torchtitan_diloco", "benchmarks", "examples")
        for path in sorted((REPOSITORY / name).rglob("*.py"))
    ),
]


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: path.name)
def test_every_command_works_in_a_new_shell(path: Path) -> None:
    text = path.read_text()
    assert BARE.findall(text) == []
    assert set(re.findall(r"\.venv/bin/torchtitan-diloco ([a-z-]+)", text)) <= COMMANDS.keys()
    for module in re.findall(r"\.venv/bin/python -m ([\w.]*\w)", text):
        assert find_spec(module), module
    for extras in re.findall(r"-e '\.\[([\w,]+)\]'", text):
        assert set(extras.split(",")) <= EXTRAS, extras


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_a_page_names_is_there(page: Path) -> None:
    folders = "torchtitan_diloco|docs|train_configs|scripts|benchmarks|tests|examples"
    text, package = page.read_text(), REPOSITORY / "torchtitan_diloco"
    named = [REPOSITORY / name for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", text)]
    modules = re.findall(rf"`(?!(?:{folders})/)(\w+/\w+\.py)`", text)
    named += [package / module for module in modules]
    for path in named:
        assert path.exists(), f"{page.name} names {path}"
    for link, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", text):
        target = (page.parent / link) if link else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}#{anchor}"


def test_all_bytes_of_the_header_are_documented() -> None:
    text = (REPOSITORY / "docs/algorithm.md").read_text()
    assert f"| 4-5 | version, {transport.VERSION} |" in text
    table = text[text.index("| bytes | header |") :].split("\n\n")[0]
    spans = [map(int, span) for span in re.findall(r"\b(\d+)-(\d+)\b(?=[^|]*\|)", table)]
    covered = [byte for first, last in spans for byte in range(first, last + 1)]
    assert covered == [*range(transport.HEADER_BYTES)]


def anchors(page: Path) -> list[str]:
    """Return the anchors of the headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
