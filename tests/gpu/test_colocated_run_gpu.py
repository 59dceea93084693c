"""A whole run on one GPU, where engine and actor take turns in its memory and weights pass through it."""

import pytest
import torch
from run_support import metric_rows, run_arguments, run_command

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only there two sides share one")

SETTINGS = [
    "run.iterations=2",
    "ray.colocate=true",
    "actor.dtype=bfloat16",
    "rollout.engine.dtype=bfloat16",
    "rollout.engine.memory_fraction=0.3",
    "rollout.engine.max_running_requests=64",
    "rollout.engine.deterministic=false",
    "trackers.wandb=off",
    "trackers.tensorboard=false",
]


@pytest.mark.timeout(300)
def test_engine_and_actor_share_a_gpu(tmp_path):
    run_command("train", *run_arguments(tmp_path, *SETTINGS))
    rows = metric_rows(tmp_path / "small")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["weight_sync/version"] == row["iteration"]
        assert row["mismatch/logprob_abs_mean"] < 0.02
        assert row["time/sleep_wake_seconds"] > 0
        assert row["train/updates_applied_count"] > 0
