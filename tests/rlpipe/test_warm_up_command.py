"""`rlpipe warm-up`: both sides start and meet every class, and nothing but a table is left."""

import pytest
from run_support import run_arguments, run_command


@pytest.mark.slow
def test_both_sides_are_warmed_up_and_no_run_is_made(tmp_path):
    settings = [
        f"model.path={tmp_path}/policy",
        f"prepare.directory={tmp_path}/task",
        f"run.directory={tmp_path}/runs",
        f"jit.cache_directory={tmp_path}/caches",
        "rollout.engine.max_running_requests=4",
        "rollout.engine.kv_cache_tokens=1024",
        "actor.max_tokens_per_gpu=96",
    ]
    output = run_command("warm-up", *run_arguments(tmp_path, *settings))
    assert "compiler" in output
    assert f"TRITON_CACHE_DIR={tmp_path}/caches" in output
    assert not (tmp_path / "runs").exists()
