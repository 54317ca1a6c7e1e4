"""Folders of transformers, with a Llama or Qwen3, in which a run starts."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.components.test_resume import run
from tests.export.reading import BYTES, build, load, read_weights, save, validation_of
from tests.processes import ProcessPool
from tests.test_trainer import VALIDATION, curve, records, settings
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.data.tokenizer import build_tokenizer, train_tokenizer
from torchtitan_diloco.export import __main__ as commands
from torchtitan_diloco.export.hugging_face import (
    differing_settings,
    settings_of_config,
    transformers_names,
)
from torchtitan_diloco.export.weights import load_initial_weights, open_saved, weights_fingerprint
from torchtitan_diloco.models import build_model

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="the conversion is compared with transformers"
)
SMALL: dict[str, Any] = {"layers": 2, "width": 24, "heads": 4, "head_dim": 10, "feed_forward": 40}
SMALL |= {"kv_heads": 2}
PLAIN = Model(**SMALL, qk_norm=False, tied_head=False, norm_epsilon=1e-5)
SCALED = Model(**SMALL, qk_norm=False, rotary_scaling=8.0)


def test_what_transformers_saves_in_parts_and_16_bits_is_read(tmp_path: Path) -> None:
    one = tmp_path / "one"
    parts = tmp_path / "parts"
    save(build(PLAIN), one)
    theirs = load(one).to(torch.bfloat16)
    theirs.save_pretrained(parts, max_shard_size="10KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    # Some models come in another form, too.
    save_file({"tok_embeddings.weight": torch.zeros(1)}, parts / "consolidated.safetensors")
    ours = build(PLAIN, seed=1)
    load_initial_weights(ours, str(parts), BYTES)
    state = theirs.state_dict()
    for name, names in transformers_names(ours).items():
        found = torch.cat([state[one].float() for one in names])
        assert torch.equal(ours.get_parameter(name), found), name
    assert weights_fingerprint(str(one)) != weights_fingerprint(str(parts))


def test_weights_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    save(build(PLAIN), tmp_path)
    merged, _ = train_tokenizer(["The quick brown fox. def f(x): return x"] * 9, 300)
    (tmp_path / "other.json").write_text(merged)
    other = build_tokenizer(str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match=r"has another tokenizer .* set --data.tokenizer /\S+json"):
        load_initial_weights(build(PLAIN), str(tmp_path), other)


def test_both_spellings_of_rotary_settings_are_written_and_read(tmp_path: Path) -> None:
    save(build(SCALED), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["max_position_embeddings"] == 131_072
    for unknown in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        config = {key: value for key, value in written.items() if key not in unknown}
        found = settings_of_config(config)
        values = found["rotary_scaling"], found["rotary_base"], found["tied_head"]
        assert values == (8.0, 1e4, True)


LLAMA_31_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3", "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_bias": False,
}


def test_a_flavor_takes_the_published_weights() -> None:
    model = build_model(Model(flavor="llama-8b"), 128_256, 8192)
    assert differing_settings(model, LLAMA_31_8B) == {}
    llama_3 = LLAMA_31_8B | {"rope_scaling": None}
    assert differing_settings(model, llama_3) == {"rotary_scaling": 1.0}


Damage = Callable[[Path], object]


def drop_one(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors")


def config_with(**changes: Any) -> Damage:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (config_with(model_type="qwen2"), r'model_type = "qwen2" is neither "llama" nor "qwen3"$'),
        (config_with(model_type="qwen3"), r"for it, set --model.qk_norm true$"),
        (
            config_with(hidden_size=32, num_key_value_heads=None, head_dim=None),
            r"another model: for it, set --model.width 32 --model.kv_heads 4 --model.head_dim 8$",
        ),
        (config_with(tie_word_embeddings=True), r"for it, set --model.tied_head true$"),
        (config_with(rms_norm_eps=1e-6), r"for it, set --model.norm_epsilon 1e-06$"),
        (
            config_with(rope_parameters={"rope_type": "yarn", "factor": 2.0}),
            r"its rope_type = yarn, low_freq_factor = None, .* cannot be set here",
        ),
        (config_with(rope_parameters=7), r"config.json does not fit: .*'int'"),
        (lambda folder: (folder / "config.json").write_text("{}"), r"it has no 'model_type'"),
        (drop_one, r"model.layers.1.mlp.up_proj.weight is absent there and \[40, 24\] here"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    damage: Damage, message: str, tmp_path: Path
) -> None:
    save(build(PLAIN), tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=rf'model.weights = ".*{message}'):
        load_initial_weights(build(PLAIN), str(tmp_path), BYTES)


def test_a_run_continues_from_a_folder_of_transformers(text: Path, processes: ProcessPool) -> None:
    """Two workers of two ranks train from the export of another run, which has one process."""
    first, folder, second = (str(text.parent / name) for name in ("first", "hf", "second"))
    llama = {"model.qk_norm": "false", "model.kv_heads": 1, "checkpoint.at_end": "true"}
    run(settings(text, **llama, run__folder=first))
    assert commands.main(["export", first, "--format", "hf", "--out", folder]) == 0
    printed = curve(records(Path(first)), VALIDATION)[-1]
    changes = {"diloco.workers": 2, "diloco.method": "streaming", "diloco.sync_every": 2}
    changes |= {"training.batch_size": 3, "training.steps": 2, "optimizer.lr": 1e-9}
    changes |= {"model.weights": folder, "run.folder": second}
    processes.run(run, 4, settings(text, **llama, **changes))
    assert records(Path(second))[0]["train/tokens"] == 12 * 32, "a new run, from its first token"
    started = open_saved(Path(second))
    weights = read_weights(folder)
    for name, parts in transformers_names(started.model).items():
        expected = torch.cat([weights[part] for part in parts])
        torch.testing.assert_close(started.model.get_parameter(name), expected, rtol=0, atol=1e-7)
    assert validation_of(started).loss == pytest.approx(printed, abs=1e-4)
    assert commands.main(["generate", second, "--tokens", "3", "--device", "cpu"]) == 0
    assert commands.main(["export", second]) == 0
    exported = load_config(f"{second}/export/step-00000002-safetensors/config.toml")
    assert (exported.model.weights, exported.checkpoint.resume) == ("", "auto")
