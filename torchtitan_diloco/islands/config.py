"""Settings of islands: the `[islands]` section and its checks."""

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from torchtitan_diloco.base.settings import (
    Mistakes,
    NoneOrWorkers,
    Positive,
    Section,
    check_class,
    convert,
    raise_mistakes,
)
from torchtitan_diloco.base.user import UserError, command_line
from torchtitan_diloco.diloco.config import DiLoCoConfig, diloco_mistakes
from torchtitan_diloco.islands.rules.names import LARGEST, NAME_PATTERN, OWNER
from torchtitan_diloco.store.join_file import read_join_file
from torchtitan_diloco.store.location import KINDS, check_location


@dataclass(frozen=True)
class Islands(Section):
    """Workers as separate jobs, which join and leave while the others continue."""

    join: str = field(default="", repr=False)  # someone may write a login into it
    """Where islands meet: a folder, the join file of a bucket, or `s3://`, `gs://` or `az://` with
    the login of the environment. Empty: all workers are one job. With islands, each job is one
    worker."""
    name: str = ""
    """Name of this island. A job with the name of an island that has died takes its place."""
    slots: NoneOrWorkers = 0
    """Data streams of the run, which limit the number of islands. 0: as many as `begin`."""
    begin: NoneOrWorkers = 0
    """Islands that start together. 0: as many as `diloco.workers`."""
    grace_seconds: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    """Minimum time that a round, and training, wait for parts. It is longer if
    `diloco.overlap.delay` steps take longer. A round, but not training, also waits for parts that
    usually take longer."""
    slot_seconds: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    """Seconds of silence of an island after which another island may take its slot. After 5
    seconds, a restarted process of the same island may take it, and rounds do not wait for it."""
    found: bool = False
    """Continue from the checkpoint in an empty folder or bucket: the checkpoint of a job, or of an
    island whose run has lost its location. Otherwise, that is an error, as the location may only be
    wrong."""
    sync: bool = False
    """Run the syncer of the run, too, beside this island. It goes on if the island ends before the
    run. Of several, one decides, and the others stand by. `islands serve` and `islands.local` run
    one, and `islands sync` runs one alone."""
    local: NoneOrWorkers = 0
    """Start this number of islands on this machine, to try islands. They share the folder `store`
    in `run.folder`, and a syncer runs beside them. 0: none."""


def local_names(count: int) -> list[str]:
    """Return the names of islands that one command starts on this machine."""
    return [f"island-{number}" for number in range(1, count + 1)]


def islands_mistakes(islands: Islands, begin: int) -> Mistakes:
    """Check the settings of an island. `begin`: number of islands that start together."""
    site = ""
    try:
        if islands.join:
            check_location(islands.join)
            site = site_of(islands.join)
    except ValueError as error:
        yield "islands.join", str(error).removeprefix("islands.join = ")
    if islands.name and not re.fullmatch(NAME_PATTERN, islands.name):
        yield (
            "islands.name",
            (
                'must have at most 60 characters, from A-Z, a-z, 0-9, ".", "-" and "_", and begin '
                'with a letter, a digit or "_"'
            ),
        )
    elif islands.name and site and not f"{islands.name}.".startswith(f"{site}."):
        yield (
            "islands.name",
            f"must be {site}, the login in {islands.join}, or begin with it and a dot: give "
            f"{site}.{islands.name}",
        )
    if islands.slots and islands.slots < begin:
        yield (
            "islands.slots",
            (f"must be at least {begin}, the number of islands that start together"),
        )
    if islands.join and islands.local:
        yield "islands.local", "has a store of its own: remove this setting or islands.join"
    if islands.sync and islands.local:
        yield "islands.sync", "islands.local runs the syncer: remove this setting"
    if islands.name and islands.local:
        yield "islands.name", "islands.local names its islands itself: remove this setting"
    if islands.join and not islands.name:
        yield (
            "islands.name",
            (
                "must name this island: give a name that is unique in the "
                "run, such as that of its site"
            ),
        )


def site_of(location: str) -> str:
    """Return the login in a join file if it is that of a site, which writes below its names only.
    Otherwise return an empty string."""
    path = Path(location).expanduser()
    if "://" in location or not path.is_file():
        return ""
    join = read_join_file(path)
    return join.name if join.prefix and join.name != OWNER else ""


def check_may_decide(location: str) -> None:
    """Raise a UserError if a join file is that of a site, whose login may not write decisions."""
    if site := site_of(location):
        raise UserError(
            f"{location}: the login of {site} may not decide for a run: "
            f"`{command_line('islands')} serve` runs the syncer beside its bucket; to run one "
            "elsewhere, give the join file of the owner"
        )


def location_id(join: str) -> str:
    """Return a short id of the location that `islands.join` names."""
    path = Path(join).expanduser()
    place = read_join_file(path).location if path.is_file() else join
    if "://" not in place:
        place = str(path.absolute())
    return f"islands-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def login_in(join: str) -> str:
    """Return the login in a join file of a bucket, or nothing for any other location."""
    path = Path(join).expanduser()
    return read_join_file(path).name if "://" not in join and path.is_file() else ""


def own_loop_settings(islands: Islands, config: DiLoCoConfig) -> tuple[Islands, DiLoCoConfig]:
    """Check the settings of an island in your own loop, and return the settings to use."""
    check_class(config, "diloco", DiLoCoConfig)
    begin = islands.begin or config.workers
    mistakes = list[tuple[str, str]]()
    if not islands.join:
        mistakes.append(("islands.join", f"is empty: give {KINDS}"))
    if islands.local:
        text = "starts nothing in your own loop: remove this setting, and start each island"
        mistakes.append(("islands.local", text))
    if islands.sync:
        text = "starts nothing in your own loop: run `islands sync`, and remove this setting"
        mistakes.append(("islands.sync", text))
    mistakes += [*islands_mistakes(islands, begin), *diloco_mistakes(config, islands=True)]
    raise_mistakes(mistakes, islands=islands, diloco=config)
    config = replace(config, workers=1)
    return replace(islands, begin=begin, slots=islands.slots or begin), config


def change_commands(islands: Islands, settings: Mapping[str, object]) -> str:
    """Return the commands that change settings of the run."""
    join = shlex.quote(islands.join)
    command = command_line("islands")
    lines = [f"{command} change {key} {value} --join {join}" for key, value in settings.items()]
    return " && ".join(lines)


def checked_count(name: str, value: Any, most: int = LARGEST) -> int:
    """Return a number of tokens or samples as an integer, because users write 1e9."""
    if isinstance(value, int | float) and value > most:
        raise UserError(
            f"{name} = {value!r}: give at most {most:.3g}, the largest number in a decision"
        )
    try:
        return convert(value, Positive)  # type: ignore[no-any-return]
    except ValueError as error:
        raise UserError(f"{name} = {value!r}: {error}") from error
