"""An exported folder, loaded by the real transformers library, is our model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.components.test_resume import assert_same
from tests.conftest import REPOSITORY, save_tokenizer
from tests.export.reading import BYTES, LENGTH, ROWS, VOCABULARY, build, load, read_weights, save
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.export.hugging_face import save_hugging_face
from torchtitan_diloco.export.weights import load_initial_weights
from torchtitan_diloco.models.decoder import Decoder

SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "head_dim": 16, "feed_forward": 48}
QWEN3 = Model(layers=2)  # the default run has two more
LLAMA = Model(**SMALL, kv_heads=2, qk_norm=False, tied_head=False, norm_epsilon=1e-5)
VARIANTS = [
    QWEN3,
    Model(**SMALL, kv_heads=2, tied_head=False, rotary_base=300.0),
    LLAMA,
    Model(**SMALL, kv_heads=1, qk_norm=False, rotary_scaling=8.0, norm_epsilon=1e-5),
]
Pair = tuple[Decoder, Any, Path]


def some_tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY - 1, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    decoder = build(request.param)
    folder = tmp_path_factory.mktemp("exported")
    save(decoder, folder)
    return decoder, load(folder), folder


def test_it_is_a_plain_qwen3_or_llama_with_our_logits_to_the_bit(pair: Pair) -> None:
    decoder, model, folder = pair
    expected = "Qwen3ForCausalLM" if decoder.shape.qk_norm else "LlamaForCausalLM"
    assert type(model).__name__ == expected
    names = "config.json generation_config.json tokenizer.json tokenizer_config.json"
    assert {path.name for path in folder.iterdir()} == {*names.split(), "model.safetensors"}
    for length in (1, 16, LENGTH):
        tokens = some_tokens(2, length)
        assert torch.equal(model(tokens).logits, decoder(tokens))
    rounded = folder.with_name(f"{folder.name}-bf16")
    save(decoder, rounded, torch.bfloat16)
    cast = load(folder, torch_dtype=torch.bfloat16)
    assert_same(load(rounded, torch_dtype="auto").state_dict(), cast.state_dict())
    again = Decoder(decoder.shape, ROWS)
    load_initial_weights(again, str(folder), BYTES)
    assert torch.equal(again(tokens), decoder(tokens)), "what was exported is read again"
    is_tied = decoder.shape.tied_head
    assert ("lm_head.weight" not in read_weights(folder)) == is_tied, "stored once"
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == is_tied, "stays tied"


def test_rows_beyond_the_vocabulary_are_kept_and_never_drawn(tmp_path: Path) -> None:
    decoder = build(QWEN3)
    with torch.no_grad():
        torch.nn.init.ones_(decoder.norm.weight)
        decoder.embedding.weight[VOCABULARY:] *= 100
    save(decoder, tmp_path)
    model = load(tmp_path)
    tokens = some_tokens(4, 4)
    assert model.config.vocab_size == ROWS
    assert model(tokens).logits.argmax(-1).max() >= VOCABULARY
    torch.manual_seed(0)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 15}
    assert model.generate(tokens, **options, do_sample=True).max() < VOCABULARY


def test_a_gelu_model_is_refused(tmp_path: Path) -> None:
    message = r"--format hf: the model .*gelu.* use --format safetensors, or train with model.activ"
    with pytest.raises(ValueError, match=message):
        save(build(Model(activation="gelu")), tmp_path)


# --- tokenizer ------------------------------------------------------------------------------------

TEXTS = ["", "Two words\n\n  12345, <|endoftext|> \u4e2d\u6587 don't .", " lm ' s", "x" * 3000]
TEXTS.append((REPOSITORY / "README.md").read_text())


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_the_tokenizer_in_transformers_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec = "bytes" if kind == "bytes" else save_tokenizer(tmp_path / "own.json", 300)
    ours = build_tokenizer(spec)
    save_hugging_face(tmp_path, build(QWEN3), ours, torch.float32, sequence_length=LENGTH)
    if kind == "file":
        copied = (tmp_path / "tokenizer.json").read_bytes()
        assert copied == Path(spec).read_bytes()
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = loaded(text).input_ids
        assert ids == ours.encode(text).tolist() == loaded.encode(text)
        assert loaded.decode(ids) == text == ours.decode(ids)
    odd = [228, 184, 65, 255, 240, 159, 152, 66]
    assert loaded.decode(odd) == ours.decode(odd)
    end = ours.end_of_document
    assert loaded.eos_token_id == loaded.bos_token_id == loaded.pad_token_id == end
    assert (loaded.model_max_length, loaded.padding_side) == (LENGTH, "left")
    read = loaded("a<|endoftext|>", split_special_tokens=False).input_ids
    assert read == [*ours.encode("a"), end]
    batch = loaded(["a b c", "a"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"][1][0] == 0


def test_an_encoding_of_tiktoken_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = replace(build_tokenizer("bytes"), name="gpt2")
    save_hugging_face(tmp_path, build(QWEN3), named, torch.float32, sequence_length=LENGTH)
    assert 'has no tokenizer.json, as "gpt2" is an encoding of tiktoken' in caplog.text
    assert not (tmp_path / "tokenizer.json").exists()
