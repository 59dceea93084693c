"""SGLang's ranks meet in a store of torch, which listens at every address of the machine although all ask at one."""

import importlib
import socket
from collections.abc import Callable
from typing import Any

from rlpipe.shared.replaced_parts import replaces

replaces(
    "torch.distributed.rendezvous:TCPStore",
    why="torch's store listens at every address of the machine although all ask at one",
    drop_when="TCPStore listens at its host's name",
)


def install() -> None:
    """Call it in a scheduler's process: a store that it opens listens at the address under which others look for it."""
    # Not by an import statement: torch.distributed has a function of that name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = _listening_at_its_name(rendezvous.TCPStore)


def _listening_at_its_name(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_store(*, host_name: str, port: int, is_master: bool = False, **others: Any) -> Any:
        if is_master:
            # The port was free when SGLang chose it, seconds ago. A rank that is alone has nobody to tell another one.
            listening = socket.create_server((host_name, 0 if others.get("world_size") == 1 else port))
            port = listening.getsockname()[1]
            others["master_listen_fd"] = listening.detach()
        return make(host_name=host_name, port=port, is_master=is_master, **others)

    return make_store
