import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchtitan_diloco
from tests.data.conftest import MakeShards
from tests.test_trainer import settings, train
from torchtitan_diloco.config.schema import Data
from torchtitan_diloco.data.corpus import open_split
from torchtitan_diloco.data.shards import TokenShards
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.log import command_line

ROOT = Path(torchtitan_diloco.__file__).parents[1]
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


def test_text_is_tokenised_once(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    train = open_split(data, BYTES, "train")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"data: tokenised {data.corpus} with bytes in ")
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
                message = r"has no tokens: .*--validation-fraction.*validation_corpus"
                with pytest.raises(ValueError, match=message):
                    open_split(shards, BYTES, "validation")


def test_a_missing_folder_names_the_command_that_makes_it(data: Data, tmp_path: Path) -> None:
    folder = tmp_path / "my shards-10.5B"
    wanted = Data(corpus=str(folder), source=data.corpus)
    with pytest.raises(ValueError, match=r"data\.corpus = .* is no finished folder") as error:
        open_split(wanted, BYTES, "train")
    command = str(error.value).split("\n")[1].strip()
    options = f"--source {data.corpus} --tokenizer bytes --out '{folder}'"
    assert command == f"{command_line('prepare')} {options}"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"(?s)is no finished folder .*--source TEXT"):
        open_split(dataclasses.replace(wanted, source=""), BYTES, "train")
    subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, check=True)
    assert ends(open_split(wanted, BYTES, "train")) == 20
    with pytest.raises(ValueError, match=r"--out .*none --max-tokens 3072"):  # 8 x 12 x 32
        train(settings(tmp_path, data__corpus=tmp_path / "none"))


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("{}/a.txt", "data.corpus: cannot read"),
        ("{}/*", "data.corpus: .* has no text"),
        ("{}/a,{}/b", "data.corpus: cannot read"),
        (
            "hf:owner/set:train",
            'or to "corpora/owner-set-train" (?s:.*)--source hf:owner/set:train',
        ),
    ],
)
def test_what_is_no_shard_folder(tmp_path: Path, corpus: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_split(Data(corpus=corpus.replace("{}", str(tmp_path))), BYTES, "train")


STOP_BEFORE_THE_END = """
import os, signal
from pathlib import Path
replace = Path.replace
def stop_or_replace(self, target):
    if self.name.startswith(".corpus"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return replace(self, target)
Path.replace = stop_or_replace
"""
OPEN_SPLIT = """
import sys
from torchtitan_diloco.config.schema import Data
from torchtitan_diloco.data.corpus import open_split
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.log import command_line

data = Data(corpus=sys.argv[1], cache_folder=sys.argv[2])
print(open_split(data, build_tokenizer("bytes"), "train").fingerprint)
"""


def test_many_processes_one_of_which_is_killed(tmp_path: Path) -> None:
    """They come at once; the one that works is killed; another one finishes; all read the same."""
    corpus, cache = tmp_path / "large.txt", tmp_path / "cache"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 100_000)

    def open_in_process(first: str = "") -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", first + OPEN_SPLIT, str(corpus), str(cache)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)

    doomed = open_in_process(STOP_BEFORE_THE_END)
    _, status = os.waitpid(doomed.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)  # it holds the lock while the others arrive
    assert list(cache.glob("*/train-*.tokens"))
    assert not list(cache.glob("*/corpus.json"))
    others = [open_in_process() for _ in range(3)]
    time.sleep(1.0)
    assert all(process.poll() is None for process in others), "they wait"
    doomed.kill()
    doomed.communicate()
    outputs = [process.communicate(timeout=200) for process in others]
    assert [process.returncode for process in others] == [0, 0, 0], outputs
    assert sum("data: tokenised" in out for out, _ in outputs) == 1
    assert len({out.splitlines()[-1] for out, _ in outputs}) == 1
    (folder,) = cache.iterdir()
    shards = ["train-00000.tokens", "validation-00000.tokens"]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "corpus.json", *shards]
