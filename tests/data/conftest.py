import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from torchtitan_diloco.data.shard_writer import ShardWriter
from torchtitan_diloco.data.shards import SPLITS, write_manifest
from torchtitan_diloco.data.tokenizer import build_tokenizer

# Read when `datasets` is imported, which no test has done yet.
_hugging_face_home = tempfile.TemporaryDirectory()
os.environ["HF_HOME"] = _hugging_face_home.name
os.environ["HF_HUB_OFFLINE"] = "1"

SETTINGS = {"source": "made by a test", "tokenizer": "bytes", "validation_fraction": 0.1}

MakeShards = Callable[..., Path]


@pytest.fixture
def make_shards(tmp_path: Path) -> MakeShards:
    """A folder of shards whose token i of a split is i % 251, in pieces of the given lengths."""

    def make(
        name: str = "shards", *, train: int = 1000, validation: int = 300, shard_tokens: int = 170
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for split, tokens in zip(SPLITS, (train, validation), strict=True):
            writer = ShardWriter(folder, split, build_tokenizer("bytes"), shard_tokens)
            for piece, start in enumerate(range(0, tokens, 53)):
                writer.add(
                    piece, np.arange(start, min(start + 53, tokens)) % 251, ends_document=True
                )
            writer.finish_shard()
        write_manifest(folder, SETTINGS)
        return folder

    return make
