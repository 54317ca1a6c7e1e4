import itertools
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from torchtitan_diloco.export import dense
from torchtitan_diloco.export.dense import load_safetensors, save_safetensors, split_into_shards

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
SHAPES = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)), max_size=8
)


def three() -> dict[str, Tensor]:
    return {name: torch.arange(4.0) + number for number, name in enumerate(("a", "b", "c"))}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_safetensors(tmp_path, three(), metadata={}, max_shard_bytes=16)
    return tmp_path


@given(SHAPES, st.integers(1, 200))
@settings(max_examples=30)
def test_what_is_read_is_what_was_written(
    shapes: list[tuple[list[int], torch.dtype]], limit: int
) -> None:
    tensors = {
        f"t.{i}": torch.arange(1000)[: torch.Size(shape).numel()].view(shape).to(dtype)
        for i, (shape, dtype) in enumerate(shapes)
    }
    with tempfile.TemporaryDirectory() as folder:
        written = save_safetensors(
            Path(folder), tensors, metadata={"run": "x"}, max_shard_bytes=limit
        )
        assert sorted(written) == sorted(Path(folder).iterdir())
        found = load_safetensors(Path(folder))
        assert same({name: found[name] for name in tensors}, tensors)
        assert len(found) == len(tensors)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50)), st.integers(1, 60))
def test_shards_are_in_order_and_within_the_limit(sizes: dict[str, int], limit: int) -> None:
    shards = split_into_shards(sizes, limit)
    assert [name for shard in shards for name in shard] == list(sizes)
    assert all(len(shard) <= 1 or sum(sizes[name] for name in shard) <= limit for shard in shards)
    for before, after in itertools.pairwise(shards):
        assert sum(sizes[name] for name in before) + sizes[after[0]] > limit, (
            "no shard is cut short"
        )


def test_shards_have_the_standard_names_and_index(sharded: Path) -> None:
    assert sorted(path.name for path in sharded.iterdir()) == [
        *SHARDS,
        "model.safetensors.index.json",
    ]
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 48},
        "weight_map": dict(zip("abc", SHARDS, strict=True)),
    }
    assert same(load_safetensors(sharded), three())
    assert same(load_safetensors(sharded / SHARDS[1]), {"b": three()["b"]})


def test_a_small_model_is_one_file_with_its_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert save_safetensors(folder, three(), metadata={"step": "7"}) == [
        folder / "model.safetensors"
    ]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"step": "7", "format": "pt"}
    assert same(load_safetensors(folder), load_safetensors(folder / "model.safetensors"))


def test_views_and_shared_memory_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tensors = {
        "base": base,
        "same": base,
        "row": base[1],
        "turned": base.T,
        "parameter": torch.nn.Parameter(base),
    }
    save_safetensors(tmp_path, tensors, metadata={})
    assert same(dict(sorted(load_safetensors(tmp_path).items())), dict(sorted(tensors.items())))
    assert torch.equal(base, torch.arange(12.0).view(3, 4))


def test_a_crash_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(dense, "force_to_disk", crash)
        with pytest.raises(KeyboardInterrupt):
            save_safetensors(tmp_path, three(), metadata={}, max_shard_bytes=16)
    assert not list(tmp_path.glob("[!.]*"))
    save_safetensors(tmp_path, three(), metadata={}, max_shard_bytes=16)
    assert same(load_safetensors(tmp_path), three())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *SHARDS,
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize("limit", [16, 1000])
def test_weights_are_never_overwritten(sharded: Path, limit: int) -> None:
    with pytest.raises(ValueError, match=r"index\.json exists; choose another folder"):
        save_safetensors(sharded, three(), metadata={}, max_shard_bytes=limit)


def test_a_limit_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_bytes = 0"):
        save_safetensors(tmp_path, three(), metadata={}, max_shard_bytes=0)


def test_a_missing_file_or_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.safetensors does not exist: name a"):
        load_safetensors(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        load_safetensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_file_that_was_cut_short(tmp_path: Path, keep: int) -> None:
    [path] = save_safetensors(tmp_path, three(), metadata={})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ValueError, match=r"model\.safetensors is not a complete safetensors file .*again"
    ):
        load_safetensors(tmp_path)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(
        ValueError, match=rf"lacks 1 of the 3 files .* {SHARDS[1]}: copy the folder again"
    ):
        load_safetensors(sharded)


def test_a_shard_of_another_model(sharded: Path) -> None:
    (sharded / SHARDS[1]).write_bytes((sharded / SHARDS[0]).read_bytes())
    with pytest.raises(ValueError, match=rf"{SHARDS[1]} has no tensor b"):
        load_safetensors(sharded)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}', "\xff"]
)
def test_a_damaged_index(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"index\.json is not an index of shards"):
        load_safetensors(sharded)
