"""The collectives of torch.distributed: which methods of `ProcessGroup` start each of them, and how large a call is.

Whatever function or alias a caller holds, it ends in one call of one of these methods, whose names torch changes
between versions (pytorch/pytorch pull requests 186130 and 186144). Imports no torch, so policies can be read anywhere.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from rlpipe.shared.errors import ActorError

# By operation: the methods that start it (all spellings of torch 2.11 to 2.13), then its name among the dispatcher's
# `c10d::` operators, which a test compares with what torch has.
_TABLE: dict[str, tuple[tuple[str, ...], str]] = {
    "all_gather": (("allgather",), "allgather_"),
    "all_gather_coalesced": (("allgather_coalesced",), "allgather_coalesced_"),
    "all_gather_into_tensor": (("all_gather_single", "_allgather_base"), "_allgather_base_"),
    "all_gather_into_tensor_coalesced": (
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        "allgather_into_tensor_coalesced_",
    ),
    "all_reduce": (("allreduce",), "allreduce_"),
    "all_reduce_coalesced": (("allreduce_coalesced",), "allreduce_coalesced_"),
    "all_to_all": (("alltoall",), "alltoall_"),
    "all_to_all_single": (("all_to_all_single", "alltoall_base"), "alltoall_base_"),
    "barrier": (("barrier",), "barrier"),
    "broadcast": (("broadcast",), "broadcast_"),
    "gather": (("gather",), "gather_"),
    "monitored_barrier": (("monitored_barrier",), "monitored_barrier_"),
    "recv": (("recv",), "recv_"),
    "recv_any_source": (("recv_anysource",), "recv_any_source_"),
    "reduce": (("reduce",), "reduce_"),
    "reduce_scatter": (("reduce_scatter",), "reduce_scatter_"),
    "reduce_scatter_tensor": (("reduce_scatter_single", "_reduce_scatter_base"), "_reduce_scatter_base_"),
    "reduce_scatter_tensor_coalesced": (
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        "reduce_scatter_tensor_coalesced_",
    ),
    "scatter": (("scatter",), "scatter_"),
    "send": (("send",), "send"),
}

OPERATIONS: tuple[str, ...] = tuple(_TABLE)
DISPATCHER_NAMES: dict[str, str] = {operator: operation for operation, (_, operator) in _TABLE.items()}

POSITIONAL_ARGUMENTS: dict[str, int] = {
    "all_reduce": 2,
    "broadcast": 2,
    "all_gather": 3,
    "all_gather_into_tensor": 3,
    "all_gather_into_tensor_coalesced": 3,
    "recv": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "reduce_scatter_tensor_coalesced": 3,
    "send": 3,
    "all_to_all_single": 5,
}
"""How many torch.distributed passes to the frequent ones; only speed depends on it."""

END_OF_BATCH = "_end_coalescing"
"""Where NCCL launches a batch of sends and receives, so where their errors appear."""

WAIT = "wait"
"""The method of `Work` that waits for what a collective has started."""

# What else ProcessGroup has in torch 2.11 to 2.13. None of these exchanges data, but for setting up or ending a group.
_NO_OPERATIONS = frozenset(
    (
        *("abort", "boxed", "unbox", "get_group_store", "merge_remote_group", "split_group", "set_timeout", "shutdown"),
        *("name", "rank", "size", "group_desc", "group_name", "bound_device_id", "use_pg_for_symm_mem_rendezvous"),
        *("_backend_id", "_device_types", "_enable_collectives_timing", "_get_backend", "_get_backend_name", "_id"),
        *("_get_sequence_number_for_group", "_has_hooks", "_register_backend", "_register_on_completion_hook"),
        *("_set_default_backend", "_set_group_desc", "_set_group_name", "_set_sequence_number_for_group"),
        *("_start_coalescing", "_wait_for_pending_works", "_pybind11_conduit_v1_"),
    )
)

_BOUNDS = (64 * 2**10, 2**20, 16 * 2**20, 256 * 2**20)
SIZE_CLASSES: tuple[str, ...] = ("64KiB", "1MiB", "16MiB", "256MiB", "larger")
"""A message belongs to the first class that holds it; NCCL chooses algorithm and channels by size."""


def methods_of(operation: str, existing: Iterable[str]) -> tuple[str, ...]:
    """The spellings of `operation` among `existing` method names; ActorError if torch has renamed all of them."""
    known = _TABLE[operation][0]
    present = tuple(name for name in known if name in existing)
    if not present:
        raise ActorError(
            f"this torch has none of ProcessGroup.{', .'.join(known)}, so {operation} would be neither timed nor "
            "guarded: add its new name to actor/collectives/operations.py, or install a torch of requirements/"
        )
    return present


def unknown_methods(existing: Mapping[str, Any]) -> tuple[str, ...]:
    """Methods among the entries of a process group's class that may be operations, for all that is known here."""
    known = {name for spellings, _ in _TABLE.values() for name in spellings} | _NO_OPERATIONS | {END_OF_BATCH}
    names = (name for name, entry in existing.items() if callable(entry) and not isinstance(entry, type))
    return tuple(name for name in names if name not in known and not name.startswith("__"))


def size_class(size_bytes: int) -> str:
    return SIZE_CLASSES[bisect_left(_BOUNDS, size_bytes)]


def message_bytes(arguments: Iterable[Any]) -> int:
    """Bytes of the larger side, input or output, of a call with these arguments; 0 for a barrier."""
    return max((_tensor_bytes(argument) for argument in arguments), default=0)


def first_tensor(arguments: Iterable[Any]) -> Any:
    """Some tensor of the call, or None: all of them are on one device."""
    for argument in arguments:
        if hasattr(argument, "nbytes"):
            return argument
        if isinstance(argument, list) and (found := first_tensor(argument)) is not None:
            return found
    return None


def _tensor_bytes(argument: Any) -> int:
    if isinstance(argument, list):
        return sum(_tensor_bytes(part) for part in argument)
    return getattr(argument, "nbytes", 0)
