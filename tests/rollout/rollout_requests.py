"""Requests of different lengths and sampling parameters."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from rlpipe.shared.errors import RlpipeError
from rollout.client import EngineClient
from rollout.engine_calls import EngineCalls
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, Generation, SamplingParameters, sample_seed

DEADLINE = 300


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


def results_of(pool: RolloutPool, calls: EngineCalls, phase: str) -> list[Any]:
    """One for each engine; the first error of one is raised."""
    results = pool.collect(calls, DEADLINE, phase)
    for engine in calls.engines:
        error = results.get(engine, engine.failure)
        if isinstance(error, RlpipeError):
            raise error
    return [results[engine] for engine in calls.engines]


def generate(
    pool: RolloutPool,
    requests: Sequence[GenerateRequest],
    deadline_seconds: float = DEADLINE,
    on_finished: Callable[[Generation], None] = lambda _: None,
) -> list[Generation]:
    """Answers in the order of `requests`; `on_finished` sees each as soon as it is there."""
    client = pool.client()

    async def answer(request: GenerateRequest) -> Generation:
        generation = await client.generate(request)
        on_finished(generation)
        return generation

    async def all_answers() -> list[Generation]:
        return await asyncio.wait_for(asyncio.gather(*map(answer, requests)), deadline_seconds)

    try:
        return asyncio.run(all_answers())
    except TimeoutError:
        raise pool.late(client, deadline_seconds) from None
    finally:
        client.close()


async def converse(
    client: EngineClient, conversations: int, turns: int, new_tokens: int = 16, tool_tokens: int = 8, prompt: int = 40
) -> list[list[Generation]]:
    """Answers of each turn of each conversation. A turn's prompt is all that was before, and what a tool says."""

    async def one(index: int) -> list[Generation]:
        numbers = random.Random(index)
        text = tuple(numbers.randrange(256) for _ in range(prompt))
        said = []
        for turn in range(turns):
            request = GenerateRequest(
                f"c{index}.{turn}",
                text,
                SamplingParameters(new_tokens, ignore_eos=True),
                sample_seed(3, f"c{index}"),
                conversation_id=f"c{index}",
            )
            said.append(await client.generate(request))
            text += said[-1].token_ids + tuple(numbers.randrange(256) for _ in range(tool_tokens))
        return said

    return await asyncio.gather(*map(one, range(conversations)))


def most_cached_tokens(said: list[list[Generation]]) -> int:
    """What the cache of one engine that forgets nothing has of all prompts: all but the last token of what was before,
    which is never computed."""
    return sum(before.prompt_tokens + len(before.token_ids) - 1 for turns in said for before in turns[:-1])
