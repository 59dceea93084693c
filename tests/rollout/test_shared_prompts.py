"""The prompt of a group is computed once, before its samples, for each version of the weights."""

import asyncio

from rlpipe.estimate.engine_pools import LEAST_SHARED_TOKENS
from rollout.requests import GenerateRequest, SamplingParameters
from rollout.shared_prompts import SharedPrompts


def group(name: str, samples: int, prompt_tokens: int = 100) -> list[GenerateRequest]:
    prompt = tuple(range(prompt_tokens))
    return [GenerateRequest(f"{name}{i}", prompt, SamplingParameters(4), 0, group_id=name) for i in range(samples)]


def run_together(requests: list[GenerateRequest], versions: int = 1) -> tuple[list[int], list[int]]:
    """Lengths that were computed before, and tokens on behalf of each request, over all its interruptions."""
    computed: list[int] = []

    async def prefill(request: GenerateRequest) -> int:
        await asyncio.sleep(0)
        computed.append(len(request.prompt_ids) - 1)
        return computed[-1]

    async def one(prompts: SharedPrompts, request: GenerateRequest) -> int:
        with prompts.running(request):
            return sum([await prompts.ready(request, version) for version in range(versions)])

    async def all_of_them() -> list[int]:
        prompts = SharedPrompts(prefill)
        prompts.expect(requests)
        tokens = await asyncio.gather(*(one(prompts, request) for request in requests))
        prompts.expect(requests[:1])
        assert await one(prompts, requests[0]) == 0  # alone now, and nothing of the group is remembered
        return tokens

    tokens = asyncio.run(all_of_them())
    return computed, tokens


def test_a_group_computes_its_prompt_once_and_the_first_sample_accounts_for_it():
    assert run_together(group("a", 4)) == ([99], [99, 0, 0, 0])
    assert run_together([*group("a", 2), *group("b", 2)]) == ([99, 99], [99, 0, 99, 0])


def test_new_weights_compute_it_again():
    assert run_together(group("a", 3), versions=2) == ([99, 99], [198, 0, 0])


def test_single_requests_short_prompts_and_ungrouped_ones_are_left_alone():
    assert run_together(group("a", 1)) == ([], [0])
    assert run_together(group("a", 4, prompt_tokens=63)) == ([], [0] * 4)
    assert run_together(group("", 4)) == ([], [0] * 4)


def test_the_shortest_prompt_that_is_shared_is_as_long_as_is_said():
    assert run_together(group("a", 2, prompt_tokens=LEAST_SHARED_TOKENS)) == ([63], [63, 0])


def test_a_prompt_is_remembered_until_the_last_sample_of_its_group_has_ended_and_not_longer():
    """Until then it is in the cache for sure; later others may have taken its place."""
    computed: list[str] = []

    async def prefill(request: GenerateRequest) -> int:
        computed.append(request.group_id)
        return 99

    async def script() -> None:
        prompts = SharedPrompts(prefill)
        first, second = group("b", 2)
        prompts.expect([first, second])
        with prompts.running(first):
            await prompts.ready(first, 0)
            for _ in range(2):
                prompts.expect(group("a", 3))
                for version, request in enumerate(group("a", 3)):  # the last one is alone by then
                    with prompts.running(request):
                        await prompts.ready(request, version)
            with prompts.running(second):
                await prompts.ready(second, 0)

    asyncio.run(script())
    assert computed == ["b", *2 * ["a", "a"]]
