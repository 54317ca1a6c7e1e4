from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from torchtitan_diloco.data.shards import (
    FORMAT_VERSION,
    INDEX_NAME,
    SPLITS,
    STARTED_NAME,
    Index,
    ShardWriter,
    SplitIndex,
    write_index,
)
from torchtitan_diloco.data.tokenizer import build_tokenizer

MakeShards = Callable[..., Path]


@pytest.fixture
def make_shards(tmp_path: Path) -> MakeShards:
    """Makes a folder whose token i of a split is i % words, in pieces of 53 tokens."""

    def make(
        name: str = "shards",
        *,
        train: int = 1000,
        validation: int = 300,
        shard_tokens: int = 170,
        words: int = 251,
        vocab_size: int = 257,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        settings = {
            "source": "made by a test",
            "tokenizer": "bytes",
            "tokenizer_fingerprint": build_tokenizer("bytes").fingerprint,
            "vocab_size": vocab_size,
            "validation_fraction": 0.1,
        }
        index = Index(FORMAT_VERSION, settings, {split: SplitIndex() for split in SPLITS})
        for split, tokens in zip(SPLITS, (train, validation), strict=True):
            writer = ShardWriter(folder, split, index, shard_tokens)
            for piece, start in enumerate(range(0, tokens, 53)):
                content = np.arange(start, min(start + 53, tokens)) % words
                writer.add(piece, content, ends_document=True)
            writer.finish_shard()
        write_index(folder / INDEX_NAME, index)
        (folder / STARTED_NAME).unlink(missing_ok=True)
        return folder

    return make
