"""The memory guard on real process groups: what it sees, when it acts, what it says, and that it changes nothing."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import ProcessGroup
from train_support import in_module_worker, run_processes

from actor.collectives.operations import DISPATCHER_NAMES, unknown_methods
from actor.comm_guard.rules import load_policy

SKIPPED = {
    "all_gather_into_tensor", "allgather_into_tensor_coalesced", "barrier", "broadcast_object_list",
    "reduce_scatter_tensor", "all_to_all_single", "isend", "irecv",
}  # fmt: skip
GUARDED = {
    "all_reduce", "_allgather_base", "_reduce_scatter_base", "all_gather_object", "broadcast",
    "reduce_scatter_tensor_coalesced",
}  # fmt: skip


@pytest.mark.parametrize("count", [2, 4])
def test_each_collective_is_seen_once_and_unchanged_under_every_alias(count):
    for found in run_processes(count, in_module_worker, "comm_guard_workers", "probes_by_alias"):
        two = {"batch_isend_irecv", "all_gather_object", "broadcast_object_list"}
        assert found["probes"] == {name: 2.0 if name in two else 1.0 for name in found["probes"]}
        assert found["guarded"] == found["plain"]
        assert found["replaced"] == []


def test_one_clean_up_in_an_episode_and_none_for_unwatched_groups():
    for found in run_processes(2, in_module_worker, "comm_guard_workers", "episodes"):
        assert found["clean_ups"] == [0, 1, 1, 1, 1, 2, 2, 2, 3]
        assert found["unwatched"] == 0


def test_skipped_operations_are_probed_once_and_counted():
    for first, *later in run_processes(2, in_module_worker, "comm_guard_workers", "default_policy"):
        assert (first["guard/checks"], first["guard/skips"]) == (2, 4)
        assert [(one["guard/checks"], one["guard/skips"]) for one in later] == [(1, 5), (1, 5)]


def test_settled_operations_are_counted_and_unchanged_in_every_call_form():
    for found in run_processes(2, in_module_worker, "comm_guard_workers", "short_way"):
        assert found["settled"] == found["plain"]
        assert found["sum"] == [4.0, 4.0]
        assert found["metrics"]["guard/checks"] == 0
        assert found["metrics"]["guard/skips"] == len(found["plain"]) + 3 + 2  # three of them are two collectives
        assert "in all_reduce of 0.00 MiB in group" in found["notes"]


def test_a_failure_names_operation_group_bytes_and_memory():
    for memory, other in run_processes(2, in_module_worker, "comm_guard_workers", "failures"):
        assert memory[0] == "ResourceError"
        assert other[0] == "RuntimeError"
        for text in (memory[1], other[1]):
            assert "all_reduce of 0.00 MiB in group" in text
            assert "of 2 ranks" in text
            assert "last probes" in text


def test_clock_and_guard_listen_to_the_same_calls_and_leave_in_any_order():
    for found in run_processes(2, in_module_worker, "comm_guard_workers", "two_listeners"):
        (both, both_checks), (_, alone), (timed, gone), (none, nothing) = found["seen"]
        assert both == timed == 2  # its start and the wait for it
        assert (both_checks, alone, gone) == (1, 1, 0)
        assert (none, nothing) == (0, 0)
        assert found["replaced"] == []


def test_an_unknown_operation_is_timed_guarded_counted_and_warned_of_once():
    for found in run_processes(2, in_module_worker, "comm_guard_workers", "unknown_operation"):
        assert found["sizes"] == [2] * 4
        assert found["exchanges"] == found["checks"] == 3
        assert found["calls"] == [3, 0]
        assert found["used"] == ["teleport"]
        assert len(found["warnings"]) == 1
        assert "ProcessGroup.teleport" in found["warnings"][0]
        assert found["after"] == 0


def test_a_monitored_barrier_is_timed():
    assert all(seen >= 1 for seen in run_processes(2, in_module_worker, "comm_guard_workers", "barriers"))


def test_this_torch_has_no_operation_that_is_not_known():
    assert unknown_methods(vars(ProcessGroup)) == ()


def test_nobody_uses_functional_collectives_which_are_not_seen():
    """But for Megatron's own FSDP, which is not used, and its question whether something is being compiled."""
    uses = re.compile(r"_functional_collectives(?!\.is_torchdynamo_compiling)|_c10d_functional")
    megatron = Path(str(importlib.util.find_spec("megatron.core").origin)).parent
    rooms = [Path(__file__).parents[2] / name for name in ("actor", "rollout", "rlpipe")]
    files = [path for folder in (megatron, *rooms) for path in folder.rglob("*.py") if "fsdp" not in path.parts]
    found = [path for path in files if uses.search(path.read_text()) and path.name != "interception.py"]
    assert found == []


def test_every_collective_of_this_torch_is_known():
    operators = {name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if "c10d::" in name[:6]}
    assert operators - {"check_for_nan"} == set(DISPATCHER_NAMES)


def test_the_default_policy_has_the_published_verdicts():
    verdicts = {name: rule.verdict for rule in load_policy().rules for name in rule.names}
    assert verdicts == dict.fromkeys(SKIPPED, "skip") | dict.fromkeys(GUARDED, "guard")
