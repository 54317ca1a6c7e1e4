"""Tokenize pieces of text on several cores, in their order.

The result does not depend on the number of processes, on how pieces are put into batches, or on
where the reading begins.
"""

import functools
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from torchtitan_diloco.base.hardware import available_cores, end_with_parent
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.pieces import Located, Position, is_held_out
from torchtitan_diloco.data.shards import Split
from torchtitan_diloco.data.tokenizer import Ids, Tokenizer, build_tokenizer

MOST_PROCESSES = 8
"""By default: reading, which is done by one process, is often slower than more of them."""
_BATCH_CHARACTERS = 2**18
_BATCH_PIECES = 512
_BATCHES_AHEAD = 4  # for each process; bounds memory


class Text(NamedTuple):
    """A piece to be tokenized."""

    number: int
    split: Split
    text: str
    begins: bool
    """Whether a document of the split begins with it."""
    ends: bool
    """Whether a document of the split ends with it."""


class Batch(NamedTuple):
    """Pieces that follow one another, and the position after them."""

    texts: list[Text]
    after: Position


@dataclass(frozen=True)
class Encoding:
    """How text becomes tokens."""

    tokenizer: Tokenizer
    begin_token: int | None
    """Written before each document, if any."""

    def encode(self, texts: Iterable[Text]) -> list[Ids]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: Text) -> Ids:
        try:
            tokens = self.tokenizer.encode(text.text)
        except Exception as error:  # packages of tokenizers raise nothing more special
            raise UserError(
                f"{self.tokenizer.name} cannot tokenize piece {text.number:,} ({error}), which "
                f"begins with {text.text[:60]!r}: leave it out of the text, or use another "
                "tokenizer"
            ) from error
        if text.ends:
            tokens = np.append(tokens, np.uint32(self.tokenizer.end_of_document))
        if self.begin_token is not None and text.begins:
            tokens = np.insert(tokens, 0, self.begin_token)
        return tokens


def usual_processes(tokenizer: Tokenizer) -> int:
    """Return how many processes tokenize if the user does not say it."""
    return 1 if tokenizer.name == "bytes" else min(available_cores(), MOST_PROCESSES)


def read_batches(
    located: Iterable[Located],
    *,
    start: Position,
    done: dict[Split, int],
    held_out_fraction: float,
) -> Iterator[Batch]:
    """Yield all pieces after a position, except those that are done.

    `done`: number of the last piece of each split that is.
    """

    def split_of(number: int, *, is_last: bool = False) -> Split:
        held_out = is_held_out(number, held_out_fraction, is_last=is_last)
        return "validation" if held_out else "train"

    texts = list[Text]()
    characters = 0
    number = start.pieces
    documents = start.documents
    begins = start.begins_document
    place = start.place
    for ((text, ends), place), following in _with_following(located):
        split = split_of(number, is_last=following == 0)
        if number > done[split]:
            # Where the next piece goes to the other split, the document ends for this one.
            begins_here = begins or split != split_of(number - 1)
            ends_here = ends or split != split_of(number + 1, is_last=following == 1)
            texts.append(Text(number, split, text, begins=begins_here, ends=ends_here))
        characters += len(text)
        number += 1
        documents += ends
        begins = ends
        if characters >= _BATCH_CHARACTERS or len(texts) >= _BATCH_PIECES:
            after = Position(place, number, documents, begins_document=begins)
            yield Batch(texts, after)
            texts = []
            characters = 0
    yield Batch(texts, Position(place, number, documents, begins_document=begins))


def _with_following(located: Iterable[Located]) -> Iterator[tuple[Located, int]]:
    """Yield each piece, and how many follow it: 0, 1, or 2 for more."""
    window = deque[Located]()
    for piece in located:
        window.append(piece)
        if len(window) > 2:
            yield window.popleft(), len(window)
    while window:
        yield window.popleft(), len(window)


def tokenize(
    batches: Iterable[Batch], encoding: Encoding, processes: int | None
) -> Generator[tuple[Batch, list[Ids]]]:
    """Yield each batch with its tokens, in order. `processes`: None for threads of this one."""
    workers = processes or available_cores()
    pending = deque[tuple[Batch, Future[list[Ids]]]]()
    in_processes = processes is not None and processes > 1
    with _pool(workers, in_processes=in_processes) as pool:
        try:
            for batch in batches:
                pending.append((batch, _submit(pool, batch.texts, encoding)))
                if len(pending) == _BATCHES_AHEAD * workers:
                    first, future = pending.popleft()
                    yield first, future.result()
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that tokenizes was killed, as the system does when memory runs out: "
                "the same command continues, with less memory if --processes is smaller"
            ) from error


@contextmanager
def _pool(workers: int, *, in_processes: bool) -> Iterator[Executor]:
    if in_processes:
        # Forks of a process with threads, such as those of `datasets`, could hang.
        pool: Executor = ProcessPoolExecutor(
            workers,
            mp_context=get_context("spawn"),
            initializer=_follow_parent,
            initargs=(os.getpid(),),
        )
        # Each task starts a process. They inherit the mask, and leave Ctrl-C to this one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(workers):
                pool.submit(int)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    else:
        pool = ThreadPoolExecutor(workers)  # tokenizers release the GIL
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: Executor, texts: list[Text], encoding: Encoding) -> Future[list[Ids]]:
    if isinstance(pool, ThreadPoolExecutor):
        return pool.submit(encoding.encode, texts)
    return pool.submit(
        _encode_here,
        texts,
        name=encoding.tokenizer.name,
        fingerprint=encoding.tokenizer.fingerprint,
        begin_token=encoding.begin_token,
    )


# --- in a process of its own ----------------------------------------------------------------------


def _follow_parent(parent: int) -> None:
    end_with_parent()
    if os.getppid() != parent:  # it had ended before
        os._exit(1)


def _encode_here(
    texts: list[Text], name: str, fingerprint: str, begin_token: int | None
) -> list[Ids]:
    tokenizer = _tokenizer(name)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"the tokenizer {name} has changed: keep its file while it is used")
    return Encoding(tokenizer, begin_token).encode(texts)


@functools.cache
def _tokenizer(name: str) -> Tokenizer:
    return build_tokenizer(name)
