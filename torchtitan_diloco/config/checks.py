"""Checks across settings: contradictions, settings that nothing reads, and warnings of a run."""

from collections.abc import Iterator
from pathlib import Path
from string import whitespace
from urllib.parse import urlsplit

from torchtitan_diloco.base.settings import (
    Mistakes,
    entries_of,
    options_of,
    setting_types,
    steps_of,
)
from torchtitan_diloco.base.user import NO_HOME, UserError, has_home
from torchtitan_diloco.config.parts import OPTIMIZERS
from torchtitan_diloco.config.schema import (
    WORKER_FIELD,
    Config,
    Parallel,
    flat_settings,
    format_value,
)
from torchtitan_diloco.config.weights import MOST_TURNS, is_rounded, weight_mistake
from torchtitan_diloco.diloco.config import advice, diloco_mistakes
from torchtitan_diloco.islands.config import Islands, islands_mistakes

RUN_LENGTH = ("training.steps", "training.tokens", "training.tokens_per_parameter")
"""Exactly one of these settings is not 0."""
MIXTURE = "data.mixture"
PATHS = (
    "run.folder",
    "model.weights",
    "data.source",
    "data.tokenizer",
    "data.validation_corpus",
    "data.cache_folder",
    "checkpoint.mirror",
    "checkpoint.resume",
    "islands.join",
)
"""Settings that may be paths, beside the corpora."""
NO_NUL = "has a NUL character, which no path can have: remove it"
ONLY_WITH_JOIN = ("name", "sync")
"""Settings of islands that `islands.local` chooses itself."""

READ_WITH: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {
    ("activation_checkpoint.mode", ("every_nth", "selective")): ("every",),
}
"""A setting and some of its values, and the settings of its section that only these values read.
The entries of a dict say so themselves."""


def config_mistakes(config: Config) -> Mistakes:
    """Yield a (key, reason and remedy) pair for each contradiction between settings."""
    if mistakes := [*_path_mistakes(config)]:  # the other checks use these paths
        yield from mistakes
        return
    training = config.training
    is_island = bool(config.islands.join or config.islands.local)
    lengths = [key for key in RUN_LENGTH if getattr(training, key.removeprefix("training."))]
    if not lengths:
        yield RUN_LENGTH[0], f"the run has no length: set one of {', '.join(RUN_LENGTH)}"
    elif len(lengths) > 1:
        yield lengths[1], f"{lengths[0]} already sets the length of the run: set one of them to 0"
    if 0 < training.steps < training.stop_after and not is_island:
        reason = f"is after the end of the run: give at most training.steps = {training.steps}"
        yield "training.stop_after", reason
    if is_island or config.diloco.method != "none":
        yield from diloco_mistakes(config.diloco, islands=is_island)
        if config.parallel.reduce_dtype != Parallel.reduce_dtype:
            reason = (
                'is only for data parallelism (diloco.method = "none"): inside a streaming worker, '
                "gradients are averaged in float32; remove it, or choose diloco.quantization.codec "
                "for what workers send"
            )
            yield "parallel.reduce_dtype", reason
    if is_island:
        yield from islands_mistakes(config.islands, config.workers)
    else:
        for key, default in flat_settings(Islands()).items():
            if getattr(config.islands, key) != default:
                deciders = "islands.join" + " (or islands.local)" * (key not in ONLY_WITH_JOIN)
                reason = f"is only used with {deciders}: set that too, or remove this setting"
                yield f"islands.{key}", reason
    yield from _mirror_mistakes(config)
    yield from _run_mistakes(config)
    if config.validation.sample_prompt and not config.validation.sample_every:
        reason = "is only used with validation.sample_every: set that too, or remove this setting"
        yield "validation.sample_prompt", reason
    boards = config.metrics.boards
    if repeated := [board for board in dict.fromkeys(boards) if boards.count(board) > 1]:
        yield "metrics.boards", f"{repeated[0]} is given several times: give each board once"
    yield from _option_mistakes(config)
    yield from _data_mistakes(config)
    is_own_island = is_island and config.data.shard_by == "own"  # others may join later
    is_alone = config.workers == 1 or config.diloco.method == "none"
    if config.data.shard_by != "none" and is_alone and not is_own_island:
        yield (
            "data.shard_by",
            "needs several workers that train independently (diloco.workers > 1, "
            'diloco.method = "streaming"): remove it',
        )


def _option_mistakes(config: Config) -> Mistakes:
    """Yield the mistake of options that the optimizer does not have."""
    try:
        options_of(OPTIMIZERS[config.optimizer.name], config.optimizer.options)
    except UserError as error:
        yield "optimizer.options", f"{config.optimizer.name} {error}"


def _run_mistakes(config: Config) -> Mistakes:
    """Yield the mistakes in the section [run]."""
    run = config.run
    if run.preemption_address and run.preemption == "none":
        reason = "is only used with run.preemption: set that too, or remove this setting"
        yield "run.preemption_address", reason
    elif run.preemption_address and not _is_server(run.preemption_address):
        reason = "must look like http://HOST or http://HOST:PORT, with a port up to 65535"
        yield "run.preemption_address", reason
    if "/" in run.name or "\\" in run.name:
        yield "run.name", "must not contain slashes: set run.folder to choose another folder"


def _is_server(address: str) -> bool:
    """Return whether an address is that of a server, without a path."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:  # its port is no number, or too large
        return False
    is_place = bool(parts.hostname) and port != 0 and not {*address} & {*"?#@", *whitespace}
    return is_place and parts.scheme == "http" and address.removesuffix("/").count("/") == 2


def _path_mistakes(config: Config) -> Mistakes:
    """Yield the mistake of each path that no machine can have, or that is in the home folder of a
    user that this machine lacks."""
    chosen = flat_settings(config)
    places = [(key, chosen[key]) for key in PATHS]
    places += [(config.data.corpora_key, name) for name in config.data.corpora]
    if "\0" in config.run.name:
        yield "run.name", NO_NUL
    for key, paths in places:
        if "\0" in paths:
            yield key, NO_NUL
        elif not all(map(has_home, paths.split(","))):
            yield key, NO_HOME


def _data_mistakes(config: Config) -> Mistakes:
    """Yield the mistakes in mixtures and phases."""
    data = config.data
    if data.mixture and (mistake := weight_mistake(data.mixture)):
        yield MIXTURE, mistake
    starts = [phase.start for phase in data.phases]
    if outside := [start for start in starts if not 0 < start < 1]:
        reason = "a phase must start after 0 and before 1, as a share of the run"
        yield "data.phases", f"a phase starts at {outside[0]:g}: {reason}"
    elif starts != sorted(set(starts)):
        yield "data.phases", f"they start at {starts}: give them in increasing order of start"
    for phase in data.phases:
        if mistake := weight_mistake(phase.mixture):
            yield "data.phases", f"in the phase that starts at {phase.start:g}, {mistake}"
    shared = [name for name in data.corpora if WORKER_FIELD not in name]
    if data.shard_by == "own" and len(shared) == len(data.corpora):
        example = f"{shared[0].rstrip('/')}-{WORKER_FIELD}"
        reason = f"needs a corpus with {WORKER_FIELD} in its name, such as {example}"
        yield "data.shard_by", reason
    if data.shard_by != "own" and len(shared) < len(data.corpora):
        named = next(name for name in data.corpora if name not in shared)
        reason = f'{WORKER_FIELD} in "{named}" is only replaced with data.shard_by = "own": set it'
        yield data.corpora_key, reason
    if data.shard_by != "own" and WORKER_FIELD in data.validation_corpus:
        reason = (
            f'{WORKER_FIELD} is only replaced with data.shard_by = "own", as otherwise all workers '
            "validate one text together: name one corpus"
        )
        yield "data.validation_corpus", reason


def _mirror_mistakes(config: Config) -> Mistakes:
    """Yield the mistakes of a mirror that would be lost with what it mirrors, or does not exist."""
    mirror = config.checkpoint.mirror
    folder = config.run.folder
    if config.checkpoint.adopt and not mirror:
        yield (
            "checkpoint.adopt",
            "is only used with checkpoint.mirror: set that too, or remove this setting",
        )
    if "://" in mirror or not (mirror and folder):
        return
    if Path(mirror).expanduser().resolve().is_relative_to(Path(folder).expanduser().resolve()):
        yield (
            "checkpoint.mirror",
            "is run.folder, or in it, and would be lost with it: give another location",
        )


def unused_settings(config: Config) -> Iterator[str]:
    """Yield a line for each changed setting that has no effect."""
    defaults = flat_settings(Config())
    chosen = flat_settings(config)
    for (decider, values), names in [*READ_WITH.items(), *_readers()]:
        section = decider.rpartition(".")[0]
        if section.startswith("diloco") and config.diloco.method == "none":
            continue
        for key in (f"{section}.{name}" for name in names):
            if chosen[key] != defaults[key] and chosen[decider] not in values:
                yield (
                    f"{key} = {format_value(chosen[key])} has no effect with "
                    f"{decider} = {format_value(chosen[decider])}: it is for "
                    + " and ".join(map(format_value, values))
                )


def _readers() -> Iterator[tuple[tuple[str, tuple[str, ...]], tuple[str, ...]]]:
    """Yield for each setting that only some entries of a dict read what READ_WITH would have."""
    for key, kind in setting_types(Config).items():
        entries = entries_of(kind)
        for name in dict.fromkeys(name for entry in entries.values() for name in entry.reads):
            readers = [choice for choice, entry in entries.items() if name in entry.reads]
            yield (key, tuple(readers)), (name,)


def run_warnings(config: Config, total_steps: int, start_step: int = 0) -> list[str]:
    """Return warnings about valid settings that are unlikely to be intended.

    `start_step`: step from which the run is resumed.
    """
    warnings = [*advice(config.diloco, total_steps), *unused_settings(config)]
    if config.training.stop_after > total_steps and not config.islands.join:
        warnings.append(
            f"training.stop_after = {config.training.stop_after} is after the end of the run of "
            f"{total_steps} steps and has no effect: lower it"
        )
    last_step = min(total_steps, config.training.stop_after or total_steps)
    steps_here = max(0, last_step - start_step)
    if config.profiling.start >= max(1, steps_here) and not config.islands.join:
        warnings.append(
            f"profiling.start = {config.profiling.start} is after the end of this process, which "
            f"trains {steps_here} steps, so no step is traced: lower it"
        )
    mixtures = {MIXTURE: config.data.mixture} if config.data.mixture else {}
    mixtures |= {
        f"data.phases[{number}]": phase.mixture for number, phase in enumerate(config.data.phases)
    }
    warnings += [
        f"the weights of {key} are rounded to multiples of 1/{MOST_TURNS:,} of "
        "their sum, because their exact shares need more samples to repeat: give "
        "weights with fewer digits"
        for key, mixture in mixtures.items()
        if is_rounded(mixture)
    ]
    warmup_steps = steps_of(config.lr_schedule.warmup, total_steps)
    if warmup_steps > total_steps:
        warnings.append(
            f"lr_schedule.warmup = {warmup_steps} is longer than the run of {total_steps} "
            "steps, so the peak learning rate is never reached: shorten it"
        )
    return warnings
