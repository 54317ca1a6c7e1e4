"""From the `[data]` section to token shards: shard folders are opened, text is tokenised once and cached."""

import glob
import re
import shlex
import sys
import time
from pathlib import Path

from torchtitan_diloco.config.schema import Data
from torchtitan_diloco.data.corpora import HUGGING_FACE_PREFIX, STDLIB, Corpus, open_corpus
from torchtitan_diloco.data.files import LOCK_NAME
from torchtitan_diloco.data.preparation import STARTED_NAME, prepare
from torchtitan_diloco.data.prepare import prepare_command
from torchtitan_diloco.data.shards import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Split,
    TokenShards,
    read_manifest,
)
from torchtitan_diloco.data.text_files import text_kind
from torchtitan_diloco.data.tokenizer import Tokenizer, build_tokenizer


def open_tokenizer(data: Data) -> Tokenizer:
    """The tokenizer of a config. Where its rank file is missing, the error has every command that leads to a run."""
    path = Path(data.tokenizer).expanduser()
    if not data.tokenizer.endswith(".tiktoken") or path.exists():
        return build_tokenizer(data.tokenizer)
    source = data.source or (data.corpus if not _is_shard_folder(data.corpus) else "TEXT")
    commands = [_train_tokenizer_command(source, data.tokenizer)]
    if _is_shard_folder(data.corpus) and not _is_finished(data.corpus):
        commands.append(prepare_command(source, data.tokenizer, data.corpus))
    raise ValueError(
        f'data.tokenizer = "{data.tokenizer}" does not exist ({path.absolute()}). Make it with\n'
        + _listed(commands)
    )


def open_split(data: Data, tokenizer: Tokenizer, split: Split) -> TokenShards:
    """The tokens of one split. `data.validation_corpus` overrides where validation comes from."""
    if split == "validation" and data.validation_corpus:
        return _open_validation_corpus(data, tokenizer)
    if _is_shard_folder(data.corpus):
        return _open_shard_folder(data, data.corpus, data.source, "data.corpus", tokenizer, split)
    # With a corpus of its own for validation, all of this text is for training.
    fraction = 0.0 if data.validation_corpus else data.validation_fraction
    return _open_text(data, data.corpus, "data.corpus", tokenizer, fraction, split)


def _open_validation_corpus(data: Data, tokenizer: Tokenizer) -> TokenShards:
    """The held-out part of a shard folder that has one; all of any other corpus."""
    spec = data.validation_corpus
    if _is_shard_folder(spec):
        has_held_out = _is_finished(spec) and _manifest_tokens(spec, "validation") > 0
        split: Split = "validation" if has_held_out or spec == data.corpus else "train"
        return _open_shard_folder(data, spec, "", "data.validation_corpus", tokenizer, split)
    if spec == data.corpus:
        raise ValueError(
            f'data.validation_corpus = "{spec}" is data.corpus itself: validation would be on text that is trained on. '
            f"Leave it empty to hold out data.validation_fraction of the corpus."
        )
    return _open_text(data, spec, "data.validation_corpus", tokenizer, 0.0, "train")


def _is_shard_folder(spec: str) -> bool:
    """Whether a corpus is (or, where nothing is there yet, is meant to be) a folder of token shards.

    A folder is one by its manifest. What does not exist, or is an empty folder, is meant as one if it could not be
    text: one path without wildcards whose name does not end like a text file's.
    """
    if spec == STDLIB or spec.startswith(HUGGING_FACE_PREFIX) or "," in spec:
        return False
    path = Path(spec).expanduser()
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()} - {LOCK_NAME}
        return not names or bool(names & {MANIFEST_NAME, STARTED_NAME})
    return not path.exists() and not glob.has_magic(spec) and text_kind(path) is None


def _is_finished(spec: str) -> bool:
    return (Path(spec).expanduser() / MANIFEST_NAME).exists()


def _manifest_tokens(spec: str, split: Split) -> int:
    return int(read_manifest(Path(spec).expanduser())["splits"][split]["tokens"])


def _open_shard_folder(
    data: Data, spec: str, source: str, key: str, tokenizer: Tokenizer, split: Split
) -> TokenShards:
    folder = Path(spec).expanduser()
    if _is_finished(spec):
        return TokenShards(folder, split, tokenizer)
    state = "is not finished" if folder.exists() else "does not exist"
    hint = "" if source else " (TEXT: what to tokenise, as in data.source)"
    raise ValueError(
        f'{key} = "{spec}" is a folder of token shards that {state} ({folder.absolute()}). Prepare it{hint} with\n'
        + _listed([prepare_command(source or "TEXT", data.tokenizer, spec)])
        + "\nor set it to text that is there: stdlib, files, a folder or a glob."
    )


def _open_text(
    data: Data, spec: str, key: str, tokenizer: Tokenizer, fraction: float, split: Split
) -> TokenShards:
    if spec.startswith(HUGGING_FACE_PREFIX):
        out = "corpora/" + re.sub(r"\W+", "-", spec.removeprefix(HUGGING_FACE_PREFIX)).strip("-")
        raise ValueError(
            f'{key} = "{spec}": a Hugging Face dataset is prepared before the run, not in it. Prepare it with\n'
            + _listed([prepare_command(spec, data.tokenizer, out)])
            + f'\nand set {key} = "{out}".'
        )
    try:
        corpus = open_corpus(spec)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    folder = _cache_folder(data, corpus, tokenizer, fraction)
    if not (folder / MANIFEST_NAME).exists():
        _fill_cache(corpus, tokenizer, folder, fraction)
    return TokenShards(folder, split, tokenizer)


def _cache_folder(data: Data, corpus: Corpus, tokenizer: Tokenizer, fraction: float) -> Path:
    """One folder for each thing that changes its content."""
    key = f"{corpus.fingerprint[:8]}-{tokenizer.fingerprint[:8]}-{fraction:g}-v{FORMAT_VERSION}"
    return Path(data.cache_folder).expanduser() / f"{corpus.name}-{key}"


def _fill_cache(corpus: Corpus, tokenizer: Tokenizer, folder: Path, fraction: float) -> None:
    """Of all the processes of this run and of others that come here at once, one does the work and the rest wait. If
    it is killed, the next one continues it."""
    start = time.monotonic()
    done = prepare(corpus, tokenizer, folder, validation_fraction=fraction, wait=True)
    if done.new_tokens:
        print(
            f"data: tokenised {corpus.spec} with {tokenizer.name} in {time.monotonic() - start:.1f} s: "
            f"{done.tokens['train']:,} tokens to train on, {done.tokens['validation']:,} held out, kept in {folder}",
            flush=True,
        )


def _train_tokenizer_command(source: str, out: str) -> str:
    words = [sys.executable, "-m", "torchtitan_diloco.data.train_tokenizer"]
    return shlex.join([*words, "--source", source, "--vocab-size", "32000", "--out", out])


def _listed(commands: list[str]) -> str:
    return "\n".join(f"    {command}" for command in commands)
