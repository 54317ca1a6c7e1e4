"""What one rank keeps in memory, beside activations."""

from dataclasses import dataclass

from torchtitan_diloco.components.run_plan import INNER_BYTES
from torchtitan_diloco.diloco.config import DiLoCo
from torchtitan_diloco.diloco.outer_optimizer import STATE_BUFFERS
from torchtitan_diloco.diloco.outer_state import pinned_bytes
from torchtitan_diloco.planner.outer_loop import exchange_buffer_bytes
from torchtitan_diloco.planner.workload import Workload



@dataclass(frozen=True)
class Memory:
    device_bytes: float
    host_bytes: float


def memory_of(workload: Workload, diloco: DiLoCo, *, on_host: bool, in_flight: int) -> Memory:
    """`on_host`: the shared parameters, the outer optimizer's state and the deltas wait in host memory, and only what is in
    flight has a copy on the device. Otherwise all is on the device (of a run on the CPU: in the memory there is)."""
    inner = INNER_BYTES * workload.parameters / workload.ranks
    if diloco.method == "none":
        return Memory(inner, 0.0)
    sizes = sorted(workload.fragments(diloco.fragments), reverse=True)
    buffers = outer_bytes_per_parameter(diloco) // 4
    exchange = exchange_buffer_bytes(
        -(-sizes[0] // workload.ranks), diloco.quantization, workload.workers
    )
    if not on_host:
        return Memory(inner + buffers * 4 * sum(sizes) / workload.ranks + exchange, 0.0)
    pinned = buffers * sum(pinned_bytes(4 * -(-size // workload.ranks)) for size in sizes)
    return Memory(inner + 4 * sum(sizes[:in_flight]) / workload.ranks, pinned + exchange)


def outer_bytes_per_parameter(diloco: DiLoCo) -> int:
    """Shared parameters, delta, the outer optimizer's state and what encoding has lost, in fp32."""
    return 4 * (2 + STATE_BUFFERS[diloco.outer_optimizer.name] + diloco.quantization.error_feedback)
