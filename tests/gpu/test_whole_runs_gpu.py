"""Whole runs on GPUs: engine and actor take turns in a GPU's memory, or send weights from one GPU to another."""

from dataclasses import replace

import pytest
import torch
from run_support import UNTRACKED, metric_rows, run_arguments, run_command

from actor.hf.weight_table import export_plan
from rlpipe.config.load import load_config
from rlpipe.estimate.engine_pools import needed_pools
from rlpipe.estimate.memory import build_bytes
from rlpipe.model.model_reader import trainable_model
from rlpipe.prepare import prepare
from rlpipe.shared.quantization import specs_as_sent
from rlpipe.training.trained_share import planned_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only there two sides share one")

SETTINGS = [
    "run.iterations=2",
    "ray.colocate=true",
    "actor.dtype=bfloat16",
    "rollout.engine.dtype=bfloat16",
    "rollout.engine.memory_fraction=0.3",
    "rollout.engine.max_running_requests=64",
    "rollout.engine.deterministic=false",
    *UNTRACKED,
]


@pytest.fixture
def _a_quarter_of_the_second_gpu_taken():
    taken = torch.empty(torch.cuda.get_device_properties(1).total_memory // 4, dtype=torch.uint8, device="cuda:1")
    yield
    del taken
    torch.cuda.empty_cache()


@pytest.mark.timeout(600)
def test_engine_and_actor_share_a_gpu(tmp_path):
    _run(tmp_path, *SETTINGS)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, there are {torch.cuda.device_count()}")
@pytest.mark.timeout(600)
def test_an_engine_and_an_actor_of_two_processes_each_share_two_gpus(tmp_path, _a_quarter_of_the_second_gpu_taken):
    """One of them has a quarter less free, as beside another program: SGLang by itself refuses a tenth."""
    parallel = ["actor.processes=2", "actor.parallel.tensor=2", "actor.parallel.sequence=true"]
    _run(tmp_path, *SETTINGS, *parallel, "rollout.engine.tensor_parallel=2")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, there are {torch.cuda.device_count()}")
@pytest.mark.timeout(600)
def test_an_actor_on_one_gpu_sends_weights_to_an_engine_on_another(tmp_path):
    _run(tmp_path, *SETTINGS, "ray.colocate=false")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, there are {torch.cuda.device_count()}")
@pytest.mark.timeout(600)
def test_an_actor_quantises_what_it_sends_to_an_engine_on_another_gpu(tmp_path):
    policy = {"architecture": "qwen3_5_moe", "prediction_layer": "true", "layers": 4, "hidden_size": 256}
    policy |= {"heads": 4, "key_value_heads": 2, "head_dim": 64, "expert_intermediate_size": 128}
    settings = [
        f"model.path={tmp_path}/policy",
        f"prepare.policy={{{', '.join(f'{name}: {value}' for name, value in policy.items())}}}",
        "rollout.engine.quantization=fp8_all",
        "rollout.engine.draft={method: mtp}",
        "actor.train_mtp=true",
        "weight_sync.verify=true",
        "jit.warm_up=off",
    ]
    _run(tmp_path, *SETTINGS, *settings, "ray.colocate=false", "run.iterations=2", mismatch=0.1)
    model = replace(trainable_model(tmp_path / "policy"), fused_experts=True, fused_mtp_experts=True)
    specs = export_plan(model, with_mtp=True)
    sent = [part.size_bytes for spec in specs for part in specs_as_sent(spec, "fp8_all")]
    for row in metric_rows(tmp_path / "small")[1:]:
        assert sum(sent) <= row["weight_sync/bytes"] < sum(sent) + 16 * len(sent)
        assert row["weight_sync/bytes"] < 0.9 * sum(spec.size_bytes for spec in specs)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason=f"needs 4 GPUs, there are {torch.cuda.device_count()}")
@pytest.mark.timeout(600)
def test_an_actor_on_two_gpus_sends_weights_to_an_engine_on_two_others(tmp_path):
    parallel = ["actor.processes=2", "actor.parallel.tensor=2", "actor.parallel.sequence=true", "ray.colocate=false"]
    _run(tmp_path, *SETTINGS, *parallel, "rollout.engine.tensor_parallel=2")


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason=f"needs 4 GPUs, there are {torch.cuda.device_count()}")
@pytest.mark.timeout(600)
def test_two_expert_parallel_ranks_send_their_experts_to_two_engines(tmp_path):
    experts = [
        f"model.path={tmp_path}/policy",
        "prepare.policy.architecture=qwen3_5_moe",
        "prepare.policy.head_dim=64",
        "algorithm.routing_replay=true",
        "actor.processes=2",
        "actor.parallel.expert=2",
        "rollout.engines=2",
        "jit.warm_up=off",
    ]
    _run(tmp_path, *SETTINGS, *experts, "ray.colocate=false")
    for row in metric_rows(tmp_path / "small")[1:]:
        assert 0.45 < row["weight_sync/sender_max_bytes"] / row["weight_sync/bytes"] < 0.55


@pytest.mark.parametrize(("missing_bytes", "order"), [(0, "beside"), (2**30, "after")])
@pytest.mark.timeout(600)
def test_an_engine_has_its_planned_pool_beside_an_actor_that_is_built(tmp_path, missing_bytes, order):
    """One that leaves just what the actor is planned to take, and one that leaves less."""
    file, *settings = run_arguments(tmp_path, *SETTINGS)
    config = load_config(file, settings)
    prepare(config)
    model, size = planned_model(config), torch.cuda.get_device_properties(0).total_memory
    building = build_bytes(config, model)
    share = round((building + 5e9) / size, 3)
    room = share * size - building - model.parameters * 2 - 2**28
    engine = config.rollout.engine
    token_bytes = needed_pools(model.shape, engine, model.architecture, engine.max_running_requests, 1).token_bytes
    tokens = int((0.95 * room + missing_bytes) / token_bytes)
    pool = [f"rollout.engine.memory_fraction={share}", f"rollout.engine.kv_cache_tokens={tokens}"]
    output = _run(tmp_path, *SETTINGS, *pool, "ray.start=beside")
    assert f"the actor is built {order} the engines" in output
    assert "has a KV pool of" not in output  # a warning: smaller than planned
    assert 0 <= tokens - metric_rows(tmp_path / "small")[0]["start/kv_pool_tokens"] < 64  # SGLang's pages


def _run(folder, *settings, mismatch: float = 0.02) -> str:
    output = run_command("train", *run_arguments(folder, *settings))
    rows = metric_rows(folder / "small")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["weight_sync/version"] == row["iteration"]
        assert row["mismatch/logprob_abs_mean"] < mismatch
        assert (row["time/sleep_wake_seconds"] > 1e-3) == ("ray.colocate=false" not in settings)
        assert row["train/updates_applied_count"] > 0
    return output
