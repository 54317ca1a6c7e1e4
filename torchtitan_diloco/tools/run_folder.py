"""The folder that a run writes."""

from datetime import datetime
from pathlib import Path


def create_run_folder(folder: str, name: str, *, goes_on: bool = False) -> Path:
    """Makes the folder of a new run: the one asked for, or one that no other run has even if it starts this second."""
    if folder:
        path = Path(folder).expanduser()
        if not goes_on and (path / "metrics.jsonl").exists():
            raise ValueError(
                f"run.folder = {folder} already holds a run: choose another folder, or leave run.folder empty "
                "to have a new one made"
            )
        path.mkdir(parents=True, exist_ok=True)
        return path
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    attempt = 1
    while True:
        path = Path("outputs") / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            attempt += 1
        else:
            return path
