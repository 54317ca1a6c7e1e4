"""With `model.document_mask`, documents in one sequence are as each would be alone."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import torchtitan_diloco.models.decoder
from tests.components.test_resume import run
from tests.conftest import WORDS
from tests.export.reading import validation_of
from tests.models.test_model import VARIANTS
from tests.processes import ProcessPool
from tests.test_trainer import LOSS, VALIDATION, curve, join, records, settings
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.loss import LossSums, loss_head
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.data.batch import IGNORE_INDEX
from torchtitan_diloco.data.prepare import prepare
from torchtitan_diloco.data.text import open_corpus
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.export import __main__ as commands
from torchtitan_diloco.export.weights import open_saved
from torchtitan_diloco.models.decoder import Decoder, document_mask, resolve_shape
from torchtitan_diloco.models.generation import generate
from torchtitan_diloco.models.interface import init_weights
from torchtitan_diloco.trainer import Trainer

VOCABULARY = 50
END = 0
MASKED = [replace(variant, document_mask=True) for variant in VARIANTS]


def build(config: Model) -> Decoder:
    model = Decoder(resolve_shape(config), VOCABULARY)
    init_weights(model, seed=0)
    model.end_of_document = END if config.document_mask else None
    return model


def draw_document(length: int, seed: int) -> Tensor:
    """Return a document of so many tokens, the last of which ends it."""
    generator = torch.Generator().manual_seed(seed)
    document = torch.randint(1, VOCABULARY, (length,), generator=generator)
    document[-1] = END
    return document


def losses(model: Decoder, inputs: Tensor, targets: Tensor) -> LossSums:
    found: LossSums = model(inputs[None], head=loss_head(targets[None], z_loss=1e-3))
    return found


def gradients_of(model: Decoder, objective: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(objective, list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


@pytest.mark.parametrize("config", MASKED)
def test_documents_of_a_sequence_have_the_losses_and_gradients_that_they_have_alone(
    config: Model,
) -> None:
    model = build(config)
    documents = [draw_document(length, seed=length) for length in (9, 1, 13, 6)]
    inputs = torch.cat(documents)
    targets = inputs.roll(-1)
    targets[-1] = IGNORE_INDEX
    together = losses(model, inputs, targets)
    parts = targets.split([len(document) for document in documents])
    alone = [losses(model, *each) for each in zip(documents, parts, strict=True)]
    assert_close(together.objective, sum(each.objective for each in alone), rtol=1e-5, atol=0)
    expected = gradients_of(model, torch.stack([each.objective for each in alone]).sum())
    assert_close(gradients_of(model, together.objective), expected, rtol=1e-4, atol=1e-5)

    model.end_of_document = None
    across = losses(model, inputs, targets)
    assert not torch.isclose(across.objective, together.objective, rtol=1e-5)


@pytest.mark.parametrize("config", MASKED)
def test_a_sequence_of_one_document_is_as_without_a_mask(config: Model) -> None:
    tokens = draw_document(24, seed=1)[None].repeat(2, 1)
    tokens[1] = tokens[1].roll(3).clamp(min=1)  # it ends later
    masked = build(config)
    plain = build(replace(config, document_mask=False))
    assert_close(masked(tokens), plain(tokens), rtol=1e-6, atol=1e-6)


@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=3))
def test_a_token_sees_what_follows_the_end_before_it(rows: list[list[int]]) -> None:
    mask = document_mask(torch.tensor(rows), END, blocks=False)
    expected = [
        [[key <= query and END not in row[key:query] for key in range(7)] for query in range(7)]
        for row in rows
    ]
    assert isinstance(mask, Tensor)
    assert mask[:, 0].tolist() == expected


@pytest.mark.parametrize("config", MASKED)
@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_of_flex_attention_give_the_same_logits(
    monkeypatch: pytest.MonkeyPatch, config: Model, compiled: bool
) -> None:
    """As on a GPU. torch has no kernel for the CPU that can be trained through."""
    lengths = (100, 31, 130, 2, 37)  # shorter than a block of 128, and across several
    documents = [draw_document(length, seed=length) for length in lengths]
    batches = [torch.cat(documents)[None], torch.cat(documents[::-1])[None]]
    model = build(config)
    with torch.no_grad():
        expected = [model(tokens) for tokens in batches]
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    decoder = torchtitan_diloco.models.decoder
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    decoder.compiled_flex_attention.cache_clear()
    plain = document_mask
    monkeypatch.setattr(
        decoder, "document_mask", lambda tokens, end, blocks: plain(tokens, end, blocks=not blocks)
    )
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    with torch.no_grad():
        for tokens, logits in zip(batches, expected, strict=True):
            assert_close(model(tokens), logits, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1, "one for all layers and batches"
    decoder.compiled_flex_attention.cache_clear()


def test_a_text_that_begins_with_the_end_of_another_does_not_see_it() -> None:
    model = build(Model(layers=2, tied_head=False, document_mask=True))
    model.end_of_document = None  # as `generate` opens it
    options: Any = {"vocab_size": VOCABULARY, "sequence_length": 32, "max_new_tokens": 9}
    options |= {"temperature": 0, "stop": END, "document_mask": True}
    with torch.no_grad():
        found = [END, *generate(model, [[END]], **options)[0]]
        assert len(found) > 3
        model.end_of_document = END
        logits = model(torch.tensor([found]))[0]
    assert found[1:] == logits.argmax(-1)[:-1].tolist()


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Many documents, of which several fit into a sequence."""
    path = tmp_path / "documents.jsonl"
    pairs = [*pairwise(WORDS * 60)]
    path.write_text("".join(json.dumps({"text": " ".join(pair)}) + "\n" for pair in pairs))
    return path


STREAMING = {
    "diloco.method": "streaming",
    "diloco.workers": 2,
    "diloco.sync_every": 4,
    "diloco.fragments.layers_per_fragment": 1,
    "training.batch_size": 3,
    "checkpoint.every": 4,
    "checkpoint.at_end": "true",
    "model.document_mask": "true",
}


def test_a_run_of_two_workers_resumes_and_its_checkpoint_is_used(
    documents: Path, processes: ProcessPool
) -> None:
    whole = settings(documents, **STREAMING)
    folder = Path(processes.run(run, 2, whole)[0])
    expected = curve(records(folder), LOSS)

    parts = settings(documents, run__folder=documents.parent / "parts", **STREAMING)
    processes.run(run, 2, parts | {"training.stop_after": "4"})
    (again, _) = processes.run(run, 2, parts)
    assert curve(records(Path(again)), LOSS) == expected

    without = settings(documents, run__folder=documents.parent / "without", **STREAMING)
    (other, _) = processes.run(run, 2, without | {"model.document_mask": "false"})
    assert curve(records(Path(other)), LOSS)[-1] != expected[-1]

    validated = curve(records(folder), VALIDATION)[-1]
    assert validation_of(open_saved(folder)).loss == pytest.approx(validated, abs=1e-4)
    assert commands.main(["generate", str(folder), "--tokens", "3"]) == 0
    for name in ("safetensors", "hf", "torchtitan"):
        assert commands.main(["export", str(folder), "--format", name]) == 0


def test_data_parallelism_gives_the_same_curve_as_one_process(
    documents: Path, processes: ProcessPool
) -> None:
    options = {"model.document_mask": "true", "training.batch_size": 2}
    options |= {"activation_checkpoint.mode": "selective"}
    alone = Path(run(settings(documents, **options)))
    many = settings(documents, run__folder=documents.parent / "many", diloco__workers=2, **options)
    (together, _) = processes.run(run, 2, many)
    for key in (LOSS, VALIDATION):
        expected = curve(records(alone), key)
        assert curve(records(Path(together)), key) == pytest.approx(expected, rel=2e-4), key


def test_the_start_says_where_a_mask_is_of_no_use(
    text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = text.parent / "shards"
    prepare(open_corpus(str(text)), build_tokenizer("bytes"), folder, validation_fraction=0.1)
    chosen = settings(folder, model__document_mask="true")
    config = load_config("debug", chosen)
    Trainer(config, join(config))
    (warning,) = [one.getMessage() for one in caplog.records if "document_mask" in one.getMessage()]
    assert "tokens on average, and are cut into sequences of 32" in warning

    index = folder / "corpus.json"
    content = json.loads(index.read_text())
    content["splits"]["train"]["documents"] = 0
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"document_mask = true, but no document ends in the train"):
        Trainer(config, join(config))


def test_the_mask_is_made_once_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    plain = document_mask

    def counted(tokens: Tensor, end: int, blocks: bool) -> Any:
        calls.append(blocks)
        return plain(tokens, end, blocks=blocks)

    monkeypatch.setattr(torchtitan_diloco.models.decoder, "document_mask", counted)
    model = build(Model(layers=3, document_mask=True))
    model(torch.arange(8)[None])
    assert calls == [False]
