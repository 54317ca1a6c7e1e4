from collections.abc import Sequence
from pathlib import Path

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

from tests.conftest import save_tokenizer
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.tokenizer import Tokenizer, build_tokenizer, main

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


def test_the_fingerprint_of_a_file_is_of_its_content(
    own: Tokenizer, file: Path, tmp_path: Path
) -> None:
    assert (own.vocab_size, own.end_of_document, own.begin_of_document) == (400, 0, None)
    copied = tmp_path / "copy.json"
    copied.write_bytes(file.read_bytes())
    assert build_tokenizer(str(copied)).fingerprint == own.fingerprint
    other = build_tokenizer(save_tokenizer(tmp_path / "other.json", 399))
    assert len({own.fingerprint, other.fingerprint, BYTES.fingerprint}) == 3


@given(st.text())
def test_marks_of_documents_have_no_bytes(own: Tokenizer, text: str) -> None:
    for one in (own, BYTES):
        ids = [one.end_of_document, *one.encode(text).tolist(), one.end_of_document]
        assert one.text_bytes(ids) == len(text.encode())


def test_limits_and_added_tokens_of_a_file_are_left_out(
    own: Tokenizer, file: Path, tmp_path: Path
) -> None:
    """A file of a model may cut texts, pad them, and put a token before each."""
    from tokenizers import Tokenizer as Theirs
    from tokenizers.processors import TemplateProcessing

    theirs = Theirs.from_file(str(file))
    theirs.add_special_tokens(["<s>"])
    theirs.enable_truncation(3)
    theirs.enable_padding(length=8)
    theirs.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 400)])
    theirs.save(str(tmp_path / "of-a-model.json"))
    found = build_tokenizer(str(tmp_path / "of-a-model.json"))
    assert (found.vocab_size, found.begin_of_document) == (401, 400)
    for text in ("one", "a text of more than eight tokens, and of three"):
        assert found.encode(text).tolist() == own.encode(text).tolist()


def add_tokens(file: Path, special: Sequence[str], ordinary: Sequence[str]) -> str:
    """Rename the end of a file to a name that is not known, and add tokens from 400 on. Return the
    path of the new file."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Theirs

    theirs = Theirs.from_str(file.read_text().replace("<|endoftext|>", "no end"))
    theirs.add_tokens([AddedToken(name, special=False) for name in ordinary])
    theirs.add_special_tokens(list(special))
    path = file.with_name("added.json")
    theirs.save(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("special", "ordinary", "end", "begin"),
    [
        (["<bos>", "<eos>"], ["<s>", "</s>"], "<eos>", "<bos>"),  # as in Gemma
        (["<s>", "<|endoftext|>"], ["</s>"], "<|endoftext|>", "<s>"),  # as in Phi 3
        (["<s>", "</s>"], [], "</s>", "<s>"),  # as in Llama 2 and Mistral
        (["<|im_end|>", "<|endoftext|>"], ["<s>"], "<|endoftext|>", None),
        (["<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"], [], "<|end_of_text|>", "<|begin"),
    ],
)
def test_the_marks_of_documents_are_special_tokens(
    special: list[str], ordinary: list[str], end: str, begin: str | None, file: Path
) -> None:
    tokenizer = build_tokenizer(add_tokens(file, special, ordinary))
    assert tokenizer.end_name == end
    assert tokenizer.decode([tokenizer.end_of_document]) == end
    if begin is None:
        assert tokenizer.begin_of_document is None
    else:
        assert tokenizer.begin_of_document is not None
        assert tokenizer.decode([tokenizer.begin_of_document]).startswith(begin)
    for name in (*special, *ordinary):
        ids = tokenizer.encode(f"before {name} after")
        assert tokenizer.end_of_document not in ids
        assert tokenizer.begin_of_document not in ids


def test_a_mark_in_the_vocabulary_need_not_be_an_added_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Theirs
    from tokenizers import models

    path = tmp_path / "plain.json"
    names = ["<", "/", "s", ">", "</s>", "<s>"]
    Theirs(models.BPE({name: place for place, name in enumerate(names)}, [])).save(str(path))
    tokenizer = build_tokenizer(str(path))
    assert (tokenizer.end_of_document, tokenizer.begin_of_document) == (4, 5)
    assert tokenizer.encode("<s></s>").tolist() == [0, 2, 3, 0, 1, 2, 3]


def test_a_mark_that_a_text_can_contain_is_refused(file: Path, tmp_path: Path) -> None:
    """The remedies help."""
    problem = r'encodes the text "</s>" as its token that ends a document: '
    added = add_tokens(file, [], ["</s>"])
    with pytest.raises(UserError, match=problem + "mark it as special in the added_tokens of"):
        build_tokenizer(added)
    assert build_tokenizer(add_tokens(file, ["</s>"], [])).end_name == "</s>"
    for special in ([], ["</s>"], ["<s>", "</s>"]):
        unigram = save_unigram(tmp_path / "unigram.json", special)
        with pytest.raises(UserError, match=f"{problem}add one of <.endoftext.>, .*<eos>"):
            build_tokenizer(unigram)
    unigram = save_unigram(tmp_path / "unigram.json", ["</s>", "<eos>"])
    assert build_tokenizer(unigram).end_name == "<eos>"
    unigram = save_unigram(tmp_path / "unigram.json", ["<s>", "<eos>"])
    assert build_tokenizer(unigram).begin_of_document is None, "none is needed"


def test_tokenizers_of_other_marks_have_other_fingerprints(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their shards differ, although the file is the same."""
    added = add_tokens(file, ["</s>", "<eos>"], [])
    fingerprint = build_tokenizer(added).fingerprint
    assert build_tokenizer(added).fingerprint == fingerprint
    monkeypatch.setattr("torchtitan_diloco.data.tokenizer.ENDS", ("<eos>", "</s>"))
    assert build_tokenizer(added).end_name == "<eos>"
    assert build_tokenizer(added).fingerprint != fingerprint


def save_unigram(path: Path, special: list[str]) -> str:
    """Save a Unigram model whose vocabulary lists `<s>` and `</s>`."""
    from tokenizers import Tokenizer as Theirs
    from tokenizers import models

    pieces = [("<unk>", 0.0), ("<s>", -1.0), ("</s>", -1.0)]
    pieces += [(character, -3.0) for character in "<>/abcdefghijklmnopqrstuvwxyz"]
    theirs = Theirs(models.Unigram(pieces, unk_id=0))
    theirs.add_special_tokens(special)
    theirs.save(str(path))
    return str(path)


def test_a_file_that_cannot_be_used_is_refused(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.json"
    renamed = file.read_text().replace("<|endoftext|>", "no end")
    for text, message in (
        ("{}", r"is not a tokenizer.json \(.*: give one of"),
        (renamed, "has no token that ends a"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf'data.tokenizer = ".*json" {message}'):
            build_tokenizer(str(path))
    message = r'"gtp2" is neither a file nor one of bytes, .*gpt2.*: train a tokenizer.json .docs/'
    with pytest.raises(ValueError, match=message):
        build_tokenizer("gtp2")


def test_an_encoding_that_cannot_be_downloaded_names_the_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    cause = r"ConnectionRefusedError: \[Errno \d+\] Connection refused"
    message = rf"p50k_edit\" cannot be loaded \({cause}\): copy it from .*or use a tokenizer.json"
    with pytest.raises(ValueError, match=message):
        build_tokenizer("p50k_edit")


@pytest.mark.parametrize("special", [{"<|endoftext|>": 256, "<|other|>": 300}, {}])
def test_an_encoding_of_tiktoken_keeps_its_ids_and_its_end_of_document(
    monkeypatch: pytest.MonkeyPatch, special: dict[str, int]
) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding(
        "named", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=special
    )
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["named"])
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: encoding)
    if not special:
        with pytest.raises(ValueError, match=r'"named" cannot be loaded .*endoftext'):
            build_tokenizer("named")
        return
    tokenizer = build_tokenizer("named")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (301, 256)
    assert tokenizer.fingerprint != BYTES.fingerprint
    assert tokenizer.decode([97, 280, 98]) == "a\ufffdb", "280 is a gap"
    assert tokenizer.encode("a<|other|>").tolist() == list(b"a<|other|>")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--vocab-size 10 --out own.json", "--vocab-size 10: give at least 257"),
        ("--out README.md", "--out README.md exists: give another path, or delete it"),
        (
            "--pieces 1 --vocab-size 257 --out .",
            "--out . cannot be written (Is a directory): give",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_made(
    words: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--source", "stdlib", *words.split()])
    assert capsys.readouterr().err.startswith(f"error: {problem}")
