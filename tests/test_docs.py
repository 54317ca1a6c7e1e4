"""Run every command of the README and of docs/ as printed, in a new shell without an environment.

The checkout has links to the files of the repository, and a `.venv` that finds the packages of this
Python, as one that is set up. On all pages but the README, whose commands start new interpreters,
it runs this package in forks. `.ci/walk` begins with nothing, and shortens nothing: 20 minutes.
"""

import json
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.conftest import REPOSITORY
from tests.interpreter import package_in_forks
from torchtitan_diloco.base.hardware import NEWEST_TORCH
from torchtitan_diloco.cli import COMMANDS
from torchtitan_diloco.components.metrics import BASELINE
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.checks import run_warnings
from torchtitan_diloco.diloco import transport

README = REPOSITORY / "README.md"
FOR_DEVELOPERS = [REPOSITORY / f"{name}.md" for name in ("AGENTS", "CONTRIBUTING", "SECURITY")]
PAGES = [
    README,
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *(REPOSITORY / f"benchmarks/records/{name}.md" for name in ("loss", "speed")),
    *FOR_DEVELOPERS,
]
SHELL = {"PATH": "/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
"""All variables but HOME. Other tests run on the same cores: more threads would wait for them."""
PROGRAMS = {"torchtitan-diloco": "torchtitan_diloco.cli", "torchrun": "torch.distributed.run"}
SMALL = (
    "--model.layers 2 --training.batch_size 2 --training.sequence_length 64 "
    "--validation.sequences 8 --metrics.boards none"
)
"""Settings that every training gets as well."""
SHORT = "--training.steps 12 --lr_schedule.warmup 1"
"""Settings of one that does not set its length, instead of 1,000 steps, which take minutes."""
ELSEWHERE = {
    ("AGENTS.md", ".ci/run"): "an hour; tests/test_release.py",
    ("algorithm.md", "my_formats"): "a file of yours; tests/diloco/test_added.py",
    ("algorithm.md", "my_outer"): "a file of yours; tests/diloco/test_added.py",
    ("CONTRIBUTING.md", "requirements.lock"): "network; tests/test_release.py",
    ("CONTRIBUTING.md", "scripts/build_site.sh"): "installs Sphinx; tests/test_site.py",
    ("CONTRIBUTING.md", "scripts/lock.sh"): "network; tests/test_release.py",
    ("CONTRIBUTING.md", "pyproject-build"): "network; tests/test_wheel.py",
    ("data-and-models.md", "hf:allenai/c4"): "network, hours; its checks: tests/test_train.py",
    ("data-and-models.md", "means.py"): "a file of yours; tests/models/test_new_family.py",
    ("data-and-models.md", "tiktoken.get_encoding"): "network; tests/data/test_tokenizer.py",
    ("data-and-models.md", "lm_eval"): "network; tests/export/test_commands.py",
    ("own-parts.md", "--run.imports mine"): "a file of yours; tests/test_own_parts.py",
    ("downstream.md", "benchmarks.downstream"): "an hour; tests/benchmarks/test_downstream.py",
    ("islands.md", "--islands.local 3"): "a kill, 4 processes; tests/islands/test_local_run.py",
    ("islands.md", "--islands.found true"): "three machines; tests/islands/test_run.py",
    ("islands.md", "site-a$"): "three machines; tests/test_two_sites.py",
    ("islands.md", "server$"): "three machines; tests/test_two_sites.py",
    ("islands.md", "node-0$"): "three machines; tests/islands/test_run.py",
    ("islands.md", "islands watch"): "a run; tests/islands/test_reader.py",
    ("islands.md", "islands evict b"): "a run; tests/islands/test_changes.py",
    ("launching.md", "doctor"): "two machines; tests/machines/test_doctor.py",
    ("launching.md", "NNODES=3"): "three machines; two nodes: tests/launching/test_two_nodes.py",
    (
        "launching.md",
        "NNODES=2 NODE_RANK=0 NPROC=1",
    ): "two consoles; tests/launching/test_launch.py",
    ("launching.md", "sbatch"): "Slurm; tests/launching/test_slurm.py",
    ("launching.md", "bin/torchrun"): "two machines; tests/launching/test_torchrun.py",
    ("launching.md", "wg "): "root, two machines; tests/test_two_sites.py",
    ("launching.md", "site-a$"): "two machines; tests/test_two_sites.py",
    ("launching.md", "site-a-alone$"): "fewer workers; tests/components/test_resume.py",
    ("loss.md", "job$"): "a quarter of an hour; tests/islands/test_run.py",
    ("loss.md", "benchmarks.parity"): "hours; tests/benchmarks/test_parity.py",
    ("measurements.md", "benchmarks.parity"): "hours; tests/benchmarks/test_parity.py",
    ("measurements.md", "benchmarks.scale"): "a GPU; tests/benchmarks/test_scale.py",
    ("own-loop.md", "islands sync"): "three consoles; tests/test_docs.py",
    ("README.md", "NNODES=2"): "two machines; tests/launching/test_two_nodes.py",
    ("report-and-plan.md", "tensorboard --logdir"): "a server; tests/components/test_telemetry.py",
    ("troubleshooting.md", "nft"): "root, a firewall",
    ("two-machines.md", "compare"): "two machines; tests/machines/test_compare.py",
    ("two-notebooks.md", "site-a$"): "two machines; tests/test_two_places.py",
}
"""Blocks of commands that do not run here: a page, what a block has, why, and what runs it."""


def blocks(page: Path, language: str = "bash") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    for path in REPOSITORY.iterdir():
        if not path.name.startswith(".") and path.name not in ("data", "outputs", "runs"):
            (folder / path.name).symlink_to(path)
    environment = folder / ".venv"
    venv.EnvBuilder(symlinks=True).create(environment)
    (packages,) = environment.glob("lib/*/site-packages")
    installed = [path for path in sys.path if path.endswith("-packages")]
    (packages / "all.pth").write_text("\n".join([str(folder), *installed]))
    about = packages / "torchtitan_diloco-0.2.0.dist-info"  # of `pip install -e`
    about.mkdir()
    (about / "direct_url.json").write_text(json.dumps({"url": folder.as_uri()}))
    for name, module in PROGRAMS.items():
        program = environment / "bin" / name
        lines = f"#!{environment}/bin/python", "import sys", f"from {module} import main"
        guarded = "if __name__ == '__main__':", "    sys.exit(main())"  # as that of pip
        program.write_text("\n".join([*lines, *guarded]))
        program.chmod(0o755)
    return folder


def shortened(command: str) -> str:
    """Add settings to a training, but not to a question, such as `--help`."""
    if not re.match(r"(NPROC=\d )?\./run_train\.sh(?!.* --(help|print-config))", command):
        return command
    return f"{command} {SMALL}" if "--training.steps" in command else f"{command} {SMALL} {SHORT}"


def run(command: str, checkout: Path) -> str:
    outcome = subprocess.run(
        ["bash", "-c", command],
        cwd=checkout,
        env=SHELL | {"HOME": str(checkout.parent)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, f"{command}\n\n{outcome.stdout[-4000:]}"
    return outcome.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name
)
def test_blocks_run_as_printed(page: Path, checkout: Path) -> None:
    """One after the other, as they follow on each other."""
    if page != README:
        with package_in_forks(checkout / ".venv"):
            run_blocks(page, checkout)
        return
    shown = run_blocks(page, checkout)
    check_the_first_run(shown["./run_train.sh"])
    for command in shown:
        words = shlex.split(command)
        if words[0] == "./run_train.sh" and not {"--help", "--print-config"} & {*words}:
            config = from_command_line(words[1:])
            assert run_warnings(config, config.training.steps) == [], command


def run_blocks(page: Path, checkout: Path) -> dict[str, str]:
    """Run the commands and the programs of a page, and return what each command has printed."""
    shown: dict[str, str] = {}
    for block in blocks(page):
        whole = "<<" in block
        for line in [block] if whole else block.replace("\\\n", " ").splitlines():
            command = line if whole else line.partition(" #")[0].strip()
            shown[command] = run(shortened(command), checkout)
    for program in blocks(page, "python"):
        if "outputs/" in program:
            (checkout / "program.py").write_text(program)
            run(".venv/bin/python program.py", checkout)
    return shown


def check_the_first_run(output: str) -> None:
    (folder,) = re.findall(r"took .*; the run is in (\S+)\n", output)
    for expected in (
        "each fragment every 10 steps, applied 1 step later; local weight falls from 0.5 to 0;",
        "step 12/12  loss ",
        "loss of the shared model",
        "sent by each worker",
        BASELINE,
        "hidden ",
        "compute share",
        "to compare with data parallelism, run  ./run_train.sh --config "
        f"{folder}/config.toml --diloco.method none\n",
        f".venv/bin/torchtitan-diloco report {folder}\n",
    ):
        assert expected in output, output


def test_all_commands_that_do_not_run_here_are_listed() -> None:
    of_a_command = r"^(\S*[$#] [\w.(]|\./|\.venv/|\w+=\S+ \.)"
    there = [
        (page.name, block)
        for page in PAGES
        for block in [*blocks(page, "text"), *blocks(page, "shell")]
        if re.search(of_a_command, block, re.M)
    ]
    for name, block in there:
        assert [one for one in ELSEWHERE if one[0] == name and one[1] in block], block
    for (name, part), reason in ELSEWHERE.items():
        assert [one for one in there if one[0] == name and part in one[1]], part
        for path in re.findall(r"tests/\S+\.py", reason):
            assert (REPOSITORY / path).exists(), path


def test_the_readmes_own_loop_runs_as_printed(checkout: Path) -> None:
    (program,) = blocks(README, "python")
    (checkout / "own_loop.py").write_text(program)
    (command,) = re.findall(r"start it with: (.*)", program)
    printed = run(command, checkout)
    assert "1.layers.0, 1.layers.2" in printed
    for worker in (0, 1):
        assert re.search(rf"worker {worker}: loss \d+\.\d+, \d+\.\d+ MB sent", printed)


@pytest.mark.long
def test_the_own_loop_of_an_island_runs_as_printed(checkout: Path) -> None:
    page = REPOSITORY / "docs/own-loop.md"
    (program,) = blocks(page, "python")
    (checkout / "island.py").write_text(program)
    first, *consoles = blocks(page, "shell")[0].splitlines()
    run(first, checkout)
    with ThreadPoolExecutor() as pool:
        printed = list(pool.map(lambda line: run(f"timeout 120 {line}", checkout), consoles))
    for name, output in zip("ab", printed[1:], strict=True):
        assert re.search(rf"island {name}: 4\d,\d\d\d tokens, finished", output), output
    # A start after the end has a checkpoint, and says that there is nothing left to train.
    assert "has ended after" in run(consoles[1], checkout)


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
    folders = r"torchtitan_diloco|docs|train_configs|scripts|benchmarks|tests|examples|\.ci"
    text = page.read_text()
    package = REPOSITORY / "torchtitan_diloco"
    named = [REPOSITORY / name for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", text)]
    modules = re.findall(rf"`(?!(?:{folders})/)(\w+/\w+\.py)`", text)
    named += [package / module for module in modules]
    for path in named:
        assert path.exists(), f"{page.name} names {path}"
    for name, file in re.findall(r"`(\w+)` (?:in|of) `([\w/]+\.py)`", text):
        path = REPOSITORY / file if re.match(folders, file) else package / file
        assert re.search(rf"\b{name}\b", path.read_text()), f"{page.name}: {name} in {path}"
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
    assert covered == [*range(transport.header_bytes(1))]


def anchors(page: Path) -> list[str]:
    """Return the anchors of the headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readme_has_the_versions_of_torch() -> None:
    """There is no upper bound: a newer torch than the tested ones gives a line at the start."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    found = map(Requirement, project["dependencies"])
    (oldest,) = next(one.specifier for one in found if one.name == "torch")
    assert oldest.operator == ">="
    assert f" torch {oldest.version} or newer (tested up to {NEWEST_TORCH});" in README.read_text()
    constraints = (REPOSITORY / "constraints.txt").read_text().splitlines()
    (installed,) = (one.removeprefix("torch==") for one in constraints if "torch==" in one)
    assert Version(oldest.version) <= Version(installed) <= Version(NEWEST_TORCH)
