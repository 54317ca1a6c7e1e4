"""Set-up by run_train.sh and scripts/check.sh, in a small repository that needs one package from a
folder of wheels."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import packaging
import pytest

from tests.conftest import REPOSITORY

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "torchtitan_diloco"
version = "0.1.0"
dependencies = ["tiny>=1.0,<3", "absent; platform_system == 'Nowhere'"]

[project.optional-dependencies]
test = ["torchtitan_diloco[more]"]
more = ["extra>=1"]
dev = ["ruff", "mypy>=1"]
"""
# A build backend that needs nothing installed. Its editable wheel adds the folder to the path.
BACKEND = """
import os, zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    files = {"METADATA": "Metadata-Version: 2.1\\nName: torchtitan_diloco\\nVersion: 0.1.0\\n"
        "Requires-Dist: tiny\\nProvides-Extra: test\\nRequires-Dist: extra; extra == 'test'\\n",
        "entry_points.txt": "[console_scripts]\\ntorchtitan-diloco = torchtitan_diloco.cli:main\\n",
        "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n", "RECORD": ""}
    name = "torchtitan_diloco-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("torchtitan_diloco.pth", os.getcwd())
        for file, text in files.items():
            wheel.writestr("torchtitan_diloco-0.1.0.dist-info/" + file, text)
    return name
"""
SCRIPTS = ("check.sh", "environment.sh", "requirements.py")
LAUNCH = "import sys, tiny; print('launched with', sys.executable, tiny.version, sys.argv[2:])"
COMMAND = "def main(): print('the one command')"
BASE_PYTHON = (
    Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
)
PATIENCE = 200
"""Seconds after which a start hangs."""
HAS_PIP = not subprocess.run([BASE_PYTHON, "-m", "pip", "-V"], capture_output=True).returncode


def write_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)


class Checkout:
    """A clean checkout, on a machine with few programs."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "re po"
        self.programs = folder / "programs"
        self.wheels = folder / "wheels"
        package = self.root / "torchtitan_diloco"
        scripts = self.root / "scripts"
        for path in (package, scripts, self.programs, self.wheels):
            path.mkdir(parents=True)
        for file in ("run_train.sh", *map("scripts/{}".format, SCRIPTS)):
            shutil.copy(REPOSITORY / file, self.root / file)
        (self.root / "pyproject.toml").write_text(PYPROJECT)
        (self.root / "constraints.txt").write_text("# comment\ntiny==1.5\n")
        (self.root / "backend.py").write_text(BACKEND)
        (self.root / "torchtitan_diloco/__main__.py").write_text(LAUNCH)
        (self.root / "torchtitan_diloco/cli.py").write_text(COMMAND)
        for name, version in (("tiny", "1.5"), ("tiny", "2.0"), ("extra", "1.0")):
            write_wheel(self.wheels, name, version)
        for name in ("ruff", "mypy"):
            write_wheel(self.wheels, name, "1.0")
        # The requirements bring `packaging`, as tensorboard does in the real repository.
        (self.wheels / "packaging").symlink_to(Path(packaging.__file__).parent)
        if HAS_PIP:  # a set-up takes a third of the time with the pip of the base Python
            no_ensurepip = "import sys; sys.modules['ensurepip'] = None"
            (self.wheels / "sitecustomize.py").write_text(no_ensurepip)
        for program in ("bash", "dirname", "mkdir", "mv", "rm", "tail", "touch"):
            (self.programs / program).symlink_to(str(shutil.which(program)))
        self.add_python("python3")

    def add_python(self, name: str, first: str = "") -> None:
        """Put a Python on PATH. The shell code `first` runs before it."""
        (self.programs / name).write_text(f'#!/bin/sh\n{first}\nexec "{BASE_PYTHON}" "$@"\n')
        (self.programs / name).chmod(0o755)

    def start(
        self, *arguments: str, script: str = "run_train.sh", **variables: str
    ) -> "subprocess.Popen[str]":
        environment = {
            "PATH": str(self.programs),
            "HOME": str(self.wheels),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": self.wheels.as_uri(),
            "PIP_CONFIG_FILE": os.devnull,
            "PYTHONPATH": str(self.wheels),
        }
        return subprocess.Popen(
            [self.root / script, *arguments],
            env={**environment, **variables},
            cwd=self.wheels,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, *arguments: str, script: str = "run_train.sh", **variables: str
    ) -> tuple[int, str, str]:
        """Return the exit code, and what was printed on stdout and stderr."""
        process = self.start(*arguments, script=script, **variables)
        output, errors = process.communicate(timeout=PATIENCE)
        return process.returncode, output, errors


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout after its first start. The tests that share it leave it complete."""
    checkout = Checkout(tmp_path_factory.mktemp("finished"))
    venv = checkout.root / ".venv"
    code, output, errors = checkout.run("--config", "x y")
    assert (code, output) == (0, f"launched with {venv}/bin/python 1.5 ['--config', 'x y']\n")
    assert errors == f"setting up {venv} (minutes, once; {venv}/install.log shows how far it is)\n"
    command = venv / "bin/torchtitan-diloco"
    elsewhere = checkout.wheels
    assert (
        subprocess.check_output([command], cwd=elsewhere, env={}, text=True) == "the one command\n"
    )
    return checkout


def test_all_that_is_missing_is_named_and_installed(finished: Checkout) -> None:
    """Requirements have changed, and pip was killed before it had written a package."""
    python = finished.root / ".venv/bin/python"
    venv = finished.root / ".venv"

    def missing(extras: str) -> str:
        command: list[str | Path] = [python, finished.root / "scripts/requirements.py", extras]
        path = {"PYTHONPATH": str(finished.wheels)}
        outcome = subprocess.run(command, env=path, stderr=subprocess.PIPE, text=True, check=False)
        return outcome.stderr.strip()

    assert (missing(""), missing("test")) == ("", "extra (not installed)")
    constraints = finished.root / "constraints.txt"
    script = finished.root / "run_train.sh"
    constraints.write_text("tiny==2.0\n")
    assert missing("") == "tiny==2.0 (has 1.5)"
    constraints.write_text("tiny==1.5\n")
    (venv / "unfinished").touch()
    assert missing("") == "the end of an interrupted set-up"

    constraints.write_text("tiny==2.0\n")
    [package] = venv.glob("lib/python*/site-packages/tiny.py")
    package.unlink()
    train = script.read_text()
    script.write_text(train.replace('prepare_environment ""', "prepare_environment test"))
    code, output, errors = finished.run()
    assert (code, "bin/python 2.0 []" in output) == (0, True), errors
    assert (missing("test"), finished.run()[2]) == ("", "")
    script.write_text(train)
    assert finished.run(PIP_FIND_LINKS="")[2] == "", "an extra stays, no index is needed"

    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to("/nowhere/python3.9")
    code, output, errors = finished.run()
    assert (code, output.count("launched")) == (0, 1), errors


def test_a_set_up_that_fails_leaves_what_works(checkout: Checkout) -> None:
    venv = checkout.root / ".venv"
    script = checkout.root / "run_train.sh"
    constraints = checkout.root / "constraints.txt"
    assert checkout.run()[0] == 0
    files = {path for path in venv.rglob("*") if path.suffix != ".pyc"}

    def fails_without_a_network() -> None:
        code, _, errors = checkout.run(PIP_FIND_LINKS="")
        assert code == 1
        assert "error: setting up" in errors

    train = script.read_text()
    script.write_text(train.replace('prepare_environment ""', "prepare_environment test"))
    fails_without_a_network()
    assert not (venv / "unfinished").exists()
    script.write_text(train)
    assert checkout.run(PIP_FIND_LINKS="")[::2] == (0, "")

    constraints.write_text("tiny==2.0\n")
    fails_without_a_network()
    constraints.write_text("tiny==1.5\n")
    assert checkout.run(PIP_FIND_LINKS="")[::2] == (0, "")

    base = (venv / "bin/python").readlink()
    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to("/nowhere/python3.9")
    fails_without_a_network()
    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to(base)
    assert checkout.run(PIP_FIND_LINKS="")[::2] == (0, "")
    assert {path for path in venv.rglob("*") if path.suffix != ".pyc"} == files


def test_a_set_up_that_was_killed_is_judged_by_what_it_has_left(finished: Checkout) -> None:
    venv = finished.root / ".venv"
    mark = venv / "unfinished"
    [packages] = venv.glob("lib/python*/site-packages")
    half_written = packages / "extra-1.0.dist-info"
    half_written.mkdir()
    (half_written / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    mark.touch()
    assert finished.run(PIP_FIND_LINKS="")[::2] == (0, ""), "training does not need it"
    assert not mark.exists()
    assert not half_written.exists(), "pip would take it for installed"

    mark.touch()
    (packages / "tiny.py").unlink()  # pip was removing it
    code, output, _ = finished.run()
    assert (code, "launched" in output, mark.exists()) == (0, True, False)

    [metadata] = packages.glob("tiny-*.dist-info/METADATA")
    text = metadata.read_text()
    metadata.write_text(f"{text}Requires-Dist: needed\n")  # pip was replacing it
    script = finished.root / "scripts/requirements.py"
    command: list[str | Path] = [venv / "bin/python", script, "--mend"]
    path = {"PYTHONPATH": str(finished.wheels)}
    mended = subprocess.run(command, env=path, stderr=subprocess.PIPE, text=True, check=False)
    metadata.write_text(text)
    assert (mended.returncode, mended.stderr) == (1, "needed (not installed)\n")


def test_checks_are_installed_beside_the_environment_of_the_tests(checkout: Checkout) -> None:
    venv = checkout.root / ".venv"
    layer = venv / "layer-dev"
    code, output, errors = checkout.run(script="scripts/check.sh")
    assert code == 0, errors
    assert f"setting up {layer} (once; {layer}.log shows how far it is)\n" in errors
    assert output.count("== ") == 3, output

    def has(environment: Path, *modules: str) -> bool:
        command = [str(environment / "bin/python"), "-c", f"import {', '.join(modules)}"]
        return subprocess.run(command, stderr=subprocess.PIPE, env={}).returncode == 0

    assert has(venv, "tiny", "extra")
    assert not has(venv, "ruff")
    assert has(layer, "tiny", "extra", "ruff", "mypy")
    assert checkout.run(script="scripts/check.sh", PIP_FIND_LINKS="") == (0, output, "")

    [module] = layer.glob("lib/python*/site-packages/ruff.py")
    module.write_text("import sys; sys.exit('format' in sys.argv)")
    code, output, errors = checkout.run(script="scripts/check.sh")
    assert (code, errors) == (1, "")
    assert output.endswith("== mypy\n\nfailed: ruff format --check\n"), "the others run as well"
    assert checkout.run("--fx", script="scripts/check.sh")[0] == 2

    project = checkout.root / "pyproject.toml"
    project.write_text(PYPROJECT.replace('dev = ["ruff"', 'dev = ["new", "ruff"'))
    code, _, errors = checkout.run(script="scripts/check.sh")
    assert (code, f"error: setting up {layer} failed" in errors) == (1, True)
    assert has(layer, "tiny", "ruff", "mypy"), "the layer before stays"


def test_a_complete_python_is_used_untouched(checkout: Checkout, finished: Checkout) -> None:
    venv = finished.root / ".venv"
    before = sorted(venv.rglob("*"))
    for name, value in {
        "PYTHON": f"{venv}/bin/python",
        "VIRTUAL_ENV": str(venv),
        "PATH": f"{venv}/bin:{checkout.programs}",
    }.items():
        code, output, errors = checkout.run(PYTHONDONTWRITEBYTECODE="1", **{name: value})
        assert (code, errors) == (0, "")
        assert "launched" in output
    assert sorted(venv.rglob("*")) == before
    assert not (checkout.root / ".venv").exists()


def test_a_relative_python_is_that_of_the_folder_of_the_start(finished: Checkout) -> None:
    tests = (REPOSITORY / "run_tests.sh").read_text()
    script = finished.root / "run_tests.sh"
    script.write_text(tests.replace("prepare_environment test", 'prepare_environment ""'))
    script.chmod(0o755)
    (finished.wheels / "pytest.py").write_text("import os; print('tests of', os.getcwd())")
    (finished.wheels / "checkout").symlink_to(finished.root)
    python = "checkout/.venv/bin/python"
    code, output, errors = finished.run(script="run_tests.sh", PYTHON=python)
    assert (code, output, errors) == (0, f"tests of {finished.root}\n", "")


def test_two_first_starts_at_once_with_ensurepip(checkout: Checkout) -> None:
    starts = [checkout.start(PYTHONPATH="") for _ in range(2)]
    outputs = [start.communicate(timeout=PATIENCE) for start in starts]
    assert [start.returncode for start in starts] == [0, 0], outputs
    assert sum("minutes, once" in errors for _, errors in outputs) == 1


def test_ctrl_c_during_the_set_up(checkout: Checkout) -> None:
    checkout.add_python("python3", 'case "$*" in *"-m venv"*) exec sleep 600;; esac')
    (checkout.programs / "sleep").symlink_to(str(shutil.which("sleep")))
    start = checkout.start()
    while not (checkout.root / ".venv/install.log").exists():
        time.sleep(0.02)
    os.killpg(start.pid, signal.SIGINT)  # as a terminal does
    _, errors = start.communicate(timeout=PATIENCE)
    assert start.returncode != 0
    assert "Traceback" not in errors
    assert (checkout.root / ".venv/unfinished").exists(), "the next start begins anew"


@pytest.mark.parametrize(
    ("python3", "variables", "message"),
    [
        ("exit 1", {}, "there is no Python 3.11 or newer on PATH; install one, or set PYTHON"),
        ("", {"PYTHON": "nowhere"}, "PYTHON=nowhere is not Python 3.11 or newer"),
        (
            'case "$*" in *"-m pip"*) exit 1;; esac',
            {},
            "has neither ensurepip nor pip; install one of them (Debian, Ubuntu: apt install",
        ),
        ("", {"PIP_FIND_LINKS": ""}, "failed, as shown above and in"),
        ("", {"PYTHON": str(BASE_PYTHON)}, f"{BASE_PYTHON} lacks tiny (not installed); using "),
    ],
)
def test_failures(
    checkout: Checkout, python3: str, variables: dict[str, str], message: str
) -> None:
    checkout.add_python("python3", python3)
    if "lacks" in message:
        (checkout.root / ".venv").write_text("a file")  # stops the set-up
    code, output, errors = checkout.run(**variables)
    assert (code, output) == (1, "")
    assert message in errors
    assert errors.splitlines()[-1].startswith("error: ")
    assert ("error: cannot write to" in errors) == ("lacks" in message)
