"""Console output: rank 0 tells the story on stdout, the other ranks only raise their voice for warnings."""

import logging
import sys

logger = logging.getLogger("torchtitan_diloco")


def start_logging(rank: int, size: int) -> None:
    handler = logging.StreamHandler(sys.stdout if rank == 0 else sys.stderr)
    handler.setFormatter(_RankFormatter(rank, size))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)


class _RankFormatter(logging.Formatter):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._prefix = f"[rank {rank}] " if size > 1 else ""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if record.levelno >= logging.WARNING:
            return f"{self._prefix}{record.levelname.lower()}: {message}"
        return message
