"""Speeds of an iteration, from seconds and lengths that are given, against the quotients that their names say."""

import json

import pytest

from actor.train_report import RankUsage
from rlpipe.batching import PackLimits, pack_sequences
from rlpipe.batching.sequences import supervised_sequence
from rlpipe.config.load import load_config
from rlpipe.flops import KernelWork, Recompute, hardware_flops, model_flops
from rlpipe.jit_monitor import JitEvent, JitReport
from rlpipe.model.model_reader import trainable_model
from rlpipe.monitoring.console import Console
from rlpipe.training.efficiency import policy_work, rollout_rate_per_gpu, training_metrics
from rlpipe.training.iteration import IterationRecord
from tests.small_config import SMALL_MODEL

PROCESSES, PEAK_TFLOPS, LENGTHS = 2, 3.0, [5, 7, 4]
PARTS = {"forward": 2.0, "backward": 3.0, "optimizer": 0.5, "exchange": 0.25}
CALL_SECONDS, REFERENCE_SECONDS, JIT_SECONDS = 5.75, 1.5, 0.75


def _config(folder, *settings):
    (folder / "config.json").write_text(json.dumps(SMALL_MODEL))
    given = [f"model.path={folder}", f"actor.processes={PROCESSES}", f"actor.peak_tflops={PEAK_TFLOPS}", *settings]
    return load_config("configs/demo/arithmetic.yaml", given)


def _record(reference=True):
    record = IterationRecord(1, 0.0, Console(1))
    phases = {"train": PARTS} | ({"ref_logprob": {"ref_logprob": REFERENCE_SECONDS}} if reference else {})
    for name, parts in phases.items():
        with record.phase(name):
            pass
        record.split(name, parts, rest="tracking")
    return record


def _packs():
    sequences = [supervised_sequence(str(length), (1, 2), (3,) * (length - 2)) for length in LENGTHS]
    return pack_sequences(sequences, PackLimits(16, 4, 4), data_parallel=PROCESSES)


def _usages(jit_seconds=JIT_SECONDS):
    compiled = JitEvent("triton", "kernel", "key", jit_seconds, False, "", "forward", 1)
    elsewhere = JitEvent("triton", "kernel", "key", 100.0, False, "", "rollout", 1)
    reports = [JitReport(2, 0, (compiled, elsewhere), (), ()), JitReport(1, 0, (), (), ())]
    return [RankUsage(rank, "node", "", "", {}, (), report) for rank, report in enumerate(reports)]


def test_speeds_are_what_was_trained_over_the_training_call(tmp_path):
    config = _config(tmp_path, "algorithm.kl.coefficient=0.1")
    metrics = training_metrics(_record(), config, _packs(), _usages(), policy_work(config))
    shape = trainable_model(str(tmp_path)).shape
    flops = model_flops(shape, LENGTHS, include_mtp=False)
    padded = [length + -length % 4 for length in LENGTHS]
    done = hardware_flops(
        shape, padded, Recompute("none", frozenset()), KernelWork(False, None, True), include_mtp=False
    )
    rate = flops.train / CALL_SECONDS / PROCESSES / 1e12
    rate_without_jit = rate * CALL_SECONDS / (CALL_SECONDS - JIT_SECONDS)
    executed_rate = done / CALL_SECONDS / PROCESSES / 1e12
    assert metrics == pytest.approx(
        {
            "perf/trained_tokens": sum(LENGTHS),
            "perf/actor_train_seconds": CALL_SECONDS,
            "perf/train_seconds": CALL_SECONDS + REFERENCE_SECONDS,
            "perf/actor_tokens_per_second": sum(LENGTHS) / CALL_SECONDS,
            "perf/actor_tokens_per_gpu_per_second": sum(LENGTHS) / CALL_SECONDS / PROCESSES,
            "perf/actor_train_tflops_per_gpu": rate,
            "perf/optimizer_exposed_share": PARTS["optimizer"] / CALL_SECONDS,
            "perf/ref_logprob_tflops_per_gpu": flops.logprob / REFERENCE_SECONDS / PROCESSES / 1e12,
            "perf/actor_train_mfu": rate / PEAK_TFLOPS,
            "perf/actor_train_mfu_excluding_jit": rate_without_jit / PEAK_TFLOPS,
            "perf/actor_train_hfu": executed_rate / PEAK_TFLOPS,
        },
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_adapters_leave_untrained_is_not_executed(tmp_path, recompute):
    adapted = ["actor.lora.rank=4", "actor.lora.targets=[layers.1.self_attn.q_proj]"]
    config = _config(tmp_path, *adapted, f"actor.recompute.granularity={recompute}")
    work = policy_work(config)
    metrics = training_metrics(_record(), config, _packs(), _usages(), work)
    padded = [length + -length % 4 for length in LENGTHS]
    everything = hardware_flops(
        work.shape, padded, Recompute(recompute, frozenset()), KernelWork(False, None, True), include_mtp=False
    )
    left = work.untrained.flops(padded, idle=recompute == "none")
    assert 0 < left < everything
    executed = (everything - left) / CALL_SECONDS / PROCESSES / 1e12
    assert metrics["perf/actor_train_hfu"] == pytest.approx(executed / PEAK_TFLOPS)


@pytest.mark.parametrize(("coefficient", "reference"), [(0.0, True), (0.1, False)])
def test_a_reference_pass_has_a_speed_where_there_is_one(tmp_path, coefficient, reference):
    config = _config(tmp_path, f"algorithm.kl.coefficient={coefficient}")
    metrics = training_metrics(_record(reference), config, _packs(), _usages(), policy_work(config))
    assert "perf/ref_logprob_tflops_per_gpu" not in metrics


def test_what_compiles_longer_than_the_call_leaves_a_rate(tmp_path):
    config = _config(tmp_path)
    metrics = training_metrics(_record(), config, _packs(), _usages(jit_seconds=2 * CALL_SECONDS), policy_work(config))
    assert metrics["perf/actor_train_mfu_excluding_jit"] > metrics["perf/actor_train_mfu"]


def test_a_rollout_s_rate_is_shared_by_the_devices_of_all_engines(tmp_path):
    config = _config(tmp_path, "rollout.engines=3", "rollout.engine.tensor_parallel=2")
    record = _record()
    assert rollout_rate_per_gpu(record, config) == {}
    record.add({"perf/rollout_tokens_per_second": 600.0})
    assert rollout_rate_per_gpu(record, config) == {"perf/rollout_tokens_per_gpu_per_second": 100.0}
