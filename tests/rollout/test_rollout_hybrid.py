"""A tiny Qwen3.5-MoE: gated-delta-net layers, experts and a shared expert in a real engine."""

import random

import numpy as np
import ray
from rollout_models import chosen_experts, save_hybrid, stacked_state
from rollout_requests import answers, generate, make_requests, results_of
from rollout_weight_source import WeightSource, in_parts, plan_of
from test_rollout_engine import logprob_error

from rollout.pool import RolloutPool


def test_logprobs_routes_repeatability_and_weight_updates(ray_session, config_of, tmp_path):
    first, second = save_hybrid(tmp_path / "first", seed=0), save_hybrid(tmp_path / "second", seed=1)
    requests = make_requests(6)
    with RolloutPool.start(config_of(algorithm={"routing_replay": True}), first, log_directory=str(tmp_path)) as pool:
        pool.wait_until_ready()
        generations = generate(pool, requests)
        assert logprob_error(first, requests, generations) < 1e-4

        for request, generation in zip(requests, generations, strict=True):
            wanted = chosen_experts(first, request.prompt_ids + generation.token_ids[:-1])
            np.testing.assert_array_equal(np.sort(generation.routes, axis=-1), wanted)

        shuffled = random.Random(1).sample(requests, len(requests))
        parts = [generate(pool, part) for part in (shuffled[:1], shuffled[1:])]
        assert {key: value for part in parts for key, value in answers(part).items()} == answers(generations)

        plan = plan_of(in_parts(stacked_state(second)), buckets=4)
        source = WeightSource.remote()
        group = ray.get(source.open.remote(1))
        joined = source.join.remote(group)
        results_of(pool, pool.weights.join([group], pool.up()), "joining")
        ray.get(joined)
        for version, folder in enumerate((second, first, second), 1):  # experts one by one, then stacked by halves
            receiving = pool.weights.start_receiving(plan, version)
            sent = ray.get(source.send.remote(in_parts(stacked_state(folder)), plan))
            assert results_of(pool, receiving, "weight_sync")[0].checksums == sent
            assert logprob_error(folder, requests, generate(pool, requests)) < 1e-4
        ray.kill(source)
