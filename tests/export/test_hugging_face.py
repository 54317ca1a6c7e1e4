"""An exported folder, loaded by the real transformers library, is our model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.export.reading import (
    LENGTH,
    ROWS,
    VOCABULARY,
    build,
    load,
    read_weights,
    save,
    some_tokens,
)
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.export.weights import load_initial_weights
from torchtitan_diloco.generate import generate
from torchtitan_diloco.models import LanguageModel

TINY: dict[str, Any] = {"layers": 2, "width": 24, "heads": 3, "head_dim": 10, "feed_forward": 40}
TINY |= {"rotary_base": 300.0}
VARIANTS = [
    Model(**TINY),
    Model(**TINY, norm="layernorm", activation="swiglu"),
    Model(**TINY, qk_norm=False, positions="learned"),
    Model(**{**TINY, "head_dim": 7}, activation="swiglu", positions="learned"),
]
Pair = tuple[LanguageModel, Any, Path]


def saved_and_loaded(model: Model, folder: Path) -> Pair:
    decoder = build(model)
    save(decoder, folder)
    return decoder, load(folder), folder


def greedy(
    decoder: LanguageModel, prompt: list[int], count: int, stop: int | None = None
) -> list[int]:
    options: dict[str, Any] = {"vocab_size": VOCABULARY, "max_new_tokens": count, "stop": stop}
    return list(generate(decoder, prompt, temperature=0, **options))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return saved_and_loaded(request.param, tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return saved_and_loaded(VARIANTS[0], tmp_path_factory.mktemp("exported"))


def test_logits_are_ours_and_padding_changes_nothing(pair: Pair) -> None:
    decoder, model, folder = pair
    tokens, expected = some_tokens(1, 9), decoder(some_tokens(1, 9))
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    for left, right in ((6, 0), (0, 6), (2, 3)):
        padded = F.pad(tokens, (left, right), value=256)
        mask = F.pad(torch.ones_like(tokens), (left, right))
        logits = model(padded, attention_mask=mask).logits[:, left : left + 9]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    again = build(decoder.config, seed=1)
    load_initial_weights(again, str(folder))
    assert torch.equal(again(tokens), expected), "what was exported is read again"


def test_logits_are_ours_in_bfloat16(pair: Pair, tmp_path: Path) -> None:
    decoder, model, folder = pair
    tokens = some_tokens(2, LENGTH)
    rounded, exact = build(decoder.config).to(torch.bfloat16), model(tokens).logits
    save(decoder, tmp_path, torch.bfloat16)
    stored, cast = load(tmp_path, torch_dtype="auto"), load(folder, torch_dtype=torch.bfloat16)
    for half in (stored, cast):
        logits = half(tokens).logits
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(logits, rounded(tokens), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.6)


def test_generation_with_and_without_cache_is_ours(pair: Pair) -> None:
    decoder, model, _ = pair
    prompts = [some_tokens(length, seed=length).tolist() for length in (3, 8)]
    batch = torch.tensor([[256] * (8 - len(prompt)) + prompt for prompt in prompts])
    options = {"attention_mask": batch != 256, "max_new_tokens": 12, "do_sample": False}
    for use_cache in (True, False):
        found = model.generate(batch, **options, use_cache=use_cache)
        for row, prompt in zip(found[:, 8:].tolist(), prompts, strict=True):
            expected = greedy(decoder, prompt, 12, stop=256)
            assert row == expected + [256] * (len(row) - len(expected))


def test_other_arguments_and_outputs(plain: Pair) -> None:
    decoder, model, _ = plain
    tokens = some_tokens(1, 9)
    labels = torch.cat((torch.full((1, 5), -100), tokens[:, 5:]), dim=1)
    loss = F.cross_entropy(decoder(tokens)[0, :-1], labels[0, 1:])
    torch.testing.assert_close(model(tokens, labels=labels).loss, loss, rtol=1e-5, atol=1e-5)
    full = model(tokens, output_hidden_states=True)
    assert len(full.hidden_states) == 1 + TINY["layers"]
    embedded = model.get_input_embeddings()(tokens)
    begun = model(tokens[:, :4], use_cache=True).past_key_values
    for logits, expected in (
        (model.lm_head(full.hidden_states[-1]), full.logits),
        (model(tokens, logits_to_keep=2).logits, full.logits[:, -2:]),
        (model(inputs_embeds=embedded).logits, full.logits),
        (model(tokens[:, 4:], past_key_values=begun).logits, full.logits[:, 4:]),
        (model(tokens, return_dict=False)[0], full.logits),
    ):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    mask = torch.ones_like(tokens)
    options = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
    assert model.generate(tokens, attention_mask=mask, **options).shape == (1, 13)
    # Rotary positions have no end.
    assert model(some_tokens(1, LENGTH + 9)).logits.shape[1] == LENGTH + 9
    assert decoder.sequence_length == model.config.max_position_embeddings


def test_the_tied_matrix_is_stored_once_and_stays_tied(plain: Pair, tmp_path: Path) -> None:
    decoder, model, folder = plain
    assert model.lm_head.weight is model.embedding.weight
    model.save_pretrained(tmp_path)
    for source in folder.glob("*.py"):  # old versions of transformers do not copy it
        shutil.copy(source, tmp_path)
    for saved in (folder, tmp_path):
        assert set(read_weights(saved)) == set(decoder.state_dict())
    again, tokens = load(tmp_path), some_tokens(1, 5)
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
    again.resize_token_embeddings(ROWS + 3)
    assert again.lm_head.weight is again.get_input_embeddings().weight
    assert again(tokens).logits.shape[-1] == ROWS + 3


def test_rows_beyond_the_vocabulary_are_kept_and_never_drawn(tmp_path: Path) -> None:
    decoder = build(VARIANTS[0])
    with torch.no_grad():
        parameters = dict(decoder.named_parameters())
        torch.nn.init.ones_(parameters["norm.weight"])
        parameters["embedding.weight"][VOCABULARY:] *= 100
    save(decoder, tmp_path)
    model, tokens = load(tmp_path), some_tokens(4, 4)
    assert model.config.vocab_size == ROWS
    assert model(tokens).logits.argmax(-1).max() >= VOCABULARY
    torch.manual_seed(0)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 15}
    assert model.generate(tokens, **options, do_sample=True).max() < VOCABULARY


WITHOUT_OUR_PACKAGE = """
import json, sys
sys.modules["torchtitan_diloco"] = None  # importing it is an error
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "chinchilla"
batch = tokenizer(["one", "and two"], padding=True, return_tensors="pt")
print(json.dumps(model.generate(**batch, max_new_tokens=5, do_sample=False)[:, -5:].tolist()))
"""


def test_it_loads_without_our_package(plain: Pair, tmp_path: Path) -> None:
    decoder, _, folder = plain
    names = "modeling_chinchilla.py config.json generation_config.json tokenizer.json"
    names += " tokenizer_config.json model.safetensors"
    assert {path.name for path in folder.iterdir()} == set(names.split())
    environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name in ("HOME", "HF_HOME", "HF_MODULES_CACHE"):
        environment[name] = str(tmp_path / name)
    command = [sys.executable, "-c", WITHOUT_OUR_PACKAGE, str(folder)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
    outcome = subprocess.run(command, cwd=tmp_path, env=environment, check=False, **options)
    assert outcome.returncode == 0, outcome.stderr
    assert "initialized" not in outcome.stderr
    for prompt, found in zip(("one", "and two"), json.loads(outcome.stdout), strict=True):
        assert found == greedy(decoder, build_tokenizer("bytes").encode(prompt).tolist(), 5)
    assert not (tmp_path / "HOME").exists()
