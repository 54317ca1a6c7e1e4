"""How many CPU cores there are for this process."""

import os


def available_cores() -> int:
    """Those it may use; a job system often grants fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
