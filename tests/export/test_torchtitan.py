"""Checkpoints of torchtitan: a run starts from them, and exports them, with equal logits."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.components.test_resume import run
from tests.export.reading import BYTES, LENGTH, ROWS, build, read_weights
from tests.export.reading import save as save_for_transformers
from tests.processes import ProcessPool
from tests.test_trainer import records, settings
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.export import __main__ as commands
from torchtitan_diloco.export.torchtitan import open_checkpoint, save_torchtitan
from torchtitan_diloco.export.weights import load_initial_weights, open_saved, weights_fingerprint
from torchtitan_diloco.launching.preflight import check_inputs
from torchtitan_diloco.models.decoder import Shape, resolve_shape, rotary_frequencies

SMALL: dict[str, Any] = {"layers": 2, "width": 24, "heads": 4, "head_dim": 10, "feed_forward": 40}
SMALL |= {"kv_heads": 2}
LLAMA = Model(**SMALL, qk_norm=False, tied_head=False, norm_epsilon=1e-5, rotary_scaling=8.0)
QWEN3 = Model(**SMALL, tied_head=False)
TIED = Model(**SMALL, qk_norm=False)
Weights = dict[str, Tensor]
NAMES = {"qkv": "attention.qkv_linear.", "head": "lm_head"}
OLD_NAMES = {"qkv": "attention.", "head": "output"}
"""Names that torchtitan 0.2 gave them."""


def some_tokens() -> Tensor:
    return torch.randint(0, ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def random_weights(config: Model, names: dict[str, str]) -> Weights:
    """Return parameters as torchtitan has them."""
    shape = resolve_shape(config)
    made = Weights()
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (ROWS, shape.width)}
    for layer in (f"layers.{number}." for number in range(shape.layers)):
        of_layer: dict[str, tuple[int, ...]] = {
            f"{names['qkv']}wq": (queries, shape.width),
            f"{names['qkv']}wk": (keys, shape.width),
            f"{names['qkv']}wv": (keys, shape.width),
            "attention.wo": (shape.width, queries),
            "feed_forward.w1": (shape.feed_forward, shape.width),
            "feed_forward.w2": (shape.width, shape.feed_forward),
            "feed_forward.w3": (shape.feed_forward, shape.width),
            "attention_norm": (shape.width,),
            "ffn_norm": (shape.width,),
        }
        if shape.qk_norm:
            of_layer |= dict.fromkeys(("attention.q_norm", "attention.k_norm"), (shape.head_dim,))
        shapes |= {f"{layer}{name}.weight": size for name, size in of_layer.items()}
    shapes |= {"norm.weight": (shape.width,), f"{names['head']}.weight": (ROWS, shape.width)}
    generator = torch.Generator().manual_seed(3)
    for name, size in shapes.items():
        made[name] = torch.empty(size).normal_(float(len(size) == 1), 0.3, generator=generator)
    if shape.tied_head:
        made[f"{names['head']}.weight"] = made["tok_embeddings.weight"]
    return made


def write(folder: Path, weights: Weights) -> None:
    """Write a checkpoint as torchtitan does, with state of the optimizer and of the run."""
    others: dict[str, Any] = {"optimizer": {"state": {"norm.weight.exp_avg": torch.zeros(3)}}}
    others |= {"train_state": {"step": 7}, "dataloader": {"dp_rank_0": b"bytes"}}
    save({**weights, **others}, checkpoint_id=folder, no_dist=True)


# --- the model of torchtitan ----------------------------------------------------------------------


def rotate_neighbors(x: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate x [batch, length, heads, head_dim] as complex numbers, as torchtitan's Llama does."""
    angles = torch.outer(torch.arange(x.shape[1]), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


def rotate_halves(x: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate x [batch, length, heads, head_dim] by halves, as torchtitan's Qwen3 does."""
    angles = torch.outer(torch.arange(x.shape[1]), frequencies).repeat(1, 2)[None, :, None]
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def their_logits(weights: Weights, shape: Shape, tokens: Tensor) -> Tensor:
    """Return the logits as torchtitan's model computes them from these parameters."""
    frequencies = rotary_frequencies(shape, torch.device("cpu"))
    turn = rotate_halves if shape.qk_norm else rotate_neighbors

    def norm(x: Tensor, name: str) -> Tensor:
        weight = weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, eps=shape.norm_epsilon)

    def product(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    x = weights["tok_embeddings.weight"][tokens]
    for layer in (f"layers.{number}" for number in range(shape.layers)):
        inner = norm(x, f"{layer}.attention_norm")
        q, k, v = (
            product(inner, f"{layer}.attention.qkv_linear.{part}").unflatten(
                -1, (-1, shape.head_dim)
            )
            for part in ("wq", "wk", "wv")
        )
        if shape.qk_norm:
            q = norm(q, f"{layer}.attention.q_norm")
            k = norm(k, f"{layer}.attention.k_norm")
        q = turn(q, frequencies)
        k = turn(k, frequencies)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        x = x + product(mixed.transpose(1, 2).flatten(-2), f"{layer}.attention.wo")
        inner = norm(x, f"{layer}.ffn_norm")
        gate = F.silu(product(inner, f"{layer}.feed_forward.w1"))
        gated = gate * product(inner, f"{layer}.feed_forward.w3")
        x = x + product(gated, f"{layer}.feed_forward.w2")
    return product(norm(x, "norm"), "lm_head")


@pytest.mark.parametrize("config", [LLAMA, QWEN3, TIED], ids=["llama", "qwen3", "tied"])
def test_logits_are_equal_there_and_back(config: Model, tmp_path: Path) -> None:
    weights = random_weights(config, NAMES)
    write(tmp_path / "theirs", weights)
    ours = build(config)
    tokens = some_tokens()
    load_initial_weights(ours, str(tmp_path / "theirs"), BYTES)
    expected = their_logits(weights, ours.shape, tokens)
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-4, atol=1e-4)

    save_torchtitan(tmp_path / "back", ours, torch.float32)
    back = {name: torch.empty_like(value) for name, value in weights.items()}
    load(dict(back), checkpoint_id=tmp_path / "back", no_dist=True)
    for name, value in weights.items():
        assert torch.equal(back[name], value), name
    stored = open_checkpoint(tmp_path / "back")
    assert stored.keys() == weights.keys(), "and nothing else"


def test_names_of_torchtitan_0_2_are_read(tmp_path: Path) -> None:
    models = []
    for folder, names in ((tmp_path / "now", NAMES), (tmp_path / "before", OLD_NAMES)):
        write(folder, random_weights(LLAMA, names))
        models.append(build(LLAMA))
        load_initial_weights(models[-1], str(folder), BYTES)
    assert torch.equal(models[0](some_tokens()), models[1](some_tokens()))


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_torchtitan_itself_converts_the_export_to_ours(family: str, tmp_path: Path) -> None:
    """Its adapter to transformers gives what our export to transformers has."""
    place = f"torchtitan.models.{family}.state_dict_adapter"
    adapters: Any = pytest.importorskip(place, reason="needs torchtitan (extra examples)")
    config, class_name = {
        "llama3": (LLAMA, "Llama3StateDictAdapter"),
        "qwen3": (QWEN3, "Qwen3StateDictAdapter"),
    }[family]
    model = build(config)
    save_torchtitan(tmp_path / "dcp", model, torch.float32)
    save_for_transformers(model, tmp_path / "hf")
    shape = model.shape
    stored = open_checkpoint(tmp_path / "dcp")
    attention = SimpleNamespace(
        n_heads=shape.heads, n_kv_heads=shape.kv_heads, head_dim=shape.head_dim
    )
    layers = [SimpleNamespace(attention=attention, moe=None)]
    theirs = SimpleNamespace(dim=shape.width, layers=layers, enable_weight_tying=False)
    adapter = getattr(adapters, class_name)(theirs, None)
    converted = adapter.to_hf({name: one.get_tensor(name) for name, one in stored.items()})
    expected = read_weights(tmp_path / "hf")
    assert converted.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(converted[name], value), name


# --- mistakes -------------------------------------------------------------------------------------


def without(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = random_weights(LLAMA, NAMES)
        del weights[name]
        write(folder, weights)

    return damage


def damaged_metadata(folder: Path) -> None:
    write(folder, random_weights(LLAMA, NAMES))
    (folder / ".metadata").write_bytes(pickle.dumps(7)[:-1])


class Hostile:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile",)


def hostile_metadata(folder: Path) -> None:
    write(folder, random_weights(LLAMA, NAMES))
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))


def cut_data(folder: Path) -> None:
    write(folder, random_weights(LLAMA, NAMES))
    (data,) = folder.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])


def no_data(folder: Path) -> None:
    write(folder, random_weights(LLAMA, NAMES))
    for data in folder.glob("*.distcp"):
        data.unlink()


@pytest.mark.parametrize(
    ("damage", "config", "message"),
    [
        (without("tok_embeddings.weight"), LLAMA, "it has no tok_embeddings.weight, as a Llama or"),
        (
            without("layers.1.feed_forward.w2.weight"),
            LLAMA,
            r"layers.1.feed_forward.w2.weight is absent there and \[24, 40\] here",
        ),
        (without("norm.weight"), QWEN3, "another model: for it, set --model.qk_norm false"),
        (without("norm.weight"), TIED, "head is not its embedding: for it, set --model.tied_head"),
        (
            without("norm.weight"),
            Model(**SMALL | {"layers": 3, "feed_forward": 50}, qk_norm=False, tied_head=False),
            "for it, set --model.layers 2 --model.feed_forward 40",
        ),
        (
            damaged_metadata,
            LLAMA,
            r"cannot be read \(.metadata is damaged, .*\): give a",
        ),
        (hostile_metadata, LLAMA, r"\(.metadata is damaged, .*: it names posix.system\): give a"),
        (cut_data, LLAMA, r"cannot be read \(\S+weight: .*\): give a complete"),
        (no_data, LLAMA, r"the folder has no \*.distcp"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    damage: Callable[[Path], None],
    config: Model,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=rf'model.weights = ".*{message}') as caught:
        load_initial_weights(build(config), str(tmp_path), BYTES)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "hostile").exists(), "no code of the folder runs"


def test_a_gelu_model_is_no_llama(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--format torchtitan: .* use --format safetensors"):
        save_torchtitan(tmp_path, build(Model(activation="gelu")), torch.float32)


# --- a run ----------------------------------------------------------------------------------------


def test_a_run_starts_from_a_checkpoint_and_exports_one(
    text: Path, processes: ProcessPool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers of two ranks train from the export of another run, which has one process."""
    first, folder, second = (str(text.parent / name) for name in ("first", "titan", "second"))
    llama = {"model.qk_norm": "false", "model.kv_heads": 1, "checkpoint.at_end": "true"}
    run(settings(text, **llama, run__folder=first))
    words = ["export", first, "--format", "torchtitan", "--out", folder, "--dtype", "bfloat16"]
    assert commands.main(words) == 0
    changes = {"diloco.workers": 2, "diloco.method": "streaming", "diloco.sync_every": 2}
    changes |= {"training.batch_size": 3, "training.steps": 2, "optimizer.lr": 1e-9}
    changes |= {"model.weights": folder, "run.folder": second}
    chosen = settings(text, **llama, **changes)
    check_inputs(load_config("debug", {key: str(value) for key, value in chosen.items()}))
    processes.run(run, 4, chosen)
    assert records(Path(second))[0]["train/tokens"] == 12 * 32, "a new run, from its first token"
    before = open_saved(Path(first)).model
    after = open_saved(Path(second)).model
    for name, value in before.named_parameters():
        torch.testing.assert_close(after.get_parameter(name), value, rtol=1e-2, atol=1e-2)
    assert weights_fingerprint(folder) != weights_fingerprint("")
    capsys.readouterr()
