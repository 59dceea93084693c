"""Requests of different lengths and sampling parameters."""

import random

from rollout.requests import GenerateRequest, SamplingParameters, sample_seed


def make_requests(count: int, new_tokens: int = 24, **sampling) -> list[GenerateRequest]:
    numbers = random.Random(0)
    parameters = SamplingParameters(new_tokens, ignore_eos=True, **sampling)
    return [
        GenerateRequest(
            f"r{index}",
            tuple(numbers.randrange(256) for _ in range(numbers.randint(5, 40))),
            parameters,
            sample_seed(7, f"r{index}"),
        )
        for index in range(count)
    ]


def mixed_requests() -> list[GenerateRequest]:
    """Plain, tempered, filtered and greedy ones in one list."""
    kinds = [{}, {"temperature": 0.7}, {"top_p": 0.8, "top_k": 20}, {"temperature": 0.0}]
    plain = make_requests(20)
    return [
        GenerateRequest(
            request.request_id,
            request.prompt_ids,
            SamplingParameters(24, ignore_eos=True, **kinds[index % len(kinds)]),
            request.seed,
        )
        for index, request in enumerate(plain)
    ]


def answers(generations) -> dict[str, tuple]:
    return {one.request_id: (one.token_ids, one.logprobs) for one in generations}
