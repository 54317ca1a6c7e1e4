import dataclasses
import os
import re
import signal
import subprocess
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.conftest import REPOSITORY
from tests.data.conftest import MakeShards
from tests.processes import DIED, ProcessPool
from torchtitan_diloco.base.user import UserError, command_line
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.schema import Data
from torchtitan_diloco.data.corpus import open_split
from torchtitan_diloco.data.pieces import PIECE_CHARACTERS
from torchtitan_diloco.data.shards import FORMAT_VERSION, Index, TokenShards, write_index
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.launching.preflight import check_inputs

BYTES = build_tokenizer("bytes")


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Twenty documents of about a thousand tokens, one in ten held out."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number:02d}.txt").write_text(f"{number} " * 350)
    return Data(corpus=str(text), validation_fraction=0.1, cache_folder=str(tmp_path / "cache"))


def ends(shards: TokenShards) -> int:
    return int((shards.read(0, len(shards)) == BYTES.end_of_document).sum())


def test_text_is_tokenized_once(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    train = open_split(data, BYTES, "train")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"data: tokenized {data.corpus} with bytes in ")
    assert f"{len(train):,} tokens in 18 documents to train on" in line
    (train.folder / ".lock").unlink()
    validation = open_split(data, BYTES, "validation")
    assert capsys.readouterr().out == ""
    assert not (train.folder / ".lock").exists(), "reading a finished cache writes nothing"
    assert train.folder == validation.folder
    assert (ends(train), ends(validation)) == (18, 2)
    other = dataclasses.replace(data, validation_fraction=0.2)
    assert open_split(other, BYTES, "train").folder != train.folder
    assert train.folder.parent == Path(data.cache_folder)


def test_validation_corpus_of_its_own(data: Data, tmp_path: Path, make_shards: MakeShards) -> None:
    """All of a text. The held-out part of a shard folder, or all of it if it has none; but never
    text that is trained on."""
    (tmp_path / "held.txt").write_text("held out")
    own = dataclasses.replace(data, validation_corpus=str(tmp_path / "held.txt"))
    validation = open_split(own, BYTES, "validation")
    assert BYTES.decode(validation.read(0, len(validation) - 1).tolist()) == "held out"
    assert ends(open_split(own, BYTES, "train")) == 20, "nothing of it is held out as well"
    same = dataclasses.replace(data, validation_corpus=data.corpus)
    with pytest.raises(ValueError, match=r"is data\.corpus, which is trained on"):
        open_split(same, BYTES, "validation")
    for held_out, tokens in ((300, 300), (0, 1000)):
        folder = str(make_shards(f"shards-{held_out}", validation=held_out))
        own = dataclasses.replace(data, validation_corpus=folder)
        assert len(open_split(own, BYTES, "validation")) == tokens
        for shards in (Data(corpus=folder), Data(corpus=folder, validation_corpus=folder)):
            assert len(open_split(shards, BYTES, "train")) == 1000
            if held_out:
                assert len(open_split(shards, BYTES, "validation")) == 300
            else:
                message = r"is held out: .*--validation-fraction.*validation_corpus.*\.every = 0"
                with pytest.raises(ValueError, match=message):
                    open_split(shards, BYTES, "validation")


def test_a_text_of_few_pieces_has_one_held_out(data: Data, tmp_path: Path) -> None:
    """The last piece of three documents, or of one long document, is held out. A single piece
    has no remedy that another error takes back."""
    texts = {"documents.jsonl": "".join(f'{{"text": "{one * 5}"}}\n' for one in "abc")}
    texts["long.txt"] = 3 * ("x" * (PIECE_CHARACTERS - 1) + "\n")
    texts["single.txt"] = "a b"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for name, train, validation in (
        ("documents.jsonl", 12, 6),
        ("long.txt", 2 * PIECE_CHARACTERS + 1, PIECE_CHARACTERS + 1),
    ):
        few = dataclasses.replace(data, corpus=str(tmp_path / name), validation_fraction=0.02)
        opened = open_split(few, BYTES, "train"), open_split(few, BYTES, "validation")
        assert [len(shards) for shards in opened] == [train, validation]
        assert [ends(shards) for shards in opened] == ([2, 1] if train == 12 else [1, 1])
    for fraction in (0.02, 0.5):
        single = dataclasses.replace(
            data, corpus=str(tmp_path / "single.txt"), validation_fraction=fraction
        )
        assert len(open_split(single, BYTES, "train")) == 4
        reason = r"the text is a single piece: add text, or set data\.validation_corpus, or set val"
        with pytest.raises(UserError, match=reason):
            open_split(single, BYTES, "validation")


def test_a_corpus_without_text_names_its_setting(data: Data, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    empty = dataclasses.replace(data, corpus=f"{tmp_path}/empty.txt")
    reason = r'^data\.corpus: the corpus ".*/empty\.txt" has no text, .*: give other text$'
    with pytest.raises(UserError, match=reason):
        open_split(empty, BYTES, "train")


@pytest.mark.parametrize("url", ["s3://bucket/a", "https://host/a.txt", "gs://a/*.txt"])
def test_a_url_is_no_corpus(data: Data, url: str) -> None:
    with pytest.raises(UserError, match=rf'^data\.corpus: "{re.escape(url)}" is a URL: only files'):
        open_split(dataclasses.replace(data, corpus=url), BYTES, "train")


def test_a_split_that_is_empty_says_how_many_pieces_there_are(data: Data) -> None:
    nothing = dataclasses.replace(data, validation_fraction=0)
    reason = (
        r"none of the 20 pieces of the text is held out: raise data\.validation_fraction .*is 0,"
    )
    with pytest.raises(UserError, match=reason):
        open_split(nothing, BYTES, "validation")


def test_a_cache_that_is_a_file_names_its_setting(data: Data, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(UserError, match=rf'data.cache_folder = "{path}" is a file: give a folder'):
        open_split(
            dataclasses.replace(data, cache_folder=str(path)), build_tokenizer("bytes"), "train"
        )


def test_a_missing_folder_names_the_command_that_makes_it(data: Data, tmp_path: Path) -> None:
    folder = tmp_path / "my shards-10.5B"
    wanted = Data(corpus=str(folder), source=data.corpus)
    with pytest.raises(ValueError, match=r'data\.corpus = .*-10\.5B" does not exist') as error:
        open_split(wanted, BYTES, "train")
    command = str(error.value).split("\n")[1].strip()
    options = f"--source {data.corpus} --tokenizer bytes --out '{folder}'"
    assert command == f"{command_line('prepare')} {options}"
    folder.mkdir()
    with pytest.raises(ValueError, match=r'(?s)-10\.5B" is empty: .*--source TEXT'):
        open_split(dataclasses.replace(wanted, source=""), BYTES, "train")
    (folder / "prepare.json").touch()
    with pytest.raises(ValueError, match=r"is not finished .*: `prepare` still writes it, or"):
        open_split(wanted, BYTES, "train")
    begun = Index(FORMAT_VERSION, {"source": "docs", "tokenizer": "bytes"}, {})
    write_index(folder / "prepare.json", begun)
    with pytest.raises(ValueError, match=r"`prepare` of docs with the tokenizer bytes .* again$"):
        open_split(wanted, BYTES, "train")
    (folder / "prepare.json").unlink()
    subprocess.run(command, shell=True, cwd=REPOSITORY, capture_output=True, check=True)
    assert ends(open_split(wanted, BYTES, "train")) == 19, "one of them is held out"
    with pytest.raises(ValueError, match=r"--out .*none --max-tokens 16384"):  # 8 x 2,048
        check_inputs(
            load_config("debug", {"data.corpus": f"{tmp_path}/none", "training.steps": "8"})
        )
    for corpus in ("{}/a.txt", "{}/*", "{}/a,{}/b"):  # these are no names of folders
        with pytest.raises(ValueError, match=r"data\.corpus: (cannot read|.* has no text)"):
            open_split(Data(corpus=corpus.replace("{}", f"{tmp_path}/new")), BYTES, "train")


def test_a_dataset_names_the_command_that_prepares_it(tmp_path: Path) -> None:
    """It is a command that works: names of datasets that cannot exist are refused."""
    dataset = 'to "corpora/owner-set-train" (?s:.*)--source hf:owner/set:train'
    with pytest.raises(ValueError, match=dataset):
        open_split(Data(corpus="hf:owner/set:train"), BYTES, "train")
    for corpus in (Data("hf:a/b/c/d"), Data(f"{tmp_path}/none", source="hf:a/b/c/d")):
        with pytest.raises(
            ValueError, match='"hf:a/b/c/d" is not the name of a dataset: write hf:OWN'
        ):
            open_split(corpus, BYTES, "train")


def _open_at_once(data: Data) -> tuple[int, str]:
    """The first rank is killed before it finishes, with the lock for which others wait."""

    replace = Path.replace
    is_first = os.environ["RANK"] == "0"

    def replace_or_die(path: Path, target: Path) -> Path:
        if is_first and target.name == "corpus.json":
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    while not is_first and not list(Path(data.cache_folder).glob("*/*train-*")):
        time.sleep(0.01)
    with patch.object(Path, "replace", replace_or_die), redirect_stdout(StringIO()) as printed:
        opened = open_split(data, BYTES, "train")
    return printed.getvalue().count("data: tokenized"), opened.fingerprint


def test_many_processes_one_of_which_is_killed(data: Data, processes: ProcessPool) -> None:
    """One of the others finishes, and all read the same."""
    died, *others = processes.run(_open_at_once, 4, data, dying={0})
    assert died == DIED
    assert sorted(made for made, _ in others) == [0, 0, 1]
    assert len({fingerprint for _, fingerprint in others}) == 1
    (folder,) = Path(data.cache_folder).iterdir()
    shards = ["train-00000.tokens", "validation-00000.tokens"]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "corpus.json", *shards]
