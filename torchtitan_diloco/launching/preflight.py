"""Check that this machine has what a run needs, before any process of the run starts."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.hardware import GLOO_INTERFACE, check_device, check_interfaces
from torchtitan_diloco.base.registry import find
from torchtitan_diloco.base.user import UserError, command_line, install_command, installed
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.checks import run_warnings
from torchtitan_diloco.config.parts import BOARDS, SOURCES
from torchtitan_diloco.config.schema import WORKER_FIELD
from torchtitan_diloco.data.corpus import find_corpus, own_name
from torchtitan_diloco.data.tokenizer import USUAL, build_tokenizer
from torchtitan_diloco.islands.config import check_may_decide, local_names, location_id
from torchtitan_diloco.store.location import check_location, check_present, is_bucket

INCOMPLETE = ".incomplete"
"""Suffix of the folder of a checkpoint whose save has not ended."""
PUBLISHED = {
    "llama-1b": "meta-llama/Llama-3.2-1B",
    "llama-3b": "meta-llama/Llama-3.2-3B",
    "llama-8b": "meta-llama/Llama-3.1-8B",
}
"""Names of published weights on the Hugging Face Hub, by `model.flavor`."""


def check_inputs(config: Config) -> None:
    """Raise an error that lists everything that is missing or inconsistent."""
    problems = [*missing(config)]
    if not problems or not [*_missing_for_model(config)]:
        problems += [mistake for mistake in _tried(_check_model, config) if mistake not in problems]
    if problems:
        count = counted(len(problems), "thing")
        raise UserError("\n  ".join([f"{count} to do before this run can start:", *problems]))


def early_warnings(config: Config) -> list[str]:
    """Return the warnings about the settings, or none if the model has a mistake, which
    `check_inputs` reports."""
    from torchtitan_diloco.planner.prediction import Workload

    try:
        plan = Workload.of(config, vocabulary_rows_of(config)).plan
    except UserError:
        return []
    return run_warnings(config, plan.total_steps)


def missing(config: Config) -> Iterator[str]:
    """Yield what has to be installed, found, downloaded and prepared, in this order."""
    files = [*_missing_files(config)]
    stores = [config.checkpoint.mirror, config.islands.join]
    boards = {name: match[0] for name in config.metrics.boards if (match := find(BOARDS, name))}
    sources = [
        entry
        for name, entry in SOURCES.items()
        if any(f"--source {name}:" in problem for problem in files)
    ]
    packages = {entry.package: entry.extra for entry in (*boards.values(), *sources)}
    if any(map(is_bucket, stores)):
        packages["obstore"] = "bucket"
    for package, extra in packages.items():
        if package and find_spec(package) is None:
            yield f"install {package}: {install_command(extra)}"
    for name, entry in boards.items():
        for variable, meaning in entry.variables.items():
            if not os.environ.get(variable):
                yield f"metrics.boards: {name}: set {variable} to {meaning}"
    if config.checkpoint.mirror:
        for check in (check_location, check_present):
            for problem in _tried(check, config.checkpoint.mirror):
                yield f"checkpoint.mirror: {problem}"
    yield from _tried(check_device, config.run.device)
    if join := config.islands.join:
        for problem in _tried(check_present, join):
            yield f"islands.join: {problem}"
        yield from _tried(location_id, join)
    if config.islands.sync:
        yield from _tried(check_may_decide, config.islands.join)
    yield from _missing_interfaces(config)
    yield from _tried(_check_folder, config)
    yield from _tried(_check_resume, config)
    yield from files


def _missing_interfaces(config: Config) -> Iterator[str]:
    chosen = config.diloco.link.interface
    yield from _tried(check_interfaces, f'diloco.link.interface = "{chosen}"', chosen)
    of_gloo = os.environ.get(GLOO_INTERFACE, "")
    yield from _tried(check_interfaces, f"{GLOO_INTERFACE}={of_gloo}", of_gloo)


def _check_folder(config: Config) -> None:
    folder = Path(config.run.folder).expanduser()
    above = (folder, *folder.parents)
    existing = next(path for path in above if os.path.exists(path))  # noqa: PTH110
    if config.run.folder and not (existing.is_dir() and os.access(existing, os.W_OK)):
        reason = f"{existing} is not a writable folder: choose another"
        raise UserError(f'run.folder = "{config.run.folder}": {reason}')


def _check_resume(config: Config) -> None:
    """Raise if the checkpoint that a new run starts from is missing. Other nodes may have it, and a
    run with checkpoints goes on from its own."""
    resume = config.checkpoint.resume
    if resume == "auto" or config.checkpoint.mirror or not _is_only_node():
        return
    try:
        problem = _why_no_checkpoint(config, Path(resume).expanduser())
    except OSError as error:  # such as a name that is too long
        problem = f"cannot be read ({error.strerror})"
    if problem:
        raise UserError(
            f'checkpoint.resume = "{resume[:80]}": this folder {problem}: give that of a '
            'checkpoint, or of a run with one, or "auto"'
        )


def _why_no_checkpoint(config: Config, source: Path) -> str:
    """Return why a new run cannot start from a folder. Return an empty string if it can, or if the
    run goes on."""
    saved = "*/worker-*/step-*" if config.islands.local else "worker-*/step-*"
    if config.run.folder and any(Path(config.run.folder).expanduser().glob(saved)):
        return ""
    if not source.exists():
        steps = source.parent.parent.glob(f"worker-*/{source.name}")  # those of other workers
        is_step = source.name.startswith("step-")
        return "" if is_step and any(steps) else "does not exist"
    steps = source.glob("worker-*/step-*")
    is_there = source.name.startswith("step-") or any(path.suffix != INCOMPLETE for path in steps)
    return "" if is_there else "has no complete checkpoint"


def _is_only_node() -> bool:
    """Return whether all processes of the job are on this machine, as the launcher or torchrun
    says."""
    return all(os.environ.get(name, "1") in ("", "1") for name in ("NNODES", "GROUP_WORLD_SIZE"))


def _missing_for_model(config: Config) -> Iterator[str]:
    """Yield which files are missing that `_check_model` reads: weights and tokenizer."""
    weights = Path(config.model.weights).expanduser()
    absent = config.model.weights and not weights.exists() and not _goes_on(config)
    if absent:
        remedy = "give the folder of an export, or of a Llama or Qwen3 written by another program"
        if name := PUBLISHED.get(config.model.flavor):
            remedy = f"{installed('hf')} download {name} --local-dir {config.model.weights}"
        yield f'model.weights = "{config.model.weights}": there is no such file or folder: {remedy}'
    tokenizer = Path(config.data.tokenizer).expanduser()
    if not (absent and tokenizer.is_relative_to(weights)):  # else it comes with the weights
        yield from _tried(_check_tokenizer, config)


def _missing_files(config: Config) -> Iterator[str]:
    yield from _missing_for_model(config)
    data = config.data
    named = [(data.corpora_key, name) for name in data.corpora]
    if data.validation_corpus:
        named.append(("data.validation_corpus", data.validation_corpus))
    for key, name in named:
        for spec in _own_names(config, name):
            yield from _tried(find_corpus, data, key, spec, lambda: _prepare_options(config))


def _own_names(config: Config, name: str) -> list[str]:
    """Return the names of a corpus for the workers on this machine. In a job on several nodes, each
    node has only the corpora of its own workers, so none is checked."""
    if WORKER_FIELD not in name:
        return [name]
    if config.islands.local:
        workers = local_names(config.islands.local)
    elif config.islands.join:
        workers = [config.islands.name]
    else:
        count = config.diloco.workers if _is_only_node() else 0
        workers = [str(worker) for worker in range(count)]
    return [own_name(name, worker) for worker in workers]


def _tried(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    try:
        check(*arguments)
    except UserError as error:
        yield str(error)


def _goes_on(config: Config) -> bool:
    """Return whether checkpoints, on this or another node, may contain the weights."""
    saved = Path(config.run.folder).expanduser().glob("worker-*/step-*")
    return bool(config.run.folder) and (not _is_only_node() or any(saved))


def _check_tokenizer(config: Config) -> None:
    data = config.data
    path = Path(config.data.tokenizer).expanduser()
    if path.suffix == ".json" and not path.exists() and data.source:
        size = config.model.vocab_size or USUAL
        words = f"--source {data.source} --vocab-size {size} --out {path}"
        raise UserError(
            f'data.tokenizer = "{data.tokenizer}": there is no such file: copy it from another '
            f"machine, or train one:\n    {command_line('tokenizer')} {words}"
        )
    build_tokenizer(data.tokenizer)


def _prepare_options(config: Config) -> list[str]:
    """Return the options of `prepare` for as many tokens as the run reads."""
    from torchtitan_diloco.planner.prediction import Workload

    plan = Workload.of(config, vocabulary_rows_of(config)).plan
    begin = ["--begin-token"] if config.model.flavor in PUBLISHED else []
    return ["--max-tokens", str(plan.total_steps * plan.tokens_per_step), *begin]


def vocabulary_rows_of(config: Config) -> int:
    """Return the rows of the embedding, even if there is no tokenizer yet."""
    from torchtitan_diloco.models import vocabulary_rows

    if config.model.vocab_size:
        return config.model.vocab_size
    try:
        return vocabulary_rows(config.model, build_tokenizer(config.data.tokenizer).vocab_size)
    except UserError:  # it is listed as missing, with the command that trains one
        return USUAL


def _check_model(config: Config) -> None:
    """Raise an error if the settings of model, fragments, tokenizer and weights are
    inconsistent."""
    from torchtitan_diloco.diloco.fragments import build_fragments
    from torchtitan_diloco.export.weights import check_weights
    from torchtitan_diloco.models import build_model, vocabulary_rows

    tokenizer = build_tokenizer(config.data.tokenizer)
    rows = vocabulary_rows(config.model, tokenizer.vocab_size)
    model = build_model(config.model, rows, config.training.sequence_length)
    if config.diloco.method != "none":
        build_fragments(model, config.diloco.fragments)
    if config.model.weights and not _goes_on(config):
        check_weights(model, config.model.weights, tokenizer)
