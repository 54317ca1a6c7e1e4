"""The start of an outer loop: its settings, its groups, and the device of its state."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.diloco.toy import AVERAGE_EVERY_STEP, Net, config
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import Link, Quantization, StreamingDiLoCo, startup
from torchtitan_diloco.diloco.config import CodecName
from torchtitan_diloco.diloco.fragments import build_fragments

GPU = torch.device("cuda", 0)


class OnGpu:
    """Stands for a fragment of one parameter on a GPU."""

    parameter = local = SimpleNamespace(device=GPU, numel=lambda: 1_000_000)

    def __init__(self) -> None:
        self.parts = [SimpleNamespace(local=lambda: self.local)]


@pytest.mark.parametrize(
    ("choice", "codec", "memory", "expected"),
    [
        ("auto", "fp32", 60e6, "cuda"),  # three buffers of 4 MB are a fifth of it
        ("auto", "fp32", 59e6, "cpu"),
        ("auto", "topk", 60e6, "cpu"),
        ("device", "topk", 1e6, "cuda"),
        ("cpu", "fp32", 1e9, "cpu"),
    ],
)
def test_the_outer_state_is_on_a_gpu_that_has_room_for_it(
    monkeypatch: pytest.MonkeyPatch, choice: Any, codec: CodecName, memory: float, expected: str
) -> None:
    known = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: known)
    chosen = replace(config(), quantization=Quantization(codec), link=Link(outer_state=choice))
    fragments: Any = [OnGpu()]
    assert startup.pick_state_device(fragments, chosen).type == expected
    on_cpu = build_fragments(Net(), chosen.fragments)
    assert startup.pick_state_device(on_cpu, chosen).type == "cpu"


def _refusal(function: str, found: list[Any]) -> str:
    """Return the error if this function returns something else on every worker."""
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, lambda *_: found[dist.get_rank()])
        patch.setattr(startup, "kernels_name", lambda: "torch")
        try:
            StreamingDiLoCo(Net(), dist.group.WORLD, AVERAGE_EVERY_STEP)
        except ValueError as error:
            return str(error)
    return ""


def test_workers_whose_messages_would_differ_in_size_are_refused(processes: ProcessPool) -> None:
    places = [GPU, torch.device("cpu")]
    function = "torchtitan_diloco.diloco.startup.pick_state_device"
    for message in processes.run(_refusal, 2, function, places):
        assert "(diloco.link.outer_state): cuda on worker 0, cpu on worker 1" in message


def test_a_group_without_gloo_is_refused(processes: ProcessPool) -> None:
    function = "torch.distributed.get_backend_config"
    for message in processes.run(_refusal, 2, function, ["cuda:nccl"] * 2):
        assert 'hand in dist.new_group(ranks, backend="gloo")' in message
