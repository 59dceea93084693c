"""Engines that are killed while they generate on a GPU come back with the actor's weights, and no sample is lost."""

import pytest
import torch

from tests.chaos.chaos_schedule import Strike
from tests.chaos.chaos_support import DisturbedRun, assert_healed, disturbed_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only there two sides share one")

ITERATIONS = 3
SECONDS = 700  # its start alone took 216 while other suites compiled
SETTINGS = (
    f"run.iterations={ITERATIONS}",
    "actor.dtype=bfloat16",
    "rollout.engine.dtype=bfloat16",
    "rollout.engine.memory_fraction=0.3",
    "rollout.engine.max_running_requests=32",
    "rollout.engine.deterministic=false",
    # Long responses, so that a strike meets them; the others take the time of a start.
    "rollout.max_response_tokens=512",
    "rollout.sampling.ignore_eos=true",
    "eval.max_response_tokens=24",
    "eval.interval_iterations=0",
    "jit.warm_up=off",
    "checkpoint.interval_iterations=0",
)
DRAFTS = (
    "actor.train_mtp=true",
    "prepare.policy.architecture=qwen3_5_moe",
    "prepare.policy.prediction_layer=true",
    "prepare.policy.layers=4",
    "prepare.policy.head_dim=64",
    "rollout.engine.draft.method=mtp",
    "rollout.engine.draft.steps=2",
)


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("more", [(), DRAFTS], ids=["plain", "drafts"])
def test_an_engine_that_shares_a_gpu_with_the_actor_comes_back(tmp_path, more):
    settings = (*SETTINGS, "ray.colocate=true", *more)
    run = disturbed_run(tmp_path, [_strike("scheduler")], *settings, seconds=SECONDS)
    assert_came_back(run)
    assert all(row["time/sleep_wake_seconds"] > 1e-3 for row in run.rows[1:]), run.evidence


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, there are {torch.cuda.device_count()}")
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("victim", ["engine", "scheduler"])
def test_an_engine_on_a_gpu_of_its_own_comes_back(tmp_path, victim):
    run = disturbed_run(tmp_path, [_strike(victim)], *SETTINGS, "ray.colocate=false", seconds=SECONDS)
    assert_came_back(run)


def _strike(victim: str) -> Strike:
    return Strike(victim, "kill", "rollout", 2, 0.3)


def assert_came_back(run: DisturbedRun) -> None:
    """All samples were trained once, the second iteration's by an engine that had its weights anew."""
    assert_healed(run, None, ITERATIONS)
    ((strike,), (fault,)) = run.strikes, run.faults
    print(
        f"\n{strike['strike']}: noticed after {fault['noticed'] - strike['time']:.1f} s, serving after "
        f"{fault['serving'] - strike['time']:.1f} s, the whole run took {run.seconds:.0f} s"
    )
    healed = run.rows[2]
    assert healed["fault/engine_restarts_count"] == 1, run.evidence
    assert healed["fault/requests_reissued_count"] > 0, run.evidence
    for row in run.rows[1:]:
        assert row["rollout/samples_count"] == 32, run.evidence
        assert row["weight_sync/version"] == row["iteration"], run.evidence
        # An engine that samples with the weights of the model folder differs by far more than rounding does.
        assert row["mismatch/logprob_abs_mean"] < 0.02, run.evidence
