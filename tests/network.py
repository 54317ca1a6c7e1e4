"""Networks for tests: network namespaces, and two sites behind routers."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from benchmarks.network import LOOPBACK, Network, NoNetworkError, require, run_command, unshare

Some = TypeVar("Some", bound=Network)


@contextmanager
def built(network: Some) -> Iterator[Some]:
    """Yield a network, or skip the test if this machine does not support one."""
    try:
        network.__enter__()
    except NoNetworkError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield network
    finally:
        network.close()


def network_of(workers: int, **rates: Any) -> AbstractContextManager[Network]:
    return built(Network(workers, **rates))


class Sites(Network):
    """Two sites, each behind a router with NAT, and a server.

    Both sites have the same private addresses. Their routers allow outgoing connections and the
    answers to them. The router of site A also forwards the port of WireGuard.
    """

    PLACES = ("server", "router-a", "router-b", "site-a", "site-b")
    PUBLIC: ClassVar = {"server": "192.0.2.10", "a": "203.0.113.10", "b": "198.51.100.20"}
    PRIVATE = "192.168.1.2"
    WIREGUARD_PORT = 51820
    ROUTER = (
        "add table ip nat",
        "add chain ip nat out { type nat hook postrouting priority 100; }",
        "add rule ip nat out oifname wan masquerade",
        "add chain ip nat in { type nat hook prerouting priority -100; }",
        "add chain ip nat forward { type filter hook forward priority 0; policy drop; }",
        "add rule ip nat forward iifname lan accept",
        "add rule ip nat forward ct state established,related accept",
    )
    FORWARD = (
        f"add rule ip nat in iifname wan udp dport {WIREGUARD_PORT} dnat to {PRIVATE}",
        f"add rule ip nat forward udp dport {WIREGUARD_PORT} accept",
    )

    def __init__(self) -> None:
        super().__init__(len(self.PLACES))

    def place(self, name: str) -> "subprocess.Popen[str]":
        return self.namespace(self.PLACES.index(name))

    def address(self, worker: int) -> str:
        return {"server": self.PUBLIC["server"]}.get(self.PLACES[worker], self.PRIVATE)

    def rank_variables(self, worker: int) -> dict[str, str]:  # noqa: ARG002
        return {}

    def _build(self) -> None:
        require("unshare", "nsenter", "ip", "nft")
        self._hold(unshare(), "internet")
        for number in range(len(self.PLACES)):
            self._hold(
                [*self.inside(self.switch), "unshare", "--net", "--uts"], self.address(number)
            )
        self._join(self.switch, "server", self.place("server"), "eth0", self.PUBLIC["server"])
        self._forward(self.switch)
        for site in ("a", "b"):
            router = self.place(f"router-{site}")
            self._join(self.switch, f"router-{site}", router, "wan", self.PUBLIC[site])
            self._join(router, "lan", self.place(f"site-{site}"), "eth0", self.PRIVATE)
            self._forward(router)
            for rule in self.ROUTER + (self.FORWARD if site == "a" else ()):
                run_command([*self.inside(router), "nft", rule])

    def _join(
        self,
        gateway: "subprocess.Popen[str]",
        port: str,
        place: "subprocess.Popen[str]",
        interface: str,
        address: str,
    ) -> None:
        """Connect a place to its gateway, which has the first address of their network."""
        first = f"{address.rpartition('.')[0]}.1"
        self._run(gateway, f"ip link add {port} type veth peer {interface} netns {place.pid}")
        for end, name, own in ((gateway, port, first), (place, interface, address)):
            self._run(end, f"ip address add {own}/24 dev {name}")
            self._run(end, f"ip link set {name} up")
        self._run(place, "ip link set lo up")
        self._run(place, f"ip route add default via {first}")

    def _forward(self, router: "subprocess.Popen[str]") -> None:
        write = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        run_command([*self.inside(router), "sh", "-c", write])


@contextmanager
def processes_in(
    network: Network,
    logs: Sequence[Path],
    function: Callable[..., Any],
    *arguments: Any,
    loopback: bool = False,
) -> Iterator[list[BaseProcess]]:
    """Run a function as each worker of a network, and write the output to `logs`.

    With `loopback`, all run in the namespace of worker 0 and use its loopback interface.
    """
    found: list[BaseProcess] = []
    try:
        for worker, log in enumerate(logs):
            variables = network.rank_variables(worker) | {"WORLD_SIZE": str(len(logs))}
            if loopback:
                variables |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": LOOPBACK}
            place = 0 if loopback else worker
            found.append(network.fork(place, function, log, *arguments, variables=variables))
        yield found
    finally:
        for process in found:
            process.kill()
            process.join()
