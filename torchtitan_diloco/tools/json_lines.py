"""metrics.jsonl, as it is while a run writes it: one JSON object on each line, the last of which may be cut."""

import json
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects, and how many lines are none; a last line that is still being written is not counted."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.split("\n") if line.strip()]
    found, unreadable = [], 0
    for place, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            unreadable += place < len(lines) or text.endswith("\n")
    return found, unreadable
