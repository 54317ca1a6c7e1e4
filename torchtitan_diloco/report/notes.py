"""What a reader of a report must know that no table and no picture shows."""

from collections.abc import Sequence

from torchtitan_diloco.report.run_records import Run


def notes(runs: Sequence[Run]) -> list[str]:
    found = []
    for run in runs:
        if not run.steps:
            found.append(f"{run.name} has not logged a step yet.")
        if run.unreadable:
            found.append(
                f"{run.name}: {run.unreadable} line(s) of metrics.jsonl could not be read and are left out."
            )
        if not run.settings:
            found.append(
                f"{run.name} has no config.toml that can be read: its settings are not known."
            )
    if not any(run.rounds for run in runs):
        found.append(
            "No exchange of fragments was recorded: there is no timeline, cosine or drift to show."
        )
    return found
