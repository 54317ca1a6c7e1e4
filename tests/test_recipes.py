"""Recipes of examples/recipes: their schemas, and their commands on this machine.

No cloud is reached: Slurm, Kubernetes and SkyPilot have stand-ins, or none.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY
from torchtitan_diloco.config import Config, from_command_line
from torchtitan_diloco.islands.__main__ import main as islands
from torchtitan_diloco.islands.bucket_folder import open_folder
from torchtitan_diloco.islands.rules.names import OWNER

RECIPES = REPOSITORY / "examples/recipes"
DOCUMENTS = list(yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text()))


@pytest.fixture
def join(tmp_path: Path) -> str:
    """Return the path of the owner's join file."""
    folder = open_folder(tmp_path / "bucket", address="host", host=None, port=None)
    folder.save_settings()
    return str(folder.join_file(OWNER))


def container(kind: str) -> dict[str, Any]:
    (document,) = (one for one in DOCUMENTS if one["kind"] == kind)
    (found,) = document["spec"]["template"]["spec"]["containers"]
    return dict(found)


def settings_of(words: list[str]) -> Config:
    return from_command_line(words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["kind"])
def test_kubernetes_has_these_objects(document: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    validate.validate(document, validate.latest_version(), strict=True)


def test_the_parts_of_kubernetes_find_each_other() -> None:
    by_kind = {one["kind"]: one for one in DOCUMENTS}
    labels = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert by_kind["Service"]["spec"]["selector"] == labels
    assert f"--address={by_kind['Service']['metadata']['name']}" in container("Deployment")["args"]
    (port,) = by_kind["Service"]["spec"]["ports"]
    assert port["port"] == container("Deployment")["ports"][0]["containerPort"]
    for kind in ("Deployment", "Job"):
        template = by_kind[kind]["spec"]["template"]["spec"]
        mounts = {mount["name"] for mount in container(kind)["volumeMounts"]}
        assert mounts == {volume["name"] for volume in template["volumes"]}
    rules = by_kind["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert 128 + signal.SIGTERM in rules[1]["onExitCodes"]["values"]


def test_the_island_of_kubernetes_has_settings_that_exist(join: str) -> None:
    train, *words = container("Job")["args"]
    words = [word.replace("/join/join.toml", join) for word in words]
    config = settings_of([word.replace("$(JOB_COMPLETION_INDEX)", "3") for word in words])
    assert train == "train"
    assert config.islands.name == "island-3"
    jobs = next(one["spec"]["completions"] for one in DOCUMENTS if one["kind"] == "Job")
    assert config.workers == jobs


def test_the_server_of_kubernetes_has_options_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, *words = container("Deployment")["args"]
    assert command == "islands"
    with pytest.raises(SystemExit):
        islands([*words, "--help"])
    shown = capsys.readouterr().out
    for word in words[1:]:
        assert word.startswith("/") or word.partition("=")[0] in shown


SCONTROL = '#!/bin/sh\necho "scontrol $*" >> "$RECORD"\n'
TRAIN = """#!/usr/bin/env bash
echo "train $*" >> "$RECORD"
trap 'sleep 0.2; echo stopped >> "$RECORD"; exit 143' TERM
[ "$CODE" = wait ] || exit "$CODE"
echo ready
while :; do sleep 0.05; done
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Return an environment with stand-ins for Slurm and for run_train.sh."""
    for name, text in {"bin/scontrol": SCONTROL, "repository/run_train.sh": TRAIN}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path / "repository"),
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_ID": "2",
        "RECORD": str(tmp_path / "record"),
    }


def test_a_job_of_the_array_passes_the_signal_on_and_is_queued_again(
    slurm: dict[str, str],
) -> None:
    job = subprocess.Popen(
        [RECIPES / "slurm-islands.sh", "--config", "1b"],
        env=slurm | {"CODE": "wait"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 143
    train, stopped, requeued = Path(slurm["RECORD"]).read_text().splitlines()
    assert "--islands.name island-2 --run.folder outputs/77/island-2 --config 1b" in train
    assert (stopped, requeued) == ("stopped", "scontrol requeue 77_2")


@pytest.mark.parametrize("code", [0, 2, 4])
def test_a_job_of_the_array_that_has_ended_is_not_queued_again(
    slurm: dict[str, str], code: int
) -> None:
    done = subprocess.run([RECIPES / "slurm-islands.sh"], env=slurm | {"CODE": str(code)})
    assert done.returncode == code
    assert "requeue" not in Path(slurm["RECORD"]).read_text()


def test_skypilot_starts_an_island_with_settings_that_exist(tmp_path: Path, join: str) -> None:
    task = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    known = {"name", "workdir", "resources", "envs", "secrets", "setup", "run"}
    assert task.keys() == known, "fields of its documented YAML"
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    program = tmp_path / "venv/bin/torchtitan-diloco"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n')
    program.chmod(0o755)
    environment = task["envs"] | {"HOME": str(tmp_path), "JOIN": Path(join).read_text().strip()}
    Path(join).unlink()  # the recipe writes its own
    environment["PATH"] = os.environ["PATH"]
    done = subprocess.run(
        ["bash", "-c", task["run"]], env=environment, capture_output=True, text=True, check=True
    )
    train, *words = done.stdout.splitlines()
    config = settings_of(words)
    assert train == "train"
    assert config.run.preemption == "aws"
    assert Path(config.islands.join).stat().st_mode & 0o077 == 0, "it has a password"


def test_the_commands_of_the_container_file_run_in_an_empty_folder(tmp_path: Path) -> None:
    """Without a network: what it would download is installed here."""
    root = tmp_path / "root"
    python = tmp_path / "venv/bin/python"
    venv.EnvBuilder(symlinks=True).create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/*/site-packages")
    installed = [path for path in sys.path if path.endswith("-packages")]
    (packages / "all.pth").write_text("\n".join(installed))
    offline = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the option's value, not as its name
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    folder = root
    entry = list[str]()
    for line in (RECIPES / "Containerfile").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "WORKDIR":
            folder = root / rest.lstrip("/")
            folder.mkdir(parents=True)
        elif word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                there = folder / target
                ignored = shutil.ignore_patterns("__pycache__")
                if (REPOSITORY / source).is_dir():
                    shutil.copytree(REPOSITORY / source, there, symlinks=True, ignore=ignored)
                else:
                    shutil.copy(REPOSITORY / source, there)
        elif word == "RUN":
            subprocess.run(rest, shell=True, cwd=folder, env=offline, check=True)
        elif word in ("ENTRYPOINT", "CMD"):
            entry += json.loads(rest)
    shutil.rmtree(root / "opt")  # the package does not need its sources
    done = subprocess.run(entry, cwd=folder, env=offline, capture_output=True, text=True)
    assert done.stdout.startswith("usage: torchtitan-diloco train"), done.stderr
    settings = {
        "training.steps": "3",
        "lr_schedule.warmup": "1",
        "diloco.workers": "1",
        "validation.every": "0",
        "metrics.boards": "none",
        "run.folder": "a",
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    done = subprocess.run(
        [entry[0], "train", "--config", "debug", *words],
        cwd=folder,
        env=offline,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "a/worker-0/step-00000003/manifest.json").exists()


@pytest.mark.parametrize("path", sorted(RECIPES.iterdir()), ids=lambda path: path.name)
def test_the_files_that_a_recipe_names_are_there(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"(?:examples|docs|scripts)/[\w./-]+\w", text):
        assert (REPOSITORY / name).exists(), name
    for line in re.findall(r"^#     (.*)", text, re.M):
        assert shlex.split(line)
