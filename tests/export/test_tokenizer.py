"""The converted tokenizer gives the same ids for every text."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tiktoken_ext.openai_public  # type: ignore[import-untyped]
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import REPOSITORY
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.data.tokenizer import (
    END_OF_DOCUMENT,
    SPLIT_PATTERN,
    Tokenizer,
    build_tokenizer,
)
from torchtitan_diloco.data.train_tokenizer import learn_bpe, ranks_of
from torchtitan_diloco.export.hugging_face import (
    check_same_ids,
    convert_tokenizer,
    save_hugging_face,
)
from torchtitan_diloco.models.chinchilla import Decoder

README = (REPOSITORY / "README.md").read_text()
BYTES = {bytes([byte]): byte for byte in range(256)}
NAMED = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS
ODD = ["\n", "\r\n", "  ", "\t", "\u00a0", "\u3000", "'s", "'LL", "'\u017f", "1234567", "\u0663"]
ODD += ["e\u0301", "\u1e9e", "\U0001f600", "<|endoftext|>", "def f(x):\n    return x", " the"]
TEXTS = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(ODD))).map("".join)


def from_ranks(
    ranks: Mapping[bytes, int], pattern: str = SPLIT_PATTERN, special: dict[str, int] | None = None
) -> Tokenizer:
    special = special or {END_OF_DOCUMENT: len(ranks)}
    encoding = tiktoken.Encoding(
        "made by a test", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=special
    )
    return Tokenizer("made by a test", encoding, pattern=pattern)


@cache
def learned_ranks() -> dict[bytes, int]:
    texts = [README, "\u00e9\u00e8 \u4e2d\u6587 \u4e2d\u6587 " * 9]
    return ranks_of(learn_bpe(iter(texts), 1000))


@cache
def pair(kind: str) -> tuple[Tokenizer, Any]:
    ours = build_tokenizer("bytes") if kind == "bytes" else from_ranks(learned_ranks())
    if kind in NAMED:
        with pytest.MonkeyPatch.context() as patched:  # only the pattern comes without a network
            for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
                patched.setattr(tiktoken_ext.openai_public, loader, lambda *_, **__: {})
            named = NAMED[kind]()
        ours = from_ranks(learned_ranks(), named["pat_str"], named["special_tokens"])
    return ours, convert_tokenizer(ours)


@pytest.mark.parametrize("kind", ["bytes", "learned", *NAMED])
@given(text=TEXTS)
@example(text="   \n \n\n  x  \n  ")
@example(text="a\nb  \n")
@example(text="x" * 3000)
@settings(max_examples=60)
def test_ids_and_text_are_the_same(kind: str, text: str) -> None:
    ours, converted = pair(kind)
    ids = converted.encode(text, add_special_tokens=False).ids
    assert ids == ours.encode(text).tolist()
    assert converted.decode(ids, skip_special_tokens=False) == ours.decode(ids) == text


@pytest.mark.parametrize("kind", ["bytes", "learned", *NAMED])
def test_special_tokens_keep_their_ids_and_odd_bytes_are_decoded_alike(kind: str) -> None:
    ours, converted = pair(kind)
    special = ours.special_tokens()
    for token, number in special.items():
        assert converted.token_to_id(token) == number
        # o200k_harmony has two names for one id
        assert special[converted.decode([number], skip_special_tokens=False)] == number
    assert converted.get_vocab_size(with_added_tokens=True) == len(ours.ranks()) + len(special)
    ids = [228, 184, 65, 255, 240, 159, 152, 66]
    assert converted.decode(ids, skip_special_tokens=False) == ours.decode(ids)


WORDS = st.lists(st.text("ab", min_size=2, max_size=7).map(str.encode), unique=True, max_size=25)


@settings(max_examples=50)
@given(words=WORDS, texts=st.lists(st.text("abc", max_size=60), max_size=10))
def test_any_order_of_ranks_is_converted(words: list[bytes], texts: list[str]) -> None:
    """Ranks may have a word before its parts, or a word that can be made in several ways."""
    ours = from_ranks(BYTES | {word: 256 + number for number, word in enumerate(words)})
    converted = convert_tokenizer(ours)
    for text in texts:
        assert converted.encode(text, add_special_tokens=False).ids == ours.encode(text).tolist()


@pytest.mark.parametrize("kind", ["bytes", "learned", "gpt2", "cl100k_base"])
def test_a_tokenizer_json_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    ours, converted = pair(kind)
    path = tmp_path / "tokenizer.json"
    path.write_text(converted.to_str())
    if kind == "gpt2":
        content = json.loads(path.read_text())
        content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}
        path.write_text(json.dumps(content))
    if kind == "bytes":  # no merges
        with pytest.raises(ValueError, match=r"is no tokenizer.json of byte-level BPE"):
            build_tokenizer(str(path))
        return
    read = build_tokenizer(str(path))
    assert (read.end_of_document, read.vocab_size) == (ours.end_of_document, ours.vocab_size)
    for text in (README, *ODD, "a\nb  \n", "   \n \n\n  x  \n  "):
        assert read.encode(text).tolist() == ours.encode(text).tolist()
        assert read.decode(read.encode(text)) == text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_regex": True}, "it has another model"),
        ({"add_prefix_space": True}, "it has another model"),
        ({"invert": True}, "it has another model"),
        ({}, "it has no token for 1 of the 256 bytes"),
    ],
)
def test_a_tokenizer_json_that_would_be_read_otherwise_is_refused(
    change: dict[str, bool], said: str, tmp_path: Path
) -> None:
    content = json.loads(pair("cl100k_base")[1].to_str())
    split, byte_level = content["pre_tokenizer"]["pretokenizers"]
    (split if "invert" in change else byte_level).update(change)
    if not change:
        del content["model"]["vocab"]["\u0100"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=said):
        build_tokenizer(str(path))


def test_added_tokens_that_are_not_special_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = json.loads(pair("cl100k_base")[1].to_str())
    content["added_tokens"][-1]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    build_tokenizer(str(tmp_path / "tokenizer.json"))
    name = content["added_tokens"][-1]["content"]
    assert f"1 added tokens are not special, such as '{name}'" in caplog.text


def test_a_conversion_that_differs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be exported: for .* it gives the ids"):
        check_same_ids(from_ranks(learned_ranks()), pair("bytes")[1])


@pytest.mark.parametrize("kind", ["bytes", "learned", "p50k_base", "o200k_base"])
def test_transformers_loads_it(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, _ = pair(kind)
    decoder = Decoder(Model(layers=1, width=8, heads=1, head_dim=8), ours.vocab_size, 64)
    save_hugging_face(tmp_path, decoder, ours, torch.float32)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "Two words\n\n  12345, <|endoftext|> \u4e2d\u6587 don't .", " lm ' s"):
        ids = loaded(text).input_ids
        assert ids == ours.encode(text).tolist() == loaded.encode(text)
        assert loaded.decode(ids) == text
    end = ours.end_of_document
    assert loaded.eos_token_id == loaded.bos_token_id == loaded.pad_token_id == end
    assert (loaded.model_max_length, loaded.padding_side) == (64, "left")
    read = loaded("a<|endoftext|>", split_special_tokens=False).input_ids
    assert read == [*ours.encode("a"), end]
    batch = loaded(["a b c", "a"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"][1][0] == 0
