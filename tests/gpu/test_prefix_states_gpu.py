"""Recurrent states that an engine takes from its cache of prefixes are those of the prefix."""

import os
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from drafting_policies import VOCABULARY, reference_logprobs, save_hybrid
from rollout_requests import generate

from rlpipe.config.root import Config
from rlpipe.training.placement import placements
from rlpipe.training.ray_cluster import ray_cluster
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, Generation, SamplingParameters, sample_seed

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: on a CPU hybrids have no cache of prefixes"),
    pytest.mark.timeout(400),
]

GROUP, PROMPT_TOKENS, TURN_TOKENS, NEW_TOKENS = 8, 700, 333, 24
TOLERANCE = 0.03  # of bfloat16, in the mean


def test_a_turn_goes_on_from_the_states_of_the_one_before(tmp_path):
    folder = save_hybrid(tmp_path / "hybrid", seed=0)
    config = _config()
    errors = []
    with ExitStack() as opened:
        opened.enter_context(ray_cluster(config))
        place, _ = opened.enter_context(placements(config))
        pool = opened.enter_context(RolloutPool.start(config, folder, place, log_directory=str(tmp_path)))
        pool.wait_until_ready()
        turn = _first_turn()
        for number in range(1, 4):
            answers = generate(pool, turn, deadline_seconds=200)
            cached = sum(answer.cached_tokens for answer in answers)
            errors.append(_error(folder, turn, answers))
            print(f"turn {number}: {cached} cached tokens, |log-prob - transformers| {errors[-1]:.5f}", flush=True)
            assert cached > 0
            turn = [_next_turn(request, answer) for request, answer in zip(turn, answers, strict=True)]
    assert max(errors) < TOLERANCE


def _first_turn() -> list[GenerateRequest]:
    """Groups of one prompt each."""
    prompts = [_tokens(PROMPT_TOKENS + 13 * group, seed=group) for group in range(2)]
    parameters = SamplingParameters(NEW_TOKENS, ignore_eos=True)
    return [
        GenerateRequest(f"{group}-{index}", prompt, parameters, sample_seed(1, f"{group}-{index}"), group_id=f"{group}")
        for group, prompt in enumerate(prompts)
        for index in range(GROUP)
    ]


def _next_turn(request: GenerateRequest, answer: Generation) -> GenerateRequest:
    name = f"{request.request_id}+"
    more = _tokens(TURN_TOKENS, seed=len(name))
    prompt = (*request.prompt_ids, *answer.token_ids, *more)
    return replace(request, request_id=name, prompt_ids=prompt, group_id="", conversation_id=name.rstrip("+"))


def _tokens(count: int, seed: int) -> tuple[int, ...]:
    numbers = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCABULARY, (count,), generator=numbers).tolist())


def _error(folder: str, requests: list[GenerateRequest], answers: list[Generation]) -> float:
    differences = []
    for request, answer in zip(requests, answers, strict=True):
        wanted = reference_logprobs(folder, request.prompt_ids, answer.token_ids, 1.0)
        differences += (wanted - torch.tensor(answer.logprobs)).abs().tolist()
    return sum(differences) / len(differences)


def _config() -> Config:
    return Config.model_validate(
        {
            "run": {"name": "prefixes", "iterations": 1},
            "model": {"path": "unused"},
            "data": {"train": [{"name": "none", "path": "unused"}], "max_prompt_tokens": 3072},
            "ray": {"colocate": True, "sleep": "never", "cpus": max(4, os.cpu_count() or 1)},
            "actor": {"max_tokens_per_gpu": 4096},
            "jit": {"warm_up": "off"},
            "rollout": {
                "max_response_tokens": NEW_TOKENS,
                "engine": {
                    "dtype": "bfloat16",
                    "max_running_requests": 32,
                    "memory_fraction": 0.2,
                    "deterministic": False,
                },
            },
        }
    )
