import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.conftest import REPOSITORY, save_tokenizer
from torchtitan_diloco.data.tokenizer import Tokenizer, build_tokenizer

BYTES = build_tokenizer("bytes")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "own.json", 400))


@pytest.fixture(scope="module")
def own(file: Path) -> Tokenizer:
    return build_tokenizer(str(file))


@given(st.text())
@example("<|endoftext|>")  # a special token in a text is text
def test_bytes_are_utf8(text: str) -> None:
    assert bytes(BYTES.encode(text).tolist()) == text.encode()
    assert BYTES.decode(BYTES.encode(text).tolist()) == text


def test_bytes_take_any_text() -> None:
    assert (BYTES.vocab_size, BYTES.end_of_document) == (257, 256)
    assert len(BYTES.encode("x" * 4_000_000)) == 4_000_000
    assert BYTES.decode([97, 256, 400, 0xC3]) == "a<|endoftext|>\ufffd\ufffd"


@given(st.text())
@example("<|endoftext|>")
@example("README.md and  \n\n spaces")
def test_a_file_encodes_as_its_package_does(own: Tokenizer, file: Path, text: str) -> None:
    from tokenizers import Tokenizer as Theirs

    theirs = Theirs.from_file(str(file))
    theirs.encode_special_tokens = True
    ids = own.encode(text)
    assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids
    assert own.decode(ids.tolist()) == text
    assert own.end_of_document not in ids


def test_a_file_compresses_and_its_fingerprint_is_of_its_content(
    own: Tokenizer, file: Path, tmp_path: Path
) -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert len(own.encode(text)) < 0.7 * len(text.encode())
    assert (own.vocab_size, own.end_of_document, own.begin_of_document) == (400, 0, None)
    copied = tmp_path / "copy.json"
    copied.write_bytes(file.read_bytes())
    assert build_tokenizer(str(copied)).fingerprint == own.fingerprint
    other = build_tokenizer(save_tokenizer(tmp_path / "other.json", 399))
    assert len({own.fingerprint, other.fingerprint, BYTES.fingerprint}) == 3


Change = Callable[[dict[str, Any]], object]


def changed(file: Path, folder: Path, change: Change) -> str:
    content = json.loads(file.read_text())
    change(content)
    path = folder / "changed.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_limits_and_added_tokens_of_a_file_are_left_out(
    own: Tokenizer, file: Path, tmp_path: Path
) -> None:
    """A file of a model may cut texts, pad them, and put a token before each."""
    limits = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding: dict[str, Any] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
    }
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    begin: dict[str, Any] = {"id": "<s>", "type_id": 0}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    template: dict[str, Any] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": begin}, sequence],
    }
    template["pair"] = [sequence]
    template["special_tokens"] = {"<s>": begin | {"ids": [400], "tokens": ["<s>"]}}

    def change(content: dict[str, Any]) -> None:
        added = content["added_tokens"]
        added.append(added[0] | {"id": 400, "content": "<s>"})
        content |= {"truncation": limits, "padding": padding, "post_processor": template}

    found = build_tokenizer(changed(file, tmp_path, change))
    assert (found.vocab_size, found.begin_of_document) == (401, 400)
    for text in ("one", "a text of more than eight tokens, and of three"):
        assert found.encode(text).tolist() == own.encode(text).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("model"), "is no tokenizer.json"),
        (
            lambda content: content["added_tokens"].clear(),
            'json" has no token that ends a',
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    change: Change, message: str, file: Path, tmp_path: Path
) -> None:
    def without_end(content: dict[str, Any]) -> None:
        change(content)
        if "model" in content:
            vocabulary = content["model"]["vocab"]
            vocabulary["no end"] = vocabulary.pop("<|endoftext|>")

    with pytest.raises(ValueError, match=rf'data.tokenizer = ".*{message}'):
        build_tokenizer(changed(file, tmp_path, without_end))


def test_a_missing_file_names_the_remedy() -> None:
    message = r'"gpt2" is neither "bytes" nor a file: train a tokenizer.json .docs/data-and-models'
    with pytest.raises(ValueError, match=message):
        build_tokenizer("gpt2")
