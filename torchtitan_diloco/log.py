"""The log of a process."""

import logging
import os
import sys

logger = logging.getLogger("torchtitan_diloco")


def is_first_on_node() -> bool:
    """Return whether this process is the first rank of its node, or not started by torchrun."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def start_logging() -> None:
    """Log to stdout on the first rank of each node, and warnings to stderr on the other ranks."""
    first = is_first_on_node()
    handler = logging.StreamHandler(sys.stdout if first else sys.stderr)
    handler.setFormatter(_RankFormatter())
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if first else logging.WARNING)


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if record.levelno < logging.WARNING:
            return message
        rank = f"[rank {os.environ['RANK']}] " if os.environ.get("RANK") else ""
        return f"{rank}{record.levelname.lower()}: {message}"
