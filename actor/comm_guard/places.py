"""What a process group is to the guard."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from rlpipe.shared.replaced_parts import relies_on

_BACKENDS = relies_on(
    "torch._C._distributed_c10d:ProcessGroup._get_backend",
    "torch._C._distributed_c10d:ProcessGroup._device_types",
    why="the guard asks which backend serves which device of a group; torch has no public question for it",
    drop_when="torch tells a group's backends",
)


@dataclass(frozen=True)
class Place:
    """A group's description, and the device types on which its collectives are watched or left alone."""

    group: str
    ranks: int
    watched: frozenset[str]
    ignored: frozenset[str]

    def watches(self, tensor: Any) -> bool:
        """tensor: one of the call's, or None for a barrier, which runs wherever the group's device is."""
        if not self.watched or not self.ignored or tensor is None:
            return bool(self.watched)
        return tensor.device.type in self.watched


def place_of(group: Any, backends: Collection[str]) -> Place:
    """backends: those whose collectives take device memory; Gloo takes none, wherever its tensors are."""
    names = {device.type: group._get_backend(torch.device(device.type)).name() for device in group._device_types}
    watched = frozenset(device for device, backend in names.items() if backend in backends)
    description = group.group_desc
    if description in ("", "undefined"):
        description = group.group_name
    return Place(description, group.size(), watched, frozenset(names) - watched)
