"""Run the examples as they are, those whose packages are installed."""

import gc
import json
import runpy
import sys
import tomllib
from contextlib import chdir, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.requirements import Requirement
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.torch_version import TorchVersion

from tests.conftest import REPOSITORY
from tests.processes import ProcessPool

EXAMPLES = REPOSITORY / "examples"
NEEDS = {
    "accelerate_loop": ("accelerate", 2),
    "ddp_in_a_worker": ("torch", 4),
    "lightning_trainer": ("lightning", 2),
    "transformers_trainer": ("accelerate", 2),
    "torchtitan_trainer": ("torchtitan", 4),
}
"""Example -> the package that it needs, and the number of its processes."""


def skip_without(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install '.[examples]')")


def _run(name: str, folder: Path, arguments: list[str]) -> str:
    with (
        chdir(folder),
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()) as output,
        torch.compiler.set_stance("force_eager"),  # torchtitan compiles the masks of attention
    ):
        patch.setattr(sys, "argv", [name, *arguments])
        if name == "torchtitan_trainer":
            let_torchtitan_run_on_a_cpu(patch)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    gc.enable()  # torchtitan collects garbage itself
    return output.getvalue()


def test_every_example_is_run_and_short() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 120, path.name
        assert f"--nproc-per-node {NEEDS[path.stem][1]} examples/{path.name}" in path.read_text()


@pytest.mark.parametrize("name", sorted(set(NEEDS) - {"torchtitan_trainer"}))
def test_an_example_runs_as_written(processes: ProcessPool, tmp_path: Path, name: str) -> None:
    package, size = NEEDS[name]
    skip_without(package)
    for output in processes.run(_run, size, name, tmp_path, []):
        assert " of 2: " in output
        assert "loss" in output


def test_the_extra_has_what_torchtitan_imports() -> None:
    """torchtitan does not ask for triton, which torch brings only with CUDA."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = map(Requirement, project["optional-dependencies"]["examples"])
    found = {one.name: one for one in lines}
    (wanted,) = found["torchtitan"].specifier
    for page in (EXAMPLES / "torchtitan_trainer.py", REPOSITORY / "docs/own-loop.md"):
        assert f"torchtitan {wanted.version}" in page.read_text()
    triton = found["triton"]
    assert triton.marker is not None
    assert triton.marker.evaluate({"platform_system": "Linux", "platform_machine": "x86_64"})


# --- torchtitan -----------------------------------------------------------------------------------


def let_torchtitan_run_on_a_cpu(patch: pytest.MonkeyPatch) -> None:
    """Replace what torchtitan asks of a GPU or of NCCL."""
    from torchtitan.tools import utils

    patch.setattr(utils, "device_type", "cpu")  # before others import it
    patch.setattr(utils, "device_module", torch.cpu)
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common.attention import FlexAttention

    memory: dict[str, Any] = {
        "get_device_name": lambda _: "cpu",
        "get_device_properties": lambda _: SimpleNamespace(total_memory=2**33),
        "memory_stats": lambda _: {},
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
    }
    for name, function in memory.items():
        patch.setattr(torch.cpu, name, function, raising=False)
    patch.setattr(distributed, "set_pg_timeouts", lambda **_: None)
    set_factor = FSDPModule.set_gradient_divide_factor

    def sum_first(module: FSDPModule, factor: float) -> None:  # gloo cannot multiply as it sums
        module.set_force_sum_reduction_for_comms(True)
        set_factor(module, factor)

    def attend(
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        block_mask: BlockMask,
        scale: float | None,
        enable_gqa: bool,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend with the whole mask, as flex attention has no backward pass on a CPU."""
        batch, heads, rows, columns = block_mask.shape
        mask = create_mask(block_mask.mask_mod, batch, heads, rows, columns, device="cpu")
        found = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        return found, None

    patch.setattr(FSDPModule, "set_gradient_divide_factor", sum_first)
    patch.setattr(FlexAttention, "compiled_flex_attn", staticmethod(attend))


def write_tokenizer_and_text(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    names = [*letters, *special.values()]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    lines = [json.dumps({"text": f"After {one} comes {one + 1}. " * 9}) for one in range(99)]
    (folder / "text").mkdir()
    (folder / "text/train.jsonl").write_text("\n".join(lines))


def test_torchtitan_trains_with_its_own_trainer_and_config(
    processes: ProcessPool, tmp_path: Path
) -> None:
    """Its FSDP2 is inside a worker of two ranks; streaming DiLoCo is between the two workers."""
    skip_without("torchtitan")
    write_tokenizer_and_text(tmp_path)
    arguments = f"""
        --module llama3 --config llama3_debugmodel --hf-assets-path {tmp_path}
        --dataloader.dataset-path {tmp_path}/text --dump-folder {tmp_path}/run
        --training.seq-len 16 --training.local-batch-size 1 --training.steps 12"""
    if TorchVersion(torch.__version__) < "2.14":
        arguments += " --parallelism.spmd-backend partial_dtensor"
    processes.run(_run, 4, "torchtitan_trainer", tmp_path, arguments.split())
    shards = sorted(path.name for path in (tmp_path / "run/shared").iterdir())
    assert shards == [".metadata", "__0_0.distcp", "__1_0.distcp"], "of the ranks of worker 0"
