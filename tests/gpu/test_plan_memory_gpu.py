"""The planner's bytes against what a real actor process takes on a GPU."""

import pytest
import torch
from plan_models import LENGTHS, planned_parts, write_model
from train_support import in_module_worker, run_processes

from rlpipe.config.actor import ActorConfig
from rlpipe.config.cluster import ClusterConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only there its memory is counted")

NODE = {"gpus": 1, "gpu_memory_gigabytes": 140, "memory_gigabytes": 128}
GPU = ClusterConfig.model_validate({"kind": "local", "node": NODE})
TOLERANCE = 0.10
COMMON = {"hidden_size": 2048, "num_hidden_layers": 4, "head_dim": 128, "num_attention_heads": 16, "vocab_size": 32768}
SIZES = {
    "dense": COMMON | {"intermediate_size": 6144},
    "hybrid": COMMON
    | {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}


@pytest.mark.parametrize("shares", [LENGTHS, (131, 125)], ids=["short", "long"])
@pytest.mark.parametrize("granularity", ["none", "full"])
@pytest.mark.parametrize("kind", SIZES)
def test_a_training_step_takes_what_was_planned(tmp_path, kind, granularity, shares):
    settings = {"dtype": "bfloat16", "max_tokens_per_gpu": 8192, "recompute": {"granularity": granularity}}
    path = write_model(tmp_path, kind, SIZES[kind])
    free, total = torch.cuda.mem_get_info()
    others = total - free  # this process among them, when tests before this one have computed in it
    actor = ActorConfig.model_validate(settings)
    measured = run_processes(
        1, in_module_worker, "plan_workers", "measure_on_device", path, actor, shares, method="spawn"
    )[0]
    planned = planned_parts(path, settings, GPU)
    context = planned.pop("CUDA and NCCL")
    assert planned["parameters"] + planned["gradients"] == pytest.approx(measured["state"], rel=TOLERANCE)
    assert sum(planned.values()) == pytest.approx(measured["peak"], rel=TOLERANCE)
    assert measured["beside"] - others < context
