"""Ranks agree at the start on all the code that they compute with."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import ProcessPool
from tests.test_trainer import join, settings
from torchtitan_diloco import trainer
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.diloco import agreement
from torchtitan_diloco.models import FLAVORS
from torchtitan_diloco.models.decoder import Decoder, resolve_shape
from torchtitan_diloco.trainer import Trainer
from torchtitan_diloco.user import UserError

CHANGED = {
    "": "",
    "components/optimizer.py": "code of components (install the same commit on all machines): ",
    "data/loader.py": "code of data ",
    "diloco/arithmetic.py": "code of diloco ",
    "models/decoder.py": "code of models ",
    "trainer.py": "code of trainer.py ",
    "mine.py": "code of mine.py ",
}
"""A file that differs on rank 1 -> the beginning of what the error says. None does in the first."""


class Mine(Decoder):
    """A model from outside the package."""


def build_mine(config: Model, vocab_size: int, _sequence_length: int) -> Mine:
    return Mine(resolve_shape(config), vocab_size)


def _start(chosen: dict[str, str], copies: dict[str, Path]) -> dict[str, str]:
    """Return the error for each file that differs on rank 1, which has a copy of the code."""
    config = load_config("debug", chosen)
    world, found = join(config), {}
    for changed, copy in copies.items():
        with pytest.MonkeyPatch.context() as patched:
            if world.rank == 1:
                patched.setattr(trainer, "PACKAGE", copy)
                patched.setattr(agreement, "PACKAGE", copy / "diloco")
            if changed == "mine.py":
                patched.setitem(FLAVORS, "debug", build_mine)
                patched.setattr(sys.modules[__name__], "__file__", f"{copy}/{world.rank}/mine.py")
            try:
                Trainer(config, world)
                found[changed] = ""
            except UserError as error:
                found[changed] = str(error)
    return found


def test_ranks_with_other_code_are_refused(text: Path, processes: ProcessPool) -> None:
    """The error names the part that differs. Where the code lies makes no difference."""
    copies = {changed: text.parent / f"copy of {changed}" for changed in CHANGED}
    for changed, copy in copies.items():
        shutil.copytree(trainer.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if (copy / changed).is_file():
            (copy / changed).write_text((copy / changed).read_text() + "# other\n")
    for rank in range(2):
        mine = copies["mine.py"] / f"{rank}/mine.py"
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
