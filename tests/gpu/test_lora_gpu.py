"""Adapters on a GPU: engines that keep them beside the model, and a hybrid's training beside full training.

python -m pytest tests/gpu/test_lora_gpu.py -q -s
"""

import pytest
import torch
from run_support import UNTRACKED, metric_rows, run_arguments, run_command
from train_support import VOCABULARY, in_module_worker, run_processes

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: on a CPU, SGLang's kernels for adapters have other code"
)

RUN = [
    "run.iterations=3",
    "eval.interval_iterations=3",
    "ray.colocate=true",
    "ray.sleep=never",
    "actor.dtype=bfloat16",
    "actor.lora={rank: 16, alpha: 32}",
    "actor.optimizer={learning_rate: 1.0e-2, warmup_steps: 0}",
    "rollout.engine.dtype=bfloat16",
    "rollout.engine.memory_fraction=0.3",
    "rollout.engine.max_running_requests=64",
    "rollout.engine.deterministic=false",
    *UNTRACKED,
]


@pytest.mark.timeout(600)
def test_an_engine_generates_with_adapters_that_come_alone(tmp_path):
    """Were they not used, its log-probabilities would be those of the reference, which the policy moves away from."""
    run_command("train", *run_arguments(tmp_path, *RUN, "weight_sync.adapters=alone"))
    rows = metric_rows(tmp_path / "small")
    model_bytes = sum(one.stat().st_size for one in (tmp_path / "small/policy").glob("*.safetensors"))
    for row in rows[1:]:
        print({name: row[name] for name in ("mismatch/logprob_abs_mean", "train/kl_loss", "weight_sync/bytes")})
        assert row["weight_sync/version"] == row["iteration"]
        assert row["weight_sync/bytes"] < model_bytes / 2
        assert row["mismatch/logprob_abs_mean"] < 0.02
    assert rows[-1]["train/kl_loss"] > 0.01


@pytest.mark.timeout(600)
def test_both_ways_are_tried_where_the_faster_one_is_wanted(tmp_path):
    settings = [*RUN, "run.iterations=1", "weight_sync.adapters=auto"]
    output = run_command("train", *run_arguments(tmp_path, *settings))
    print(next(line for line in output.splitlines() if "adapters go to the engines" in line))
    assert metric_rows(tmp_path / "small")[-1]["mismatch/logprob_abs_mean"] < 0.02


@pytest.mark.timeout(300)
def test_a_hybrid_trains_adapters_in_less_memory_than_itself(tmp_path):
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(
        vocab_size=max(VOCABULARY, 8192),
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    Qwen3_5MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "hybrid")
    answers = run_processes(1, in_module_worker, "lora_gpu_workers", "full_and_adapters", tmp_path / "hybrid")[0]
    for name, answer in answers.items():
        print(f"{name}: {answer['seconds']:.4f} s a step, {answer['peak_bytes'] / 1e9:.2f} GB, {answer['losses']}")
        assert answer["losses"][-1] < answer["losses"][0]
    full, lora = answers["full"], answers["lora"]
    assert full["losses"][0] == pytest.approx(lora["losses"][0], rel=1e-3)
    # Activations are the same, and most of the peak of a policy this small.
    assert lora["peak_bytes"] < 0.7 * full["peak_bytes"]
