"""The memory guard on real process groups: what it sees, when it acts, what it says, and that it changes nothing."""

import pytest
import torch
from train_support import in_module_worker, run_processes

from actor.collectives.operations import DISPATCHER_NAMES
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
        assert all(found["equal"].values()), found["equal"]
        assert found["untouched"]


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
        assert all(found["equal"].values()), found["equal"]
        assert found["sum"] == [4.0, 4.0]
        assert found["metrics"]["guard/checks"] == 0
        assert found["metrics"]["guard/skips"] == len(found["equal"]) + 3 + 2  # three of them are two collectives
        assert "in all_reduce of 0.00 MiB in group" in found["notes"]


def test_a_failure_names_operation_group_bytes_and_memory():
    for memory, other in run_processes(2, in_module_worker, "comm_guard_workers", "failures"):
        assert memory[0] == "ResourceError"
        assert other[0] == "RuntimeError"
        for text in (memory[1], other[1]):
            assert "all_reduce of 0.00 MiB in group" in text
            assert "of 2 ranks" in text
            assert "last probes" in text


def test_every_collective_of_this_torch_is_known():
    operators = {name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if "c10d::" in name[:6]}
    assert operators - {"check_for_nan", "monitored_barrier_"} == set(DISPATCHER_NAMES)


def test_the_default_policy_has_the_published_verdicts():
    verdicts = {name: rule.verdict for rule in load_policy().rules for name in rule.names}
    assert verdicts == dict.fromkeys(SKIPPED, "skip") | dict.fromkeys(GUARDED, "guard")
