"""From what an observer saw to a policy file: one that says where it was made, and that other stacks do not trust."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from train_support import in_module_worker, run_processes

from actor.comm_guard.evidence import Evidence, evidence_table, policy_of, read_evidence
from actor.comm_guard.install import check_stack, configured_policy, install_comm_guard
from actor.comm_guard.rules import Stack, Threshold, load_policy, policy_table, save_policy
from actor.comm_guard.stack import driver_version
from rlpipe.config.comm_guard import CommGuardConfig
from rlpipe.shared.errors import ConfigError, ResourceError


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """Folder of the evidence of two ranks, and what the observers reported."""
    folder = tmp_path_factory.mktemp("observed")
    return folder, run_processes(2, in_module_worker, "comm_guard_workers", "observed", str(folder), "580.1")


def test_an_observer_counts_and_leaves_torch_alone(observed):
    for found in observed[1]:
        first, second = found["metrics"]
        assert (first["guard/checks"], second["guard/checks"]) == (3, 3)
        assert first["guard/cleanups"] == second["guard/skips"] == 0
        assert found["replaced"] == []


def test_evidence_joins_the_worse_of_the_ranks(observed):
    evidence = read_evidence(observed[0])
    found = {
        (one.operation, one.size): (one.ranks, one.calls, one.first_drop_bytes, one.later_drop_bytes)
        for one in evidence.observations
    }
    assert found == {
        ("all_reduce", "64KiB"): (2, 3, 100, 0),
        ("all_to_all_single", "64KiB"): (2, 1, 0, 0),
        ("broadcast", "1MiB"): (2, 2, 7, 8),
    }


def test_a_policy_skips_what_took_memory_at_its_first_call_only(observed, tmp_path):
    evidence = read_evidence(observed[0])
    path = tmp_path / "policy.yaml"
    save_policy(policy_of(evidence, tolerance_bytes=5, threshold=Threshold(share=0.05)), path)
    policy = load_policy(path)
    assert policy.guard_first_use
    assert policy.stack == evidence.stack
    assert policy.verdict("all_reduce", "any", "64KiB") == "skip"
    assert policy.verdict("broadcast", evidence.observations[2].group, "1MiB") == "guard"
    assert policy.verdict("all_to_all_single", evidence.observations[1].group, "64KiB") == "guard"  # seen only once
    assert policy.verdict("barrier", "any", "64KiB") == "guard"  # never seen
    patient = policy_of(evidence, tolerance_bytes=8, threshold=Threshold(share=0.05))
    assert patient.verdict("broadcast", evidence.observations[2].group, "1MiB") == "skip"


def test_tables_say_operation_signal_and_verdict(observed):
    evidence = read_evidence(observed[0])
    rows = {line.split()[0]: line for line in evidence_table(evidence, tolerance_bytes=5).splitlines()[1:4]}
    assert " skip " in rows["all_reduce"]
    assert "3 calls" in rows["all_reduce"]
    assert " guard " in rows["broadcast"]
    shown = policy_table(policy_of(evidence, 5, Threshold(share=0.05)))
    assert "made on: device told, driver 580.1" in shown
    assert "clean-up below 5.0% of the device free" in shown


def test_evidence_of_different_stacks_is_not_joined(observed, tmp_path):
    for rank, driver in enumerate(("580.1", "590.2")):
        tree = json.loads((observed[0] / f"rank-{rank:05d}.json").read_text())
        tree["stack"]["driver"] = driver
        (tmp_path / f"rank-{rank:05d}.json").write_text(json.dumps(tree))
    with pytest.raises(ResourceError, match=r"driver '580.1' \(here '590.2'\)"):
        read_evidence(tmp_path)


def test_evidence_survives_its_file(observed):
    evidence = read_evidence(observed[0])
    assert Evidence.of_json(json.loads(json.dumps(evidence.as_json()))) == evidence


def test_a_profile_without_devices_says_why(tmp_path):
    with pytest.raises(ResourceError, match="several GPUs"):
        read_evidence(tmp_path)


def test_a_policy_of_another_stack_warns_or_is_refused(observed, tmp_path):
    policy = policy_of(read_evidence(observed[0]), 5, Threshold(share=0.05))
    here = policy.stack.model_copy(update={"torch": "9.9"})
    sentence = check_stack(policy, here, CommGuardConfig(policy="mine.yaml"))
    assert "mine.yaml" in sentence
    assert f"torch '{torch.__version__}' (here '9.9')" in sentence
    with pytest.raises(ConfigError, match="other_stack to warn"):
        check_stack(policy, here, CommGuardConfig(policy="mine.yaml", other_stack="refuse"))
    assert check_stack(policy, policy.stack, CommGuardConfig(other_stack="refuse")) == ""
    assert check_stack(load_policy(), here, CommGuardConfig(other_stack="refuse")) == ""  # published evidence


def test_the_threshold_of_the_run_replaces_the_policys():
    assert configured_policy(CommGuardConfig()).threshold.in_bytes(1000) == 40
    assert configured_policy(CommGuardConfig(threshold_share=0.1)).threshold.in_bytes(1000) == 100
    assert configured_policy(CommGuardConfig(threshold_bytes=7)).threshold.in_bytes(1000) == 7


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rules: [{operation: all_reduces, verdict: skip, evidence: x}]", r"rules\.0\.operation"),
        ("rules: [{operation: all_reduce, verdict: maybe, evidence: x}]", r"rules\.0\.verdict"),
        ("rules: [{operation: all_reduce, verdict: skip}]", r"rules\.0\.evidence"),
        ("threshold: {share: 0.1, size_bytes: 5}", "either `share` or `size_bytes`"),
        ("surprise: 1", "surprise"),
        ("rules: [", "not valid YAML"),
    ],
)
def test_a_wrong_policy_is_refused_by_place(tmp_path, text, sentence):
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_policy(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_policy(tmp_path / "none.yaml")


def test_a_policy_is_read_at_start_even_where_nothing_is_guarded(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        install_comm_guard(CommGuardConfig(mode="enforce", policy=str(tmp_path / "none.yaml")), rank=0)
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump({"default": "skip"}))
    assert install_comm_guard(CommGuardConfig(mode="enforce", policy=str(path)), rank=0).take() == {}


def test_a_guard_is_installed_as_its_section_says(monkeypatch):
    made = []
    monkeypatch.setattr("actor.comm_guard.install.torch.cuda.is_available", lambda: True)
    for name in ("CudaDriver", "present_stack", "check_stack"):
        monkeypatch.setattr(f"actor.comm_guard.install.{name}", lambda *_: "")
    guard = SimpleNamespace(install=lambda: made.append("installed"))
    monkeypatch.setattr("actor.comm_guard.install.CommGuard", lambda *_, **named: made.append(named) or guard)
    config = CommGuardConfig(mode="enforce", ttl_seconds=0.5, recovery=3.0)
    assert install_comm_guard(config, rank=0) is guard
    assert made == [{"ttl_seconds": 0.5, "recovery": 3.0}, "installed"]
    monkeypatch.setattr("actor.comm_guard.install.Observer", lambda *given: made.append(given[2:]) or guard)
    install_comm_guard(CommGuardConfig(mode="observe", evidence="mine"), rank=1)
    assert made[2:] == [(Path("mine"), 1), "installed"]


def test_readings_are_believed_for_their_time():
    for found in run_processes(2, in_module_worker, "comm_guard_workers", "ages"):
        assert found == [1, 1, 1, 2, 2, 2]


def test_operations_started_together_and_functional_ones_keep_their_results():
    for found in run_processes(2, in_module_worker, "comm_guard_workers", "coalesced"):
        assert found == {"sum": 3.0, "together": 1.0, "functional": [2.0, 2.0]}


def test_the_drivers_version_is_found_where_the_kernel_module_says_it():
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    assert driver_version(line) == "580.95.05"
    assert driver_version("") == "unknown"
    assert Stack(device="a", driver="b", nccl="c", torch="d").differences(
        Stack(device="a", driver="b", nccl="c", torch="e")
    ) == ["torch 'd' (here 'e')"]
