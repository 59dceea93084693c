"""One pool of two engines for all tests that only ask questions."""

import pytest
from rollout_models import save_dense

from rlpipe.config.root import Config
from rollout.pool import RolloutPool


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("dense"), seed=0)


@pytest.fixture(scope="session")
def dense_pool(ray_session, dense_folder, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    with RolloutPool.start(make_config(engines=2), dense_folder, log_directory=str(logs), with_text=True) as pool:
        pool.wait_until_ready()
        yield pool


@pytest.fixture(scope="session")
def config_of():
    return make_config


def make_config(
    engines: int = 1,
    sampling: dict | None = None,
    algorithm: dict | None = None,
    jit: dict | None = None,
    **engine,
) -> Config:
    settings = {"dtype": "float32", "max_running_requests": 16} | engine
    return Config.model_validate(
        {
            "run": {"name": "rollout-tests", "iterations": 1},
            "model": {"path": "unused"},
            "data": {"train": [{"name": "none", "path": "unused"}], "max_prompt_tokens": 48},
            "rollout": {
                "engines": engines,
                "max_response_tokens": 48,
                "engine": settings,
                "sampling": sampling or {},
            },
            "algorithm": algorithm or {},
            "jit": jit or {},
            "weight_sync": {"verify": True},
        }
    )
