"""A whole run whose engine drafts with the layer that the actor trains."""

import pytest
import torch
from run_support import UNTRACKED, metric_rows, run_arguments, run_command

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: SGLang verifies drafts only there")


@pytest.mark.timeout(600)
def test_a_whole_run_trains_the_prediction_layer_and_drafts_with_it(tmp_path):
    """Drafts come to be kept. Actor and engine share the GPU: the drafting layer travels with each update, and sleeps
    with the engine."""
    settings = [
        "run.iterations=4",
        "warm_start.steps=80",
        "warm_start.sequences_per_step=128",
        f"model.path={tmp_path}/policy",
        f"prepare.directory={tmp_path}/task",
        "ray.colocate=true",
        "actor.dtype=bfloat16",
        "actor.train_mtp=true",
        "prepare.policy.architecture=qwen3_5_moe",
        "prepare.policy.prediction_layer=true",
        "prepare.policy.layers=4",
        "prepare.policy.head_dim=64",
        "rollout.engine.dtype=bfloat16",
        "rollout.engine.memory_fraction=0.2",
        "rollout.engine.max_running_requests=32",
        "rollout.engine.deterministic=false",
        "rollout.engine.draft.method=mtp",
        "rollout.engine.draft.steps=2",
        "algorithm.routing_replay=true",
        "weight_sync.verify=true",
        "jit.warm_up=off",
        *UNTRACKED,
    ]
    run_command("train", *run_arguments(tmp_path, *settings))
    rows = metric_rows(tmp_path / "small")
    keys = (
        "weight_sync/version",
        "mismatch/logprob_abs_mean",
        "rollout/draft_pass_tokens",
        "rollout/draft_seconds",
        "train/mtp_loss",
    )
    for row in rows[1:]:
        print({key: row.get(key) for key in keys} | {"seconds": row.get("time/step_seconds")})
        assert row["weight_sync/version"] == row["iteration"]
        assert row["mismatch/logprob_abs_mean"] < 0.02
        assert row["rollout/draft_pass_tokens"] >= 1 and row["rollout/draft_break_even_tokens"] > 1
        assert 0 < row["rollout/draft_seconds"] < row["time/rollout_seconds"]
    # A random layer's drafts are never kept; those of a trained one are, of sums that are spelled digit by digit.
    assert rows[-1]["rollout/draft_pass_tokens"] > 1.02
    assert rows[-1]["train/mtp_loss"] < rows[1]["train/mtp_loss"] * 1.05
