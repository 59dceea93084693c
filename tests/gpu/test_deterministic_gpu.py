"""`rollout.engine.deterministic: true` on a GPU: tokens of a dense model that depend on nothing else in the batch."""

import random

import pytest
import torch
from rollout_models import save_dense
from rollout_requests import answers, generate, mixed_requests

from rlpipe.config.root import Config
from rlpipe.training.placement import engine_placement
from rlpipe.training.ray_cluster import ray_cluster
from rollout.pool import RolloutPool

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: CPU engines have tests of their own"
)


@pytest.mark.timeout(900)
def test_tokens_depend_on_neither_the_batch_nor_the_order_nor_the_cache(tmp_path):
    folder = save_dense(tmp_path / "policy", seed=0)
    config = _config()
    requests = mixed_requests()
    shuffled = random.Random(1).sample(requests, len(requests))
    with (
        ray_cluster(config),
        engine_placement(config) as placement,
        RolloutPool.start(config, folder, placement, log_directory=str(tmp_path)) as pool,
    ):
        pool.wait_until_ready()
        together = generate(pool, requests)
        again = generate(pool, shuffled)  # in another order, with prefixes in the cache
        pool.sleep(("kv_cache",))
        pool.wake(("kv_cache",))
        alone = [one for request in requests[:6] for one in generate(pool, [request])]
    assert sum(one.cached_tokens for one in again) > 0
    assert answers(again) == answers(together)
    assert answers(alone).items() <= answers(together).items()


def _config() -> Config:
    return Config.model_validate(
        {
            "run": {"name": "deterministic", "iterations": 1},
            "model": {"path": "unused"},
            "data": {"train": [{"name": "none", "path": "unused"}], "max_prompt_tokens": 48},
            "ray": {"colocate": True, "sleep": "always"},
            "rollout": {
                "max_response_tokens": 48,
                "engine": {
                    "dtype": "bfloat16",
                    "deterministic": True,
                    "max_running_requests": 16,
                    "memory_fraction": 0.3,
                    "kv_cache_tokens": 8192,
                },
            },
        }
    )
