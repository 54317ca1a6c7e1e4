"""run_train.sh's set-up, in a repository of its own that needs one package from a folder of wheels: no network."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from torchtitan_diloco.tools.requirements import fits, missing, requirements

TOOLS = ["awk", "bash", "df", "dirname", "grep", "mkdir", "rm", "sleep", "tail", "touch"]
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "torchtitan_diloco"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["tiny>=1.0,<3"]

[project.optional-dependencies]
test = ["torchtitan_diloco[more]"]
more = ["extra>=1"]
"""
# A build backend that needs nothing installed: an editable wheel is one that adds the folder to the path.
BACKEND = """
import os, zipfile
INFO = "torchtitan_diloco-0.1.0.dist-info/"
META = "Metadata-Version: 2.1\\nName: torchtitan_diloco\\nVersion: 0.1.0\\nRequires-Dist: tiny<3,>=1.0\\n" + (
    "Provides-Extra: test\\nRequires-Dist: extra>=1; extra == 'test'\\n")
WHEEL = "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "torchtitan_diloco-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("torchtitan_diloco.pth", os.getcwd())
        for file, text in {"METADATA": META, "WHEEL": WHEEL, "RECORD": ""}.items():
            wheel.writestr(INFO + file, text)
    return name
build_wheel = build_editable
"""
LAUNCH = "import sys, tiny\nprint('launched with', sys.executable, sys.argv[1:])\n"


def write_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(
            f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )


def base_python() -> str:
    """The Python under the virtual environment that the tests may run in: a bare one."""
    return str(
        Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    )


class Checkout:
    """A clean checkout of a small repository, and a machine with the programs in `programs` and no others."""

    def __init__(self, folder: Path) -> None:
        self.root, self.programs, self.wheels = (
            folder / "re po",
            folder / "programs",
            folder / "wheels",
        )
        self.elsewhere = folder / "elsewhere"
        for made in (
            self.root / "scripts",
            self.root / "torchtitan_diloco/tools",
            self.programs,
            self.elsewhere,
        ):
            made.mkdir(parents=True)
        copied = (
            "run_train.sh",
            "run_tests.sh",
            "scripts/environment.sh",
            "torchtitan_diloco/tools/requirements.py",
        )
        for file in copied:
            shutil.copy(REPOSITORY / file, self.root / file)
        (self.root / "pyproject.toml").write_text(PYPROJECT)
        (self.root / "constraints.txt").write_text("tiny==1.5\n")
        (self.root / "backend.py").write_text(BACKEND)
        (self.root / "torchtitan_diloco/launch.py").write_text(LAUNCH)
        for version in ("1.5", "2.0"):
            write_wheel(self.wheels, "tiny", version)
        write_wheel(self.wheels, "extra", "1.0")
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path, tool
            (self.programs / tool).symlink_to(path)
        self.add_python("python3")

    def add_python(self, name: str, first: str = "") -> None:
        """A `name` on PATH; `first` is shell code that runs before the real Python and may stand in for it."""
        program = self.programs / name
        program.write_text(f'#!/bin/sh\n{first}\nexec "{base_python()}" "$@"\n')
        program.chmod(0o755)

    def fill_disk(self) -> None:
        """Let it look as if 20 MB were free."""
        (self.programs / "df").unlink()
        (self.programs / "df").write_text(
            "#!/bin/sh\necho Filesystem\necho /dev/x 9 9 20480 9% /\n"
        )
        (self.programs / "df").chmod(0o755)

    def environment(self, settings: Mapping[str, str] | None = None) -> dict[str, str]:
        return {
            "PATH": str(self.programs),
            "HOME": str(self.elsewhere),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": self.wheels.as_uri(),
            "PIP_CONFIG_FILE": os.devnull,
            **(settings or {}),
        }

    def start(self, *words: str, **settings: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.root / "run_train.sh", *words],
            env=self.environment(settings),
            cwd=self.elsewhere,
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def venv_python(self) -> Path:
        return self.root / ".venv/bin/python"

    def installed(self, package: str) -> str:
        command = [
            str(self.venv_python),
            "-c",
            f"from importlib import metadata; print(metadata.version({package!r}))",
        ]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout after its first start; the tests that share it leave it complete."""
    checkout = Checkout(tmp_path_factory.mktemp("finished"))
    assert checkout.start().returncode == 0
    return checkout


def said_in_one_line(run: "subprocess.CompletedProcess[str]") -> str:
    """The last line, where it is the only one beside the one that says what set-up does."""
    assert run.returncode != 0
    assert run.stdout == ""
    lines = [line for line in run.stderr.splitlines() if not line.startswith("setting up ")]
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def test_the_first_start_sets_up_and_later_ones_do_not(checkout: Checkout) -> None:
    first = checkout.start("--config", "x y")
    assert first.stdout == f"launched with {checkout.venv_python} ['--config', 'x y']\n"
    lines = first.stderr.splitlines()
    assert lines[0].startswith(f"setting up {checkout.root}/.venv with Python 3.")
    assert lines[1].startswith("set up in ")
    assert len(lines) == 2
    assert checkout.installed("tiny") == "1.5", "as the constraints ask"
    assert checkout.installed("extra") == "", "only run_tests.sh needs it"
    shutil.rmtree(checkout.wheels)
    again = checkout.start()
    assert (again.returncode, again.stderr) == (0, "")


def test_changed_requirements_are_installed(finished: Checkout) -> None:
    (finished.root / "constraints.txt").write_text("tiny==2.0\n")
    assert finished.start().returncode == 0
    assert finished.installed("tiny") == "2.0"


def test_an_extra_is_added_and_stays(finished: Checkout) -> None:
    command = 'source "$0/scripts/environment.sh"; prepare_environment "$1"'
    for extras in ("test", ""):
        script = ["bash", "-c", f"set -euo pipefail; {command}", str(finished.root), extras]
        run = subprocess.run(script, env=finished.environment(), capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert finished.installed("extra") == "1.0"
    assert run.stderr == "", "what has more than is needed is left as it is"


def test_a_package_that_went_missing_is_put_back(finished: Checkout) -> None:
    subprocess.run([finished.venv_python, "-m", "pip", "uninstall", "-yq", "tiny"], check=True)
    run = finished.start()
    assert run.returncode == 0, run.stderr
    assert finished.installed("tiny")


def test_an_interrupted_set_up_is_completed(checkout: Checkout) -> None:
    """pip was killed after it had unpacked a package's description, but not the package."""
    checkout.add_python("python3", 'case "$*" in *venv*re*po*) sleep 600;; esac')
    with subprocess.Popen(
        [checkout.root / "run_train.sh"],
        env=checkout.environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("setting up")
        unfinished = checkout.root / ".venv/torchtitan_diloco.unfinished"
        while not unfinished.exists():
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
        assert process.stderr.read() == "set-up stopped; the next start completes it\n"
    checkout.add_python("python3")
    subprocess.run([base_python(), "-m", "venv", checkout.root / ".venv"], check=True)
    [packages] = (checkout.root / ".venv/lib").glob("python*/site-packages")
    half = packages / "tiny-1.5.dist-info"
    half.mkdir()
    (half / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.5\n")
    run = checkout.start()
    assert run.returncode == 0, run.stderr
    assert "launched" in run.stdout, "tiny can be imported"


def test_two_first_starts_at_once(checkout: Checkout) -> None:
    starts = [
        subprocess.Popen(
            [checkout.root / "run_train.sh"],
            env=checkout.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = [start.communicate(timeout=60) for start in starts]
    assert [start.returncode for start in starts] == [0, 0], answers
    assert sum("\nset up in" in errors for _, errors in answers) == 1, "one did the work"


def test_a_python_that_has_everything_is_used_untouched(
    checkout: Checkout, finished: Checkout
) -> None:
    before = sorted(finished.venv_python.parents[1].rglob("*"))
    settings: list[dict[str, str]] = [
        {"PYTHON": str(finished.venv_python)},
        {"VIRTUAL_ENV": str(finished.venv_python.parents[1])},
        {"PATH": f"{finished.venv_python.parent}:{checkout.programs}"},
    ]
    for setting in settings:
        run = checkout.start(**setting, PYTHONDONTWRITEBYTECODE="1")
        assert run.returncode == 0, run.stderr
        assert "launched with" in run.stdout
        assert run.stderr == ""
    assert not checkout.venv_python.exists()
    assert sorted(finished.venv_python.parents[1].rglob("*")) == before


def test_a_python_that_lacks_something_is_named_and_left_alone(checkout: Checkout) -> None:
    checkout.fill_disk()
    run = checkout.start(PYTHON=base_python())
    assert run.stderr.startswith(
        f"{base_python()} lacks tiny (not installed); taking {checkout.root}/.venv\n"
    )


def test_a_newer_python_than_the_default_is_found(checkout: Checkout) -> None:
    checkout.add_python("python3", 'case "$1" in --version) echo Python 3.9.1;; esac; exit 1')
    checkout.add_python("python3.12")
    script = [
        "bash",
        "-c",
        'source "$0/scripts/environment.sh"; find_base_python',
        str(checkout.root),
    ]
    run = subprocess.run(script, env=checkout.environment(), capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "python3.12\n")


def test_an_installed_pip_does_the_part_of_a_missing_one(checkout: Checkout) -> None:
    if subprocess.run([base_python(), "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("needs pip in the Python under this virtual environment")
    checkout.add_python("python3", 'case "$*" in *ensurepip*) exit 1;; esac')
    run = checkout.start()
    assert run.returncode == 0, run.stderr
    assert "launched" in run.stdout


def test_no_python_that_is_new_enough(checkout: Checkout) -> None:
    checkout.add_python("python3", 'case "$1" in --version) echo Python 3.9.1; exit;; esac; exit 1')
    line = said_in_one_line(checkout.start())
    assert "no Python 3.11 or newer (python3 is Python 3.9.1); install one, or set PYTHON" in line
    (checkout.programs / "python3").unlink()
    assert "there is none on PATH" in said_in_one_line(checkout.start())


def test_a_chosen_python_that_is_unfit(checkout: Checkout) -> None:
    assert "PYTHON=nowhere is not a program" in said_in_one_line(checkout.start(PYTHON="nowhere"))
    checkout.add_python("old", "exit 1")
    assert "PYTHON=old is older than Python 3.11" in said_in_one_line(checkout.start(PYTHON="old"))


def test_neither_venv_nor_pip(checkout: Checkout) -> None:
    checkout.add_python("python3", 'case "$*" in *ensurepip*|*"-m pip"*) exit 1;; esac')
    assert "apt install python3-venv" in said_in_one_line(checkout.start())


def test_no_network(checkout: Checkout) -> None:
    run = checkout.start(
        PIP_NO_INDEX="", PIP_INDEX_URL="https://127.0.0.1:9/", PIP_FIND_LINKS="", PIP_RETRIES="1"
    )
    assert "pip cannot reach its package index" in said_in_one_line(run)


def test_a_package_that_the_index_lacks(checkout: Checkout) -> None:
    (checkout.wheels / "tiny-1.5-py3-none-any.whl").unlink()
    assert "pip's index has no versions for Python 3." in said_in_one_line(checkout.start())


def test_any_other_failure_shows_the_end_of_pips_output(checkout: Checkout) -> None:
    (checkout.root / "backend.py").write_text("raise RuntimeError('a broken build')\n")
    run = checkout.start()
    assert run.returncode == 1
    assert "a broken build" in run.stderr
    assert run.stderr.splitlines()[-1].endswith(
        f"all of pip's output is in {checkout.root}/.venv/install.log"
    )


def test_too_little_disk_space(checkout: Checkout) -> None:
    checkout.fill_disk()
    line = said_in_one_line(checkout.start())
    assert "has 20 MB of free disk space, and setting up needs at least" in line
    assert not (checkout.root / ".venv").exists()


def test_the_disk_runs_full(checkout: Checkout) -> None:
    checkout.add_python(
        "python3",
        'case "$*" in *"-m venv"*) echo "OSError: [Errno 28] No space left on device"; exit 1;; esac',
    )
    assert "no disk space left while setting up" in said_in_one_line(checkout.start())


def test_a_repository_that_cannot_be_written(checkout: Checkout) -> None:
    (checkout.root / ".cache").write_text(
        "a file where a folder is needed"
    )  # for root, permissions are no obstacle
    assert f"cannot write to {checkout.root}; copy" in said_in_one_line(checkout.start())


def test_a_venv_that_is_none_is_not_overwritten(checkout: Checkout) -> None:
    (checkout.root / ".venv").mkdir()
    (checkout.root / ".venv/thesis.txt").write_text("draft")
    assert "is not a virtual environment; move it elsewhere" in said_in_one_line(checkout.start())
    assert (checkout.root / ".venv/thesis.txt").exists()


@pytest.mark.parametrize(
    ("version", "specifiers", "expected"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.11", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11,<2.14", False),
        ("2.11.0a0+vendor", ">=2.11", True),
        ("10.0", ">9.9,!=10.1", True),
        ("1.0.0", "==1.0", True),
        ("1.0", "", True),
    ],
)
def test_version_specifiers(version: str, specifiers: str, expected: bool) -> None:
    assert fits(version, specifiers) is expected


def test_a_specifier_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot read the version specifier"):
        fits("1.0", "~=1.0")


def test_requirements_follow_the_extras_they_name() -> None:
    project = {
        "name": "torchtitan_diloco",
        "dependencies": ["torch>=2.11,<2.14"],
        "optional-dependencies": {
            "test": ["pytest>=8", "torchtitan_diloco[zstd]"],
            "zstd": ["zstandard"],
        },
    }
    conditional = {
        "name": "x",
        "dependencies": [
            "a>=1; platform_system == 'Nowhere'",
            f"b; platform_system == '{platform.system()}'",
        ],
    }
    assert requirements(conditional, []) == {"b": ""}
    with pytest.raises(ValueError, match="cannot read the condition"):
        requirements({"name": "x", "dependencies": ["a; python_version < '3.12'"]}, [])
    assert requirements(project, []) == {"torch": ">=2.11,<2.14"}
    assert requirements(project, ["test"]) == {
        "torch": ">=2.11,<2.14",
        "pytest": ">=8",
        "zstandard": "",
    }


def test_what_is_missing_is_told_in_words() -> None:
    def installed(name: str) -> str:
        if name == "absent":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    wanted = {"absent": "", "old": ">=2", "fine": ">=1"}
    assert missing(wanted, installed) == ["absent (not installed)", "old (1.0, needs >=2)"]
