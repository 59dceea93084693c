"""Hosts made of network namespaces on one machine: each with its own address, joined by a switch, cut off at will."""

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SUBNET = "10.213.77"


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface `eth0`."""

    namespace: str
    address: str

    def start(self, command: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """A program on this host; its output goes to `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command],
                env={**os.environ, **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut_off(self) -> None:
        """As if its cable were pulled."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")


def reason_not_possible() -> str | None:
    """Why namespaces cannot be used here; None when they can."""
    name = f"rlp{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not allowed here: {error}"
    _ip("netns", "delete", name)
    return None


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts at a switch that no other network reaches."""
    mark = uuid.uuid4().hex[:8]
    switch = f"rlp{mark}s"
    made = [Host(f"rlp{mark}h{index}", f"{_SUBNET}.{index + 1}") for index in range(count)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for index, host in enumerate(made):
            _connect(host, switch, f"port{index}")
        yield made
    finally:
        for namespace in (switch, *(host.namespace for host in made)):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _connect(host: Host, switch: str, port: str) -> None:
    _ip("netns", "add", host.namespace)
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _ip("-n", switch, "link", "set", port, "master", "bridge0")
    _ip("-n", switch, "link", "set", port, "up")
    _ip("-n", host.namespace, "link", "set", "lo", "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.namespace, "link", "set", "eth0", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
