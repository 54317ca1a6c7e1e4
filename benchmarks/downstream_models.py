"""The models that `benchmarks.downstream` compares: where their parameters and their text are."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.downstream_tasks import Text
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint import MODEL
from torchtitan_diloco.components.checkpoint_folder import complete_checkpoints, read_manifest
from torchtitan_diloco.components.saved_tensors import SavedTensors
from torchtitan_diloco.config.weights import Weights, turns_of
from torchtitan_diloco.data.corpus import open_split
from torchtitan_diloco.export.weights import SavedModel, open_saved

HELD_OUT_TOKENS = 2_000_000
"""Tokens of held-out text of all corpora that examples are made from, at most."""
CONTROL = "data parallel"


class Source(NamedTuple):
    """Where the parameters of a model are."""

    seed: int
    name: str
    run: Path
    is_worker: bool = False
    """Whether they are the first worker's own ones, instead of the shared ones."""


def find_sources(
    folders: Sequence[Path], *, controls_may_differ_in_tokens: bool = False
) -> list[Source]:
    """Return the models of the finished runs in these folders, the controls first.

    The runs must differ in the method and the seed only, and have a control of each seed.
    `controls_may_differ_in_tokens`: whether all controls may have another number of tokens.
    """
    workers = (worker for folder in folders for worker in folder.glob("**/worker-0"))
    runs = sorted({worker.parent for worker in workers if complete_checkpoints(worker)})
    sources: list[Source] = []
    kinds: dict[Path, dict[str, object]] = {}
    for run in runs:
        saved = open_saved(run)
        config = saved.config
        outer = saved.config.diloco
        facts = common_facts(saved)
        kinds[run] = facts
        if controls_may_differ_in_tokens:
            key = "tokens of controls" if outer.method == "none" else "tokens of others"
            facts[key] = facts.pop("tokens")
        if outer.method == "none":
            sources.append(Source(config.run.seed, CONTROL, run))
        else:
            method = f"{outer.method}, M={outer.workers}, H={outer.sync_every}"
            sources.append(Source(config.run.seed, f"{method}: merged", run))
            sources.append(Source(config.run.seed, f"{method}: one worker", run, is_worker=True))
    first_with: dict[str, Path] = {}
    for run, facts in kinds.items():
        for name, fact in facts.items():
            first = first_with.setdefault(name, run)
            if kinds[first][name] != fact:
                raise UserError(
                    f"{first} and {run} differ in {name}: give --runs with folders of runs that "
                    "differ in the method and the seed only, or in tokens of the controls with "
                    "--control-ratio"
                )
    if len({(source.seed, source.name) for source in sources}) < len(sources):
        raise UserError("--runs has two runs of the same method and seed: give folders with one")
    controls = {source.seed for source in sources if source.name == CONTROL}
    without = {source.seed for source in sources} - controls
    if without or not sources:
        lacking = f"no run with checkpoints and run.seed = {min(without, default=0)}"
        raise UserError(
            f'{lacking} has diloco.method = "none", as a control: give such folders to --runs, '
            "trained with checkpoint.at_end = true"
        )
    return sorted(sources, key=lambda source: (source.name != CONTROL, source.name, source.seed))


def common_facts(saved: SavedModel) -> dict[str, object]:
    """Return what all runs that are compared have in common, by what it is called."""
    config = saved.config
    manifest = read_manifest(saved.path)
    assert manifest.position is not None, "a checkpoint of a run"
    fingerprints = manifest.position.corpora

    def mixed(weights: Weights) -> dict[str, int]:
        turns = turns_of(weights).items()  # of the tokens, as folders may have other names
        return {fingerprints[name]: turn for name, turn in turns if turn}

    return {
        "tokens": manifest.tokens,
        "model": config.model,
        "optimizer": config.optimizer,
        "learning-rate schedule": config.lr_schedule,
        "sequence length": config.training.sequence_length,
        "batch": config.training.global_batch_size,
        "tokenizer": saved.tokenizer.fingerprint,
        "corpus or mixture": mixed(config.data.weights),
        "phases": [(phase.start, mixed(phase.mixture)) for phase in config.data.phases],
    }


def open_source(source: Source) -> SavedModel:
    saved = open_saved(source.run)
    if source.is_worker:
        local = {MODEL + name: value.detach() for name, value in saved.model.named_parameters()}
        SavedTensors(saved.path, read_manifest(saved.path)).fill(local)
    return saved


def read_held_out(saved: SavedModel) -> tuple[list[Text], list[Text]]:
    """Return the held-out text of each corpus to fine-tune on and to test on: every other
    document."""
    config = saved.config
    data = config.data
    worker = config.worker_name(0)
    corpora = [
        open_split(data, saved.tokenizer, "validation", name=name, worker=worker)
        for name in data.held_out_corpora
    ]
    to_fit = list[Text]()
    to_test = list[Text]()
    for tokens in corpora:
        count = min(len(tokens), HELD_OUT_TOKENS // len(corpora))
        ids = torch.from_numpy(tokens.read(0, count).astype("int64"))
        ends = (ids == saved.tokenizer.end_of_document).nonzero().flatten().tolist()
        parts = ids.tensor_split([end + 1 for end in ends])
        documents = [saved.tokenizer.decode(part[:-1].tolist()) for part in parts]
        to_fit.append(Text(documents[::2]))
        to_test.append(Text(documents[1::2]))
    return to_fit, to_test
