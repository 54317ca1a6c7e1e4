"""Hugging Face datasets as a corpus, streamed: from the hub, or from a folder."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan_diloco.data.text_files import PIECE_CHARACTERS, Piece, split_into_pieces
from torchtitan_diloco.utils import install_command

_SAVED_MARKS = ("dataset_dict.json", "state.json")  # what Dataset.save_to_disk leaves in its folder


class HuggingFaceDataset:
    """`hf:NAME[/SUBSET][:SPLIT]`, where NAME is OWNER/DATASET or a folder (beginning with `/`, `.` or `~`)."""

    total_bytes = None

    def __init__(self, spec: str) -> None:
        self.spec = spec
        location, _, split = spec.removeprefix("hf:").partition(":")
        self._split = split or "train"
        self._folder = Path(location).expanduser() if location.startswith(("/", ".", "~")) else None
        parts = location.split("/")
        if self._folder is not None:
            if not self._folder.is_dir():
                raise ValueError(
                    f"the corpus {spec!r}: there is no folder {self._folder.absolute()}"
                )
            self.name = self._folder.name
        elif len(parts) not in (2, 3) or not all(parts):
            raise ValueError(
                f"the corpus {spec!r} is not hf:OWNER/DATASET[/SUBSET][:SPLIT], nor a folder as in hf:/path/to/it:train"
            )
        else:
            self.name = parts[1]
        self._dataset_name, self._subset = (
            "/".join(parts[:2]),
            (parts[2] if len(parts) == 3 else None),
        )

    @property
    def fingerprint(self) -> str:
        """Of a dataset on the hub only its name and split: whether it changed there, we do not see."""
        digest = hashlib.sha256(f"{self.spec}\0{self._split}\0{PIECE_CHARACTERS}".encode())
        if self._folder is not None:
            for path in sorted(path for path in self._folder.rglob("*") if path.is_file()):
                digest.update(
                    f"{path.absolute()}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}\0".encode()
                )
        return digest.hexdigest()[:16]

    def pieces(self) -> Iterator[Piece]:
        found = False
        for number, row in enumerate(self._rows()):
            text = row.get("text")
            if not isinstance(text, str):
                raise ValueError(
                    f'the corpus {self.spec!r}, row {number}: no field "text" with a string; its fields are {sorted(row)}'
                )
            for piece, ends_document in split_into_pieces([text]):
                found = True
                yield Piece(piece, ends_document, 0)
        if not found:
            raise ValueError(f"the corpus {self.spec!r} has no text")

    def _rows(self) -> Any:  # rows as dictionaries; the package has no types
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                f"the corpus {self.spec!r} needs the package datasets: {install_command('hf')}"
            ) from error
        try:
            if self._folder is None:
                return datasets.load_dataset(
                    self._dataset_name, self._subset, split=self._split, streaming=True
                )
            if any((self._folder / mark).exists() for mark in _SAVED_MARKS):
                saved = datasets.load_from_disk(str(self._folder))
                return saved[self._split] if isinstance(saved, datasets.DatasetDict) else saved
            return datasets.load_dataset(str(self._folder), split=self._split, streaming=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"cannot open the corpus {self.spec!r} ({type(error).__name__}: {error}). Are the name, the subset and "
                f'the split ("{self._split}") right, and is the network or the folder there?'
            ) from error
