"""Where this launcher stands in the run: the environment variables of a run on many nodes, read and checked."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_diloco.launch.mistakes import LaunchError

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Place:
    """One node of the run."""

    nodes: int = 1
    node_rank: int = 0
    endpoint: str = ""
    """`host:port` at which the nodes meet. Empty with one node, which picks a free port of its own."""
    backend: str = "static"
    """torchrun's way for nodes to meet: `static` numbers them by NODE_RANK, `c10d` by who comes first."""
    run_id: str = "torchtitan_diloco"
    processes: int | None = None
    """NPROC, where the user has set it."""

    @property
    def stays_on_this_machine(self) -> bool:
        host = self.endpoint.rpartition(":")[0]
        return self.nodes == 1 or host in {"localhost", "[::1]"} or host.startswith("127.")


def read_place(environment: Mapping[str, str]) -> Place:
    """The place that NNODES, NODE_RANK, RDZV_ENDPOINT, RDZV_BACKEND, RDZV_ID and NPROC describe."""
    nodes = _whole_number(environment, "NNODES", minimum=1)
    node_rank = _whole_number(environment, "NODE_RANK", minimum=0)
    endpoint = environment.get("RDZV_ENDPOINT", "")
    processes = _whole_number(environment, "NPROC", minimum=1)

    if nodes is None and endpoint:
        raise LaunchError(
            f"RDZV_ENDPOINT={endpoint} is set but NNODES is not; set NNODES to the number of nodes"
        )
    if nodes is None and node_rank:
        raise LaunchError(
            f"NODE_RANK={node_rank} is set but NNODES is not; set NNODES to the number of nodes"
        )
    if nodes is None or nodes == 1:
        if node_rank:
            raise LaunchError(f"NODE_RANK={node_rank} with NNODES=1; the only node has NODE_RANK=0")
        return Place(processes=processes)

    backend = environment.get("RDZV_BACKEND") or Place.backend
    if not endpoint:
        raise LaunchError(
            f"NNODES={nodes} but RDZV_ENDPOINT is not set; set it to host:port of the first node, on every node"
        )
    if node_rank is None and backend == "static":
        raise LaunchError(
            f"NNODES={nodes} but NODE_RANK is not set; set it to this node's number, 0 to {nodes - 1}"
        )
    if node_rank is not None and node_rank >= nodes:
        raise LaunchError(
            f"NODE_RANK={node_rank} with NNODES={nodes}; nodes are numbered 0 to {nodes - 1}"
        )
    return Place(
        nodes=nodes,
        node_rank=node_rank or 0,
        endpoint=_with_port(endpoint),
        backend=backend,
        run_id=environment.get("RDZV_ID") or Place.run_id,
        processes=processes,
    )


def _whole_number(environment: Mapping[str, str], key: str, minimum: int) -> int | None:
    value = environment.get(key, "").strip()
    if not value:
        return None
    if not value.isdecimal() or int(value) < minimum:
        raise LaunchError(
            f"{key}={value} is not a whole number from {minimum} up; set it to one or unset it"
        )
    return int(value)


def _with_port(endpoint: str) -> str:
    """`host:port`; an IPv6 address is in brackets, so that its colons are not taken for the port's."""
    if endpoint.count(":") > 1 and not endpoint.startswith("["):
        raise LaunchError(
            f"RDZV_ENDPOINT={endpoint} looks like an IPv6 address; put it in brackets: [address]:port"
        )
    if ":" not in endpoint or endpoint.endswith("]"):
        return f"{endpoint}:{DEFAULT_PORT}"
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(
            f"RDZV_ENDPOINT={endpoint} is not host:port; give a port from 1 to 65535, or only the host"
        )
    return endpoint
