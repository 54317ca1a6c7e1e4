"""A model whose documents begin with a token, as those of Llama, is prompted as it was trained."""

import json
from pathlib import Path

import pytest

from tests.conftest import write_text
from tests.test_trainer import records, settings, train
from torchtitan_diloco.data.prepare import prepare
from torchtitan_diloco.data.text import open_corpus
from torchtitan_diloco.data.tokenizer import build_tokenizer, train_tokenizer
from torchtitan_diloco.export import __main__ as commands
from torchtitan_diloco.export.hugging_face import SpecialToken, write_tokenizer
from torchtitan_diloco.export.weights import SavedModel, open_saved
from torchtitan_diloco.models.generation import generate

BEGIN = "<|begin_of_text|>"
LENGTH = 32
TOKENS = 12
TEXT = "the old stone"


def save_llama_tokenizer(path: Path) -> str:
    """Save a `tokenizer.json` that adds its begin token before a text, as published ones do."""
    from tokenizers import Tokenizer, processors

    content, _ = train_tokenizer([TEXT], 258)
    tokenizer = Tokenizer.from_str(content)
    tokenizer.add_special_tokens([BEGIN])
    mark = BEGIN, tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[mark]),
        ]
    )
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module", params=[False, True], ids=["no begin", "begin"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on text that was prepared with or without the begin token."""
    folder = tmp_path_factory.mktemp("begin")
    spec = save_llama_tokenizer(folder / "tokenizer.json")
    text = write_text(folder)
    shards = folder / "shards"
    prepare(
        open_corpus(str(text)),
        build_tokenizer(spec),
        shards,
        validation_fraction=0.1,
        begin=request.param,
    )
    changes = {"data.tokenizer": spec, "training.sequence_length": LENGTH, "optimizer.lr": 0.02}
    changes |= {"checkpoint.at_end": "true", "validation.sample_every": 8}
    changes |= {"validation.sample_prompt": TEXT}
    train(settings(shards, **changes))
    return folder / "run"


def continued(saved: SavedModel, context: list[int]) -> list[int]:
    """Return what the model writes after these tokens at temperature 0."""
    (tokens,) = generate(
        saved.model,
        [context],
        vocab_size=saved.tokenizer.vocab_size,
        sequence_length=LENGTH,
        max_new_tokens=TOKENS,
        temperature=0,
        stop=saved.tokenizer.end_of_document,
    )
    return tokens


@pytest.mark.parametrize("text", ["", TEXT])
def test_a_prompt_begins_as_documents_did(
    run: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = open_saved(run)
    tokenizer = saved.tokenizer
    text_tokens = tokenizer.encode(text).tolist()
    if saved.begins_documents:
        assert tokenizer.begin_of_document is not None
        context = [tokenizer.begin_of_document, *text_tokens]
    else:
        context = text_tokens or [tokenizer.end_of_document]
    words = ["generate", str(run), "--tokens", str(TOKENS), "--temperature", "0"]
    words += ["--device", "cpu", "--prompt", text]
    assert commands.main(words) == 0
    expected = tokenizer.decode([*text_tokens, *continued(saved, context)])
    assert capsys.readouterr().out == f"{expected}\n", "the begin token is not shown"


def test_a_sample_is_what_generate_writes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sample,) = records(run, "sample")
    words = ["generate", str(run), "--tokens", "64", "--device", "cpu", "--prompt", TEXT]
    assert commands.main(words) == 0
    assert capsys.readouterr().out == f"{sample['text']}\n"


def test_an_export_adds_what_preceded_documents(run: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    saved = open_saved(run)
    assert commands.main(["export", str(run), "--format", "hf", "--out", str(tmp_path)]) == 0
    plain = saved.tokenizer.encode(TEXT).tolist()
    begin = [saved.tokenizer.begin_of_document] if saved.begins_documents else []
    there = AutoTokenizer.from_pretrained(tmp_path)
    assert there(TEXT).input_ids == [*begin, *plain]
    assert there(TEXT, add_special_tokens=False).input_ids == plain
    end = saved.tokenizer.end_of_document
    bos = (begin or [end])[0]
    assert (there.bos_token_id, there.eos_token_id, there.pad_token_id) == (bos, end, end)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (bos, end)
    original = (run.parent / "tokenizer.json").read_bytes()
    is_copied = (tmp_path / "tokenizer.json").read_bytes() == original
    assert is_copied == saved.begins_documents, "written anew only if it adds something else"


def test_a_begin_token_is_added_to_a_tokenizer_that_adds_none(run: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    saved = open_saved(run)
    published = save_llama_tokenizer(tmp_path / "published.json")
    write_tokenizer(tmp_path / "without.json", Path(published), None)
    assert saved.tokenizer.begin_of_document is not None
    mark = SpecialToken(BEGIN, saved.tokenizer.begin_of_document)
    write_tokenizer(tmp_path / "with.json", tmp_path / "without.json", mark)
    without, with_begin = (
        Tokenizer.from_file(str(tmp_path / f"{name}.json")) for name in ("without", "with")
    )
    assert with_begin.encode(TEXT).ids == [mark.number, *without.encode(TEXT).ids]
    assert with_begin.encode(TEXT, "old").ids.count(mark.number) == 2
    assert without.encode(TEXT).ids == saved.tokenizer.encode(TEXT).tolist()
