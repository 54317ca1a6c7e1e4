"""Histories of runs of islands, from their location."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_diloco.base.user import UserError, no_run
from torchtitan_diloco.islands import reader
from torchtitan_diloco.islands.config import location_id
from torchtitan_diloco.islands.overview import overview
from torchtitan_diloco.islands.past import Interval
from torchtitan_diloco.islands.stays import Stay
from torchtitan_diloco.islands.tables import headline
from torchtitan_diloco.store.location import JOIN_FILE

SETTINGS_FILE = "config.toml"
"""File in the folder of a run, which is no join file."""
PASSING = ("speed", "last merged")
"""Numbers that say nothing of a run that has ended."""


@dataclass(frozen=True)
class RunHistory:
    """What a run of islands has stored about itself."""

    run: str
    ids: Collection[str]
    """Ids of the run in the records of its islands."""
    headline: Mapping[str, str]
    stays: Sequence[Stay]
    source: str
    """Whose clock the times are of."""
    began: float = 0.0
    losses: Sequence[tuple[float, float]] = ()
    """Tokens merged, and the loss of the shared model, if the records of islands lack it."""
    intervals: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    """Sums of each island, in the order of time."""
    news: Sequence[tuple[float, str]] = ()


def read_history(location: str) -> RunHistory:
    """Read the history of a run from its location."""
    path = Path(location)
    if path.is_file() and (path.suffix != JOIN_FILE or path.name == SETTINGS_FILE):
        raise no_run(path, "decisions")
    with reader.open_reader(location, whole=True) as store:
        view = store.view()
    if view.decision is None and view.problem:
        raise UserError(f"{location}: {view.problem}")
    if view.decision is None or not view.decision.is_founded:
        raise UserError(f"{location}: the run has not started, so there is nothing to report")
    numbers = headline(overview(view))
    if view.decision.ended:
        numbers = {name: text for name, text in numbers.items() if name not in PASSING}
    past = view.past
    return RunHistory(
        run=view.decision.run,
        ids={view.decision.run, location_id(location)},
        headline=numbers,
        stays=past.stays,
        source="the syncer's clock",
        began=past.began,
        losses=past.losses,
        intervals=past.intervals,
        news=list(past.news),
    )
