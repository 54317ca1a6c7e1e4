"""The parts that docs/own-parts.md adds are trained, saved, resumed and planned."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from tests.components.test_resume import assert_same_end, run
from tests.conftest import REPOSITORY
from tests.processes import ProcessPool
from tests.test_trainer import LOSS, curve, records, settings, words
from torchtitan_diloco.base.registry import import_modules, imports_words
from torchtitan_diloco.components.lr_schedule import lr_factor
from torchtitan_diloco.components.run_plan import plan_run
from torchtitan_diloco.config import ConfigError, load_config, parse_config, to_toml
from torchtitan_diloco.config.parts import BOARDS, OPTIMIZERS, SCHEDULES, SOURCES
from torchtitan_diloco.data.pieces import BEGINNING
from torchtitan_diloco.data.prepare import main as prepare
from torchtitan_diloco.data.shards import INDEX_NAME
from torchtitan_diloco.data.text import open_corpus
from torchtitan_diloco.export import __main__ as commands

PAGE = (REPOSITORY / "docs/own-parts.md").read_text()
DICTS = (OPTIMIZERS, SCHEDULES, SOURCES, BOARDS)


def settings_of_page() -> dict[str, str]:
    """Return the settings of all commands of the page, which a run may have together."""
    commands = re.findall(r"^\./run_train\.sh (.*)$", PAGE, re.M)
    pairs = re.findall(r"--(\S+) ([^-]\S*(?: [^-]\S*)*)", " ".join(commands))
    return dict(pairs)


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Let modules be imported from a folder, and forget what they add."""
    before = [dict[str, Any](entries) for entries in DICTS]
    path = [*sys.path]
    try:
        with chdir(folder):
            yield
    finally:
        sys.path[:] = path
        sys.modules.pop("mine", None)
        for entries, kept in zip(DICTS, before, strict=True):
            cast(dict[str, Any], entries).clear()
            cast(dict[str, Any], entries).update(kept)


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """Write the programs of the page into `mine.py` of the current folder, and return its path."""
    path = tmp_path / "mine.py"
    path.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)))
    with importing_from(tmp_path):
        yield path


def chosen(folder: Path, **changes: Any) -> dict[str, str]:
    streaming = {
        "training.steps": 16,
        "training.batch_size": 3,
        "diloco.method": "streaming",
        "diloco.workers": 2,
        "diloco.sync_every": 6,
        "parallel.fsdp": 2,
        "checkpoint.at_end": "true",
        "run.folder": folder,
    }
    return settings(folder.parent / "mine.py", **(streaming | settings_of_page() | changes))


def train_in(folder: Path, wanted: dict[str, str]) -> str:
    """Train as a rank."""
    with importing_from(folder):
        return run(wanted)


def test_a_run_with_all_of_them_learns_and_resumes_to_the_bit(
    mine: Path, processes: ProcessPool, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = mine.parent / "whole"
    parts = mine.parent / "parts"
    for folder, stop in ((whole, 0), (parts, 8), (parts, 0)):
        processes.run(train_in, 4, mine.parent, chosen(folder, training__stop_after=stop))
    losses = curve(records(whole), LOSS)
    assert losses[-1] < losses[0]
    assert losses == curve(records(parts), LOSS)
    assert_same_end(whole, parts)
    for worker in range(2):
        assert (whole / f"worker-{worker}/curves.csv").read_text().count("\n") > 16
    assert len(list(whole.glob("worker-0/events*"))) == 1

    generate = ["generate", str(whole), "--tokens", "2", "--device", "cpu"]
    assert commands.main(generate) == 2
    reason = "a checkpoint does not choose what is imported: add --imports mine if it is yours"
    assert reason in capsys.readouterr().err
    assert commands.main([*generate, "--imports", "mine"]) == 0


def test_the_launcher_and_its_ranks_import_it(mine: Path) -> None:
    wanted = chosen(mine.parent / "run", training__steps=2, parallel__fsdp=1)
    command = [sys.executable, "-m", "torchtitan_diloco", "train", "--config", "debug"]
    outcome = subprocess.run(
        [*command, *words(wanted)], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert len(curve(records(mine.parent / "run"), LOSS)) == 2


@pytest.mark.usefixtures("mine")
def test_settings_know_what_a_module_adds() -> None:
    given = settings_of_page()
    config = load_config("debug", given)
    assert config.run.imports == ("mine",)
    assert config.optimizer.options == {"smoothing": 0.95}
    assert load_config("debug", {**given, "optimizer.options": "{}"}).optimizer.options == {
        "smoothing": 0.99
    }
    assert config.metrics.boards == ("tensorboard", "lines")
    assert parse_config(to_toml(config), "saved") == config
    assert lr_factor(400, 1000, config.lr_schedule) == pytest.approx((200 / 400) ** 0.5)
    plan = plan_run(
        config.training,
        ranks=2,
        parameters=100,
        embedding_parameters=50,
        optimizer=OPTIMIZERS[config.optimizer.name],
    )
    assert plan.inner_bytes == 4 + 4 + 4
    assert imports_words()[-2:] == ["--imports", "mine"], "for the syncer"


def test_prepare_knows_a_source_and_continues_it(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--tokenizer", "bytes", "--out", "shards"]
    with pytest.raises(SystemExit):
        prepare(["--source", "sums:3", "--imports", "absent", *out])
    assert "--imports: absent cannot be imported (ModuleNotFoundError" in capsys.readouterr().err
    prepare(["--source", "sums:3", "--imports", "mine", *out])
    assert (mine.parent / "shards" / INDEX_NAME).exists()

    corpus = open_corpus("sums:40")
    located = list(corpus.read(BEGINNING).pieces)
    assert len(located) == 40
    for number, (_, place) in enumerate(located, start=1):
        assert list(corpus.read(place).pieces) == located[number:]


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizer.name": "rmspro"}, "expected one of adamw, muon, rmsprop; did you mean rmspr"),
        ({"optimizer.options": "smooth=1"}, "rmsprop has no option smooth; did you mean smoothing"),
        ({"optimizer.options": "alpha=1"}, "rmsprop has no option alpha; it has smoothing"),
        ({"optimizer.options": "smoothing=x"}, "has the option smoothing = 'x': expected a number"),
        ({"optimizer.options": "3"}, "expected options by name, such as {"),
        ({"optimizer.name": "adamw"}, "adamw has no option smoothing: remove it"),
        ({"metrics.boards": "lines:x"}, "expected one of tensorboard, wandb:PROJECT, "),
        ({"metrics.boards": "wandb"}, "expected one of tensorboard, wandb:PROJECT, "),
        ({"metrics.boards": "none lines"}, "expected one of tensorboard, "),
    ],
)
def test_what_they_do_not_have_is_refused(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("debug", settings_of_page() | changes)
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("absent", None, r"ModuleNotFoundError: No module named 'absent'\): correct it, or give"),
        ("wrong", "\nmissing.thing", r"NameError: name 'missing' is not .*/wrong.py:2\): correct"),
        ("wrong", "import sys; sys.exit('no')", r"SystemExit: no, .*wrong.py:1\): "),
        ("wrong", "a b", r"SyntaxError: invalid syntax \(wrong.py, line 1\)\): "),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, name: str, text: str | None, reason: str
) -> None:
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    match = rf'run.imports = "{name}": {name} cannot be imported .*{reason}'
    with importing_from(tmp_path), pytest.raises(ConfigError, match=match):
        load_config("debug", {"run.imports": name})


def test_an_empty_name_of_a_module_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"the name of a module is empty: give one, such as"):
        load_config("debug", {"run.imports": "''"})


def test_modules_with_an_open_quote_are_a_mistake() -> None:
    match = r'command line: run.imports = "it\'s": no closing quotation: write each quote and'
    with pytest.raises(ConfigError, match=match):
        load_config("debug", {"run.imports": "it's"})


def test_what_is_no_entry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "mine", print)
    with pytest.raises(ConfigError, match=r"mine was added as <built-in .*>: add an Entry, such"):
        load_config("debug", {"optimizer.name": "mine"})
    with pytest.raises(ConfigError, match=r"expected one of adamw, muon, mine"):
        load_config("debug", {"optimizer.name": "x"})


@pytest.mark.usefixtures("mine")
def test_a_checkpoint_does_not_choose_what_is_imported() -> None:
    import_modules(["mine"])
    for named in ("other", "['mine', 'other']"):
        toml = f"[run]\nimports = {named if named.startswith('[') else [named]}"
        with pytest.raises(ConfigError, match="add --imports other if it is yours"):
            parse_config(toml, "saved")
    with pytest.raises(ConfigError, match="expected a list of names"):
        parse_config("[run]\nimports = 'mine'", "saved")
