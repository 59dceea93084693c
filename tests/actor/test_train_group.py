"""The actor as the driver sees it: two real Ray processes behind one object."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import ray
from train_support import make_pack, write_policy

from actor.group import ActorGroup
from rlpipe.config.algorithm import AlgorithmConfig, KLConfig
from rlpipe.config.root import Config
from rlpipe.shared.checkpoint_folder import latest_checkpoint
from rlpipe.shared.errors import ActorError, CheckpointError, ModelError
from rlpipe.shared.pack import dummy_pack

KL = AlgorithmConfig(kl=KLConfig(coefficient=0.1))
PACKS = [make_pack([12, 20], 1, 60.0), make_pack([16, 5, 9], 2, 60.0), make_pack([30], 3, 60.0)]


def config_of(path, processes):
    return Config.model_validate(
        {
            "run": {"name": "group-test", "iterations": 4},
            "model": {"path": str(path)},
            "data": {"train": [{"name": "none", "path": "none"}], "max_prompt_tokens": 64},
            "rollout": {"max_response_tokens": 64},
            "algorithm": {"kl": {"coefficient": 0.1}},
            "actor": {"processes": processes, "dtype": "float32", "max_skipped_updates": 2},
            "deadlines": {"start_seconds": 240, "train_seconds": 120, "checkpoint_seconds": 120},
            "checkpoint": {"keep": 1},
        }
    )


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policies"), "dense")


@pytest.fixture(scope="module")
def groups(ray_session, policy_path):
    """The running group and its checkpoint of the start; empty while none was started, or after a test stopped it."""
    running = []
    yield running
    for group, _ in running:
        group.stop()


@pytest.fixture
def group(groups, policy_path, tmp_path_factory):
    """As it was at its start, whatever tests did to it."""
    if not groups:
        started = ActorGroup.start(config_of(policy_path, 2))
        groups.append((started, started.save_checkpoint(tmp_path_factory.mktemp("beginning"), 1, {})))
        started.finish_checkpoint()
    ((running, beginning),) = groups
    running.load_checkpoint(beginning)
    return running


def by_data_rank(packs):
    return [packs[0::2], [*packs[1::2], dummy_pack(1)]]


def test_the_handle_imports_neither_torch_nor_megatron():
    code = "import sys, actor.group; print([m for m in ('torch', 'megatron', 'sglang') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_no_process_has_the_tracker_that_megatron_imports(group):
    def loaded(process):
        return [name for name in ("wandb", "megatron.core") if sys.modules.get(name) is not None]

    assert ray.get([one.__ray_call__.remote(loaded) for one in group._workers]) == [["megatron.core"]] * 2


def test_a_training_call_reports_steps_metrics_and_the_seconds_of_all_ranks(group):
    reference = group.logprobs(by_data_rank(PACKS), "reference")
    assert [len(rank) for rank in reference] == [2, 2]
    packs = [
        [replace(pack, ref_logprobs=logprobs) for pack, logprobs in zip(rank, found, strict=True)]
        for rank, found in zip(by_data_rank(PACKS), reference, strict=True)
    ]
    report = group.train([[rank, rank] for rank in packs], KL)
    assert [step.applied for step in report.steps] == [True, True]
    assert report.metrics["train/updates_applied_count"] == 2
    assert report.steps[0].metrics["train/kl_loss"] == pytest.approx(0, abs=1e-6)
    usages = group.take_usage(next_iteration=1)
    assert [usage.name for usage in usages] == ["actor-0", "actor-1"]
    for usage in usages:
        parts = {"forward", "backward", "optimizer", "train", "train_exchange", "ref_logprob"}
        assert parts <= set(usage.part_seconds)
        assert all(usage.part_seconds[part] > 0 for part in parts)
        assert usage.device_name == ""
        assert {"ranks/checkpoint_wait_seconds", "memory/host_used_bytes"} <= usage.metrics.keys()


def test_what_would_make_ranks_wait_forever_is_refused_at_once(group):
    with pytest.raises(ActorError, match=r"\[2, 1\] packs"):
        group.train([[PACKS[:2]], [PACKS[2:]]], AlgorithmConfig(loss="sft"))
    with pytest.raises(ActorError, match=r"\[2, 1\] optimizer steps"):
        group.train([[PACKS[:1], PACKS[:1]], [PACKS[:1]]], AlgorithmConfig(loss="sft"))
    with pytest.raises(ActorError, match="reference log-probabilities"):
        group.train([[PACKS[:1]], [PACKS[1:2]]], KL)


def test_checkpoint_brings_policy_and_driver_state_back(group, tmp_path):
    supervised = AlgorithmConfig(loss="sft")
    steps = [[rank] for rank in by_data_rank(PACKS)]
    final = group.save_checkpoint(tmp_path, 7, {"epoch": 1, "position": 40})
    before = group.logprobs(by_data_rank(PACKS))
    loss = group.train(steps, supervised).metrics["train/loss"]
    group.finish_checkpoint()
    assert latest_checkpoint(tmp_path) == final
    assert group.load_checkpoint(final) == {"epoch": 1, "position": 40}
    for old, new in zip(before, group.logprobs(by_data_rank(PACKS)), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(old, new, strict=True))
    assert group.train(steps, supervised).metrics["train/loss"] == loss
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        group.load_checkpoint(tmp_path / "iteration_00000001")


def test_a_checkpoint_appears_with_an_update_after_it_was_written(group, tmp_path):
    final = group.save_checkpoint(tmp_path, 7, {})
    end = time.monotonic() + 60
    while latest_checkpoint(tmp_path) is None and time.monotonic() < end:
        group.train([[rank] for rank in by_data_rank(PACKS)], AlgorithmConfig(loss="sft"))
    assert latest_checkpoint(tmp_path) == final


def test_as_many_checkpoints_are_kept_as_are_said(group, tmp_path):
    for iteration in (1, 2):
        group.save_checkpoint(tmp_path, iteration, {}, wait=True)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_00000002"]


def test_an_actor_that_gave_its_memory_back_refuses_work_until_it_has_it_again(group, tmp_path):
    before = group.logprobs(by_data_rank(PACKS))
    group.keep_resident("nothing")
    for call in (
        lambda: group.logprobs(by_data_rank(PACKS)),
        lambda: group.save_hf(tmp_path / "policy"),
        lambda: group.begin_send_weights().result(),
    ):
        with pytest.raises(
            ActorError, match=r"where it holds nothing: call ActorGroup.keep_resident\('weights'\) first"
        ):
            call()
    group.keep_resident("weights")
    for old, new in zip(before, group.logprobs(by_data_rank(PACKS)), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(old, new, strict=True))
    with pytest.raises(ActorError, match="training needs the actor's weights and gradients"):
        group.train([[rank] for rank in by_data_rank(PACKS)], AlgorithmConfig(loss="sft"))
    group.keep_resident("all")
    assert group.train([[rank] for rank in by_data_rank(PACKS)], AlgorithmConfig(loss="sft")).updates_applied


def test_policy_is_written_in_hugging_face_layout(group, tmp_path):
    from safetensors.numpy import load_file

    group.save_hf(tmp_path / "policy")
    assert (tmp_path / "policy" / "config.json").is_file()
    names = {spec.name for bucket in group.weight_plans()["merged"] for spec in bucket.tensors}
    assert set(load_file(tmp_path / "policy" / "model.safetensors")) == names


def test_reset_optimizer_starts_the_counters_and_the_schedule_again(group):
    options = group._config.actor.optimizer.model_copy(update={"learning_rate": 0.5, "warmup_steps": 5})
    group.reset_optimizer(options, 10)
    report = group.train([[rank] for rank in by_data_rank(PACKS)], AlgorithmConfig(loss="sft"))
    assert report.updates_attempted == 1
    assert report.metrics["train/learning_rate"] == pytest.approx(0.1)


def test_poisoned_updates_are_skipped_and_then_end_the_run(group):
    bad = [replace(pack, advantages=pack.advantages * np.float32("nan")) for pack in PACKS]
    steps = [[rank] for rank in by_data_rank(bad)]
    report = group.train(steps, AlgorithmConfig())
    assert report.updates_skipped == 1
    assert report.steps[0].culprit_sample_ids == ("1/0", "1/1", "2/0", "2/1", "2/2", "3/0")
    with pytest.raises(ActorError, match="2 updates in a row were skipped.* 1/0, 1/1"):
        group.train(steps, AlgorithmConfig())


@pytest.mark.slow
def test_stop_ends_the_processes_and_a_bad_model_folder_is_one_sentence(group, groups, policy_path, tmp_path):
    groups.clear()
    processes = [address.pid for address in group._addresses]
    group.stop()
    group.stop()
    assert not any(_alive(pid) for pid in processes)
    (tmp_path / "config.json").write_text((policy_path / "config.json").read_text())
    with pytest.raises(ModelError) as caught:
        ActorGroup.start(config_of(tmp_path, 1))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def _alive(pid):
    """Ray ends killed processes in the background: wait a little."""
    import time

    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True
