"""Open the token shards of the `[data]` section. Text is tokenized into shards the first time."""

import glob
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from torchtitan_diloco.base.registry import find
from torchtitan_diloco.base.user import UserError, command_line
from torchtitan_diloco.config.parts import SOURCES
from torchtitan_diloco.config.schema import WORKER_FIELD, Data
from torchtitan_diloco.data.pieces import Corpus, EmptyCorpus
from torchtitan_diloco.data.prepare import prepare
from torchtitan_diloco.data.shards import (
    FORMAT_VERSION,
    INDEX_NAME,
    STARTED_NAME,
    Split,
    TokenShards,
    describe_missing,
    describe_unfinished,
    read_index,
)
from torchtitan_diloco.data.text import is_url, open_corpus, text_kind
from torchtitan_diloco.data.tokenizer import Tokenizer


def open_corpora(data: Data, tokenizer: Tokenizer, worker: str) -> dict[str, TokenShards]:
    """Open the tokens to train on of all corpora of a worker, by their names in the settings."""
    return {
        name: open_split(data, tokenizer, "train", name=name, worker=worker)
        for name in data.corpora
    }


def open_split(
    data: Data, tokenizer: Tokenizer, split: Split, *, name: str = "", worker: str = "0"
) -> TokenShards:
    """Open the tokens of one split of a corpus, by default of the first of the run."""
    name = name or data.corpora[0]
    validation_corpus = data.validation_corpus
    if split == "train" or not validation_corpus:
        # With a corpus of its own for validation, all of this text is for training.
        fraction = 0.0 if validation_corpus else data.validation_fraction
        spec = own_name(name, worker)
        folder = _folder(data, data.corpora_key, spec, tokenizer, fraction=fraction)
        return TokenShards(folder, split, tokenizer)
    spec = own_name(validation_corpus, worker)
    is_trained_on = validation_corpus in data.corpora
    if is_trained_on and not _is_shard_folder(spec):
        raise UserError(
            f'data.validation_corpus = "{validation_corpus}" is {data.corpora_key}, which is '
            "trained on: leave it empty to hold out data.validation_fraction of it"
        )
    folder = _folder(data, "data.validation_corpus", spec, tokenizer, fraction=0.0)
    # Validate on the held-out split of the folder, or on all of it if that split is empty.
    held_out = read_index(folder / INDEX_NAME).splits["validation"].tokens
    return TokenShards(folder, "validation" if held_out or is_trained_on else "train", tokenizer)


def check_validation_corpus(
    data: Data, tokenizer: Tokenizer, worker: str, trained: Mapping[str, str]
) -> None:
    """Raise if the text that a worker validates on is a corpus that it trains on, as under another
    spelling of its path.

    `trained`: fingerprints of the corpora to train on, by their names in the settings.
    """
    validation = open_split(data, tokenizer, "validation", worker=worker)
    for name, fingerprint in trained.items():
        if fingerprint == validation.fingerprint:
            raise UserError(
                f'data.validation_corpus = "{data.validation_corpus}" holds the same tokens as '
                f'"{name}" of {data.corpora_key}, which is trained on: name other text, or leave '
                "it empty and hold out a part (data.validation_fraction of text, or prepare "
                "--validation-fraction of shards)"
            )


def own_name(name: str, worker: str) -> str:
    """Return the name of a corpus for a worker."""
    return name.replace(WORKER_FIELD, worker)


def find_corpus(
    data: Data, key: str, spec: str, options: Callable[[], list[str]] = list
) -> Corpus | Path:
    """Return the text, or the folder of shards, that a setting names. If neither is there, raise an
    error that says how to prepare it, with `options`."""
    try:
        if not _is_shard_folder(spec):
            corpus = open_corpus(spec)
            if not _text_to_prepare(spec):
                return corpus
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    except OSError as error:  # such as a name that is too long
        reason = f"{error.strerror}: correct the path"
        raise UserError(f"{key}: {spec[:80]!r} cannot be read: {reason}") from error
    folder = Path(spec).expanduser()
    if (folder / INDEX_NAME).exists():
        return folder
    raise _unprepared(data, key, spec, options)


def _text_to_prepare(spec: str) -> str:
    """Return what follows the name of a source that is only read from token shards. Otherwise,
    return an empty string."""
    source = find(SOURCES, spec)
    return source[1] if source is not None and source[0].is_prepared else ""


def _unprepared(data: Data, key: str, spec: str, options: Callable[[], list[str]]) -> UserError:
    """Return the error that says how to prepare a dataset, or a missing folder of shards."""
    named = f'{key} = "{spec}"'
    if key in ("data.mixture", "data.phases"):
        named = f'{key}: the corpus "{spec}"'
    if unfinished := describe_unfinished(Path(spec).expanduser()):
        return UserError(f"{named} {unfinished}")
    source = data.source if key == "data.corpus" else ""
    if text := _text_to_prepare(spec):
        source = spec
        out = f"corpora/{_slug(text)}"
        problem = f'is read from token shards only: set it to "{out}" after'
    else:
        out = spec
        reason = describe_missing(Path(spec).expanduser())
        problem = f"{reason}: correct the path, set it to text, such as stdlib, or prepare it:"
        if _text_to_prepare(source):
            open_corpus(source)  # to check its name
    words = ["--source", source or "TEXT", "--tokenizer", data.tokenizer, "--out", out]
    words += options() if key == "data.corpus" else []
    command = f"{command_line('prepare')} {shlex.join(words)}"
    return UserError(f"{named} {problem}\n    {command}")


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text).strip("-")


def _folder(data: Data, key: str, spec: str, tokenizer: Tokenizer, *, fraction: float) -> Path:
    """Return the shard folder of a corpus. Tokenize the corpus if it is text."""
    corpus = find_corpus(data, key, spec)
    if isinstance(corpus, Path):
        return corpus
    made_of = f"{corpus.fingerprint[:8]}-{tokenizer.fingerprint[:8]}-{fraction:g}"
    name = f"{_slug(corpus.spec)[-40:]}-{made_of}-v{FORMAT_VERSION}"
    cache = Path(data.cache_folder).expanduser()
    if cache.is_file():
        raise UserError(f'data.cache_folder = "{data.cache_folder}" is a file: give a folder')
    folder = cache / name
    if not (folder / INDEX_NAME).exists():
        try:
            prepare(corpus, tokenizer, folder, validation_fraction=fraction, wait=True)
        except EmptyCorpus as error:
            raise EmptyCorpus(f"{key}: {error}") from error
    return folder


def _is_shard_folder(spec: str) -> bool:
    """Return whether a corpus is meant to be a folder of token shards.

    This also holds for an empty folder, and for a single missing path without wildcards or the
    suffix of a text file.
    """
    if find(SOURCES, spec) or "," in spec or is_url(spec):
        return False
    path = Path(spec).expanduser()
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()} - {".lock"}
        return not names or bool(names & {INDEX_NAME, STARTED_NAME})
    return not path.exists() and not glob.has_magic(spec) and text_kind(path) is None
