"""Ranks agree at the start on all the code that they compute with."""

import os
import re
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import ProcessPool
from tests.test_trainer import join, settings
from torchtitan_diloco.base.user import PACKAGE, UserError
from torchtitan_diloco.components import common_facts
from torchtitan_diloco.components.common_facts import OWN_SETTINGS
from torchtitan_diloco.config import Config, load_config
from torchtitan_diloco.config.loader import SECRETS
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.diloco import agreement
from torchtitan_diloco.models import FLAVORS
from torchtitan_diloco.models.decoder import Decoder, resolve_shape
from torchtitan_diloco.trainer import Trainer

CHANGED = {
    "": "",
    "base/tensors.py": "code of base (install the same commit on all machines): ",
    "components/optimizer.py": "code of components (install the same commit on all machines): ",
    "data/loader.py": "code of data ",
    "diloco/arithmetic.py": "code of diloco ",
    "models/decoder.py": "code of models ",
    "trainer.py": "code of trainer.py ",
    "mine.py": "code of tests.test_agreement (use the same on all machines): ",
    "imported.py": "code of imported (use the same on all machines): ",
}
"""A file that differs on rank 1 -> the beginning of what the error says. None does in the first."""


class Mine(Decoder):
    """A model from outside the package."""


def build_mine(config: Model, vocab_size: int, _sequence_length: int) -> Mine:
    return Mine(resolve_shape(config), vocab_size)


def _start(chosen: dict[str, str], copies: dict[str, Path]) -> dict[str, str]:
    """Return the error for each file that differs on rank 1, which has a copy of the code."""
    config = load_config("debug", chosen)
    world = join(config)
    found = {}
    for changed, copy in copies.items():
        with pytest.MonkeyPatch.context() as patched:
            if world.rank == 1:
                patched.setattr(common_facts, "PACKAGE", copy)
                patched.setattr(agreement, "PLACES", (copy / "diloco", copy / "base"))
            if changed == "mine.py":
                patched.setitem(FLAVORS, "debug", build_mine)
                patched.setattr(sys.modules[__name__], "__file__", f"{copy}/{world.rank}/mine.py")
            started = config
            if changed == "imported.py":  # by `run.imports`
                module = ModuleType("imported")
                module.__file__ = f"{copy}/{world.rank}/imported.py"
                patched.setitem(sys.modules, "imported", module)
                started = replace(config, run=replace(config.run, imports=("imported",)))
            try:
                Trainer(started, world)
                found[changed] = ""
            except UserError as error:
                found[changed] = str(error)
    return found


def test_ranks_with_other_code_are_refused(text: Path, processes: ProcessPool) -> None:
    """The error names the part that differs. Where the code lies makes no difference."""
    copies = {changed: text.parent / f"copy of {changed}" for changed in CHANGED}
    for changed, copy in copies.items():
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if (copy / changed).is_file():
            (copy / changed).write_text((copy / changed).read_text() + "# other\n")
    for rank in range(2):
        for name in ("mine.py", "imported.py"):
            mine = copies[name] / f"{rank}/{name}"
            mine.parent.mkdir()
            mine.write_text(f"VERSION = {rank}")
    for found in processes.run(_start, 2, settings(text, diloco__workers=2), copies):
        assert found.pop("") == ""
        assert found.keys() == CHANGED.keys() - {""}
        for changed, message in found.items():
            headline, line = message.split("\n")
            assert headline.startswith("ranks were started differently")
            assert line.startswith(f"  {CHANGED[changed]}")
            assert re.search(r": (\w{16}) on rank 0, (?!\1)\w{16} on rank 1$", line)


SECRET = "hidden"
JOIN = f"""
location = "s3://islands/one"
access_key_id = "lab"
secret_access_key = "{SECRET}"
"""


def _start_island(chosen: dict[str, str], joins: list[str]) -> str:
    """Return the error if this rank of an island was given this location or join file."""
    rank = int(os.environ["RANK"])
    config = load_config("debug", chosen | {"islands.join": joins[rank]})
    try:
        Trainer(config, join(config))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_of_an_island_compare_its_run_without_the_login(
    text: Path, processes: ProcessPool
) -> None:
    """A join file and the location in it are the same run."""
    file = text.parent / "join.toml"
    file.write_text(JOIN)
    other = text.parent / "other.toml"
    other.write_text(JOIN.replace("one", "two"))
    island = settings(text, diloco__method="streaming", islands__name="a")
    same = [str(file), "s3://islands/one"]
    assert processes.run(_start_island, 2, island, same) == ["", ""]
    for message in processes.run(_start_island, 2, island, [str(file), str(other)]):
        assert re.search(r"  run in islands.join: (islands-\w+) on rank 0, (?!\1)islands-", message)
        assert SECRET not in message


def test_all_settings_that_are_not_shown_are_secrets() -> None:
    """Neither errors nor other ranks get their values."""
    sections = {part.name: part.default_factory for part in fields(Config)}
    hidden = {
        f"{name}.{setting.name}"
        for name, section in sections.items()
        for setting in fields(section)  # type: ignore[arg-type]
        if not setting.repr
    }
    assert hidden == set(SECRETS)
    assert hidden < OWN_SETTINGS
