"""The log of a process."""

import logging
import os
import sys
from typing import TextIO

from torchtitan_diloco.base.process import say

logger = logging.getLogger("torchtitan_diloco")


def is_first_on_node() -> bool:
    """Return whether this process is the first rank of its node, or not started by torchrun."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def start_logging() -> None:
    """Log to stdout on the first rank of each node, and warnings to stderr on the other ranks."""
    first = is_first_on_node()
    handler = _Handler(sys.stdout if first else sys.stderr)
    handler.setFormatter(_RankFormatter())
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if first else logging.WARNING)


class _Handler(logging.StreamHandler[TextIO]):
    """Stops writing when nobody reads any more, as after `| head`, and says so once."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            self.setLevel(logging.CRITICAL + 1)
            say("warning: nobody reads the log any more; training continues")
        else:
            super().handleError(record)


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if record.levelno < logging.WARNING:
            return message
        rank = f"[rank {os.environ['RANK']}] " if os.environ.get("RANK") else ""
        return f"{rank}{record.levelname.lower()}: {message}"
