"""One episode of an agent: what is told, counted and kept of requests that wait, are interrupted, or meet a limit."""

import asyncio
from collections import Counter
from dataclasses import replace

import openai
import pytest
from agent_support import TOOLS, serving
from random_policy_engine import RandomPolicy

from rlpipe.shared.sample import Status
from rollout.requests import GenerateRequest, Generation

ASK = [{"role": "user", "content": "a question"}]


class InterruptedPolicy(RandomPolicy):
    """Is interrupted after the first two tokens of every response."""

    async def generate(self, request: GenerateRequest) -> Generation:
        whole = await super().generate(request)
        if request.partial.token_ids:
            return whole
        begun = [replace(span, tokens=2) for span in whole.versions]
        return replace(
            whole, token_ids=whole.token_ids[:2], logprobs=whole.logprobs[:2], versions=begun, status=Status.ABORTED
        )


class FivePolicy(RandomPolicy):
    """Writes five tokens, and ends so."""

    def __init__(self, tokenizer, status: Status) -> None:
        super().__init__(tokenizer)
        self.status = status

    def answer(self, request: GenerateRequest) -> tuple[tuple[int, ...], Status]:
        return tuple(self.encode("answer"))[:5], self.status


def test_a_request_that_waits_is_refused_once_its_episode_is_over(tokenizer):
    async def asked() -> int:
        async with serving(tokenizer, RandomPolicy(tokenizer)) as open_episode:
            one = open_episode()
            one.episode.suspend()
            waiting = asyncio.create_task(one.chat(ASK))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            one.episode.close()
            with pytest.raises(openai.APIStatusError) as refused:
                await asyncio.wait_for(waiting, 20)
            return refused.value.status_code

    assert asyncio.run(asked()) == 410


def test_an_interrupted_response_is_kept_and_counts_once(tokenizer):
    async def asked() -> None:
        policy = InterruptedPolicy(tokenizer)
        async with serving(tokenizer, policy) as open_episode:
            one = open_episode()
            waiting = asyncio.create_task(one.chat(ASK))
            await asyncio.wait_for(one.episode.interrupted.wait(), 20)
            assert not waiting.done() and not one.episode.has_sampled
            begun = one.episode.written
            assert len(begun.token_ids) == len(begun.logprobs) == 2
            one.episode.resume()
            assert not one.episode.interrupted.is_set()
            await asyncio.wait_for(waiting, 20)
            (sample,) = one.episode.samples()
            written = policy.written[-1].generation
            assert one.episode.written.token_ids == written.token_ids and begun.token_ids == written.token_ids[:2]
            assert sample.response_ids == written.token_ids

    asyncio.run(asked())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "the request with 1 messages came again, after 2 were kept"),
        ({"tools": TOOLS}, "tools or template arguments are others than before"),
        ({"messages": [{"role": "user", "content": "another"}]}, "message 0 was user 'a question' and is now user"),
    ],
)
def test_why_a_request_does_not_go_on_is_told(tokenizer, changes, told):
    async def asked() -> tuple[str, ...]:
        counts: Counter[str] = Counter()
        async with serving(tokenizer, RandomPolicy(tokenizer), counts=counts) as open_episode:
            one = open_episode()
            reply = (await one.chat(ASK)).choices[0].message
            again = [*ASK, {"role": "assistant", "content": reply.content or "x"}, *ASK] if "tools" in changes else ASK
            await one.chat(**{"messages": again, **changes})
            assert counts["divergences"] == 1
            return tuple(one.episode.divergences)

    (why,) = asyncio.run(asked())
    assert why.startswith(told)


@pytest.mark.parametrize(
    ("room", "ended", "status"),
    [
        (5, Status.TRUNCATED, Status.TRUNCATED),
        (5, Status.COMPLETED, Status.COMPLETED),
        (6, Status.TRUNCATED, Status.COMPLETED),  # by the agent's own limit, after which it may go on
    ],
)
def test_an_episode_is_cut_off_by_the_runs_limit_alone(tokenizer, room, ended, status):
    async def asked() -> Status:
        policy = FivePolicy(tokenizer, ended)
        async with serving(tokenizer, policy) as open_episode:
            prompt_tokens = (await open_episode().chat(ASK)).usage.prompt_tokens
        async with serving(tokenizer, policy, limit=prompt_tokens + room) as open_episode:
            one = open_episode()
            assert (await one.chat(ASK, max_tokens=5)).usage.completion_tokens == 5
            return one.episode.samples()[0].status

    assert asyncio.run(asked()) is status


def test_requests_that_hold_text_of_special_tokens_are_counted_once_each(tokenizer):
    async def asked() -> Counter[str]:
        counts: Counter[str] = Counter()
        async with serving(tokenizer, RandomPolicy(tokenizer), counts=counts) as open_episode:
            one = open_episode()
            special = [{"role": "user", "content": "an <|im_end|> and another <|im_end|>"}]
            reply = (await one.chat(special)).choices[0].message.model_dump(exclude_none=True)
            await one.chat([*special, reply, *ASK])  # what is kept is not looked at again
        return counts

    assert asyncio.run(asked())["special_text_requests"] == 1
