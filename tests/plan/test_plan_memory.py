"""The planner's bytes against what a real actor process takes."""

import os
from pathlib import Path

import pytest
from plan_models import LARGE, LENGTHS, SMALL, planned_config, planned_parts, write_model
from train_support import run_processes

from rlpipe.config.actor import ActorConfig
from rlpipe.config.cluster import ClusterConfig
from rlpipe.estimate.memory import checkpoint_bytes
from rlpipe.training.trained_share import planned_model

GPU = ClusterConfig.model_validate(
    {"kind": "local", "node": {"gpus": 1, "gpu_memory_gigabytes": 80, "memory_gigabytes": 16}}
)
CPU = ClusterConfig.model_validate({"kind": "local", "node": {"memory_gigabytes": 16}})
TOLERANCE = 0.10
UNCUT = {"recompute": {"granularity": "none"}}


@pytest.fixture(autouse=True)
def _freed_memory_goes_back(monkeypatch):
    """Otherwise the C library keeps what was freed, and the resident size tells of the past."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert os.environ["MALLOC_MMAP_THRESHOLD_"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "granularity"),
    [
        ("dense", "none"),
        ("dense", "full"),
        ("hybrid", "none"),
        ("hybrid", "full"),
    ],
)
def test_a_training_step_takes_what_was_planned(tmp_path, kind, granularity):
    from plan_workers import measure

    large, small = write_model(tmp_path, kind, LARGE), write_model(tmp_path, kind, SMALL)
    settings = {"dtype": "float32", "max_tokens_per_gpu": sum(LENGTHS), "recompute": {"granularity": granularity}}
    measured = run_processes(1, measure, large, small, ActorConfig.model_validate(settings), method="spawn")[0]
    planned = planned_parts(large, settings, CPU)
    state = planned["parameters"] + planned["gradients"] + planned["optimizer"]
    assert state == pytest.approx(measured["state"], rel=TOLERANCE)
    assert sum(planned.values()) == pytest.approx(measured["peak"], rel=TOLERANCE)
    if granularity == "none":
        assert planned["activations"] == pytest.approx(measured["kept"], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["none", "shared"])
def test_inputs_of_frozen_experts_are_not_kept(tmp_path, experts):
    from plan_workers import measure

    large, small = write_model(tmp_path, "hybrid", LARGE), write_model(tmp_path, "hybrid", SMALL)
    lora = {"lora": {"rank": 4, "experts": experts}, "optimizer": {"cpu_offload_fraction": 0.0}}
    settings = {"dtype": "float32", "max_tokens_per_gpu": sum(LENGTHS), **UNCUT, **lora}
    measured = run_processes(1, measure, large, small, ActorConfig.model_validate(settings), method="spawn")[0]
    planned = planned_parts(large, settings, CPU)
    assert planned["activations"] == pytest.approx(measured["kept"], rel=TOLERANCE)


@pytest.mark.slow
def test_a_checkpoint_is_as_large_as_planned(tmp_path):
    from plan_workers import saved_bytes

    cases = [
        ({"dtype": "float32"}, 0.0),
        ({"dtype": "bfloat16"}, 0.1),
        ({"dtype": "bfloat16", "optimizer": {"moments_dtype": "bfloat16"}}, 0.0),
        ({"dtype": "bfloat16", "lora": {"rank": 64}}, 0.1),
    ]
    path = write_model(tmp_path, "dense", SMALL | {"hidden_size": 512, "intermediate_size": 1024})
    configs = [
        planned_config(path, {"max_tokens_per_gpu": 1024, **actor}, algorithm={"kl": {"coefficient": coefficient}})
        for actor, coefficient in cases
    ]
    actors = [(config.actor, config.algorithm.kl.coefficient > 0) for config in configs]
    saved = run_processes(1, saved_bytes, path, actors, tmp_path / "saved", method="spawn")[0]
    for config, size in zip(configs, saved, strict=True):
        assert checkpoint_bytes(config, planned_model(config)) == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3.5-35B-A3B"])
def test_only_a_gpu_has_kernels_that_keep_less(model):
    kept = {
        (cluster.gpus, dtype): planned_parts(Path(model), {"dtype": dtype, **UNCUT}, cluster)["activations"]
        for cluster in (CPU, GPU)
        for dtype in ("float32", "bfloat16")
    }
    assert kept[0, "bfloat16"] > kept[1, "bfloat16"]
    assert kept[0, "float32"] == kept[1, "float32"]
