"""Open the token shards of the `[data]` section. Text is tokenised once, into a cache folder."""

import glob
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from torchtitan_diloco.config.schema import Data
from torchtitan_diloco.data.prepare import prepare
from torchtitan_diloco.data.shards import (
    FORMAT_VERSION,
    INDEX_NAME,
    STARTED_NAME,
    Split,
    TokenShards,
    read_index,
)
from torchtitan_diloco.data.text import HUGGING_FACE_PREFIX, STDLIB, open_corpus, text_kind
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.log import UserError, command_line


def open_split(
    data: Data, tokenizer: Tokenizer, split: Split, tokens_of_run: Callable[[], int] | None = None
) -> TokenShards:
    """Open the tokens of one split.

    `tokens_of_run` returns the tokens of a run, for the error that says how to prepare them.
    """
    own, corpus = data.validation_corpus, data.corpus
    if split == "train" or not own:
        # With a corpus of its own for validation, all of this text is for training.
        fraction = 0.0 if own else data.validation_fraction
        folder = _folder(data, "data.corpus", tokenizer, fraction, tokens_of_run)
        return TokenShards(folder, split, tokenizer)
    if own == corpus and not _is_shard_folder(own):
        raise UserError(
            f'data.validation_corpus = "{own}" is data.corpus, which is trained on: leave it empty '
            "to hold out data.validation_fraction of it"
        )
    folder = _folder(data, "data.validation_corpus", tokenizer, fraction=0.0)
    # Validate on the held-out split of the folder, or on all of it if that split is empty.
    held_out = read_index(folder / INDEX_NAME).splits["validation"].tokens
    return TokenShards(folder, "validation" if held_out or own == corpus else "train", tokenizer)


def _folder(
    data: Data,
    key: str,
    tokenizer: Tokenizer,
    fraction: float,
    tokens_of_run: Callable[[], int] | None = None,
) -> Path:
    """Return the shard folder of a corpus. Tokenise the corpus if it is text."""
    spec = data.corpus if key == "data.corpus" else data.validation_corpus
    slug = re.sub(r"\W+", "-", spec.removeprefix(HUGGING_FACE_PREFIX)).strip("-")
    if spec.startswith(HUGGING_FACE_PREFIX):
        command = _command(spec, data, f"corpora/{slug}", tokens_of_run)
        raise UserError(
            f'{key} = "{spec}" is prepared before the run: set {key} = "corpora/{slug}" after'
            f"\n    {command}"
        )
    if _is_shard_folder(spec):
        folder = Path(spec).expanduser()
        if not (folder / INDEX_NAME).exists():
            source = (data.source if key == "data.corpus" else "") or "TEXT"
            command = _command(source, data, spec, tokens_of_run)
            raise UserError(
                f'{key} = "{spec}" is no finished folder of token shards ({folder.absolute()}): '
                f"set {key} to text, such as stdlib, or prepare the folder with\n    {command}"
            )
        return folder
    try:
        corpus = open_corpus(spec)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    made_of = f"{corpus.fingerprint[:8]}-{tokenizer.fingerprint[:8]}-{fraction:g}"
    name = f"{slug[-40:]}-{made_of}-v{FORMAT_VERSION}"
    folder = Path(data.cache_folder).expanduser() / name
    if not (folder / INDEX_NAME).exists():
        prepare(corpus, tokenizer, folder, validation_fraction=fraction, wait=True)
    return folder


def _command(source: str, data: Data, out: str, tokens_of_run: Callable[[], int] | None) -> str:
    options = ["--source", source, "--tokenizer", data.tokenizer, "--out", out]
    if tokens_of_run is not None:
        options += ["--max-tokens", str(tokens_of_run())]
    return f"{command_line('prepare')} {shlex.join(options)}"


def _is_shard_folder(spec: str) -> bool:
    """Return whether a corpus is meant to be a folder of token shards.

    This also holds for an empty folder, and for a single missing path without wildcards or the
    suffix of a text file.
    """
    if spec == STDLIB or spec.startswith(HUGGING_FACE_PREFIX) or "," in spec:
        return False
    path = Path(spec).expanduser()
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()} - {".lock"}
        return not names or bool(names & {INDEX_NAME, STARTED_NAME})
    return not path.exists() and not glob.has_magic(spec) and text_kind(path) is None
