"""Interrupted responses: aborted and continued, or kept over a weight update."""

import asyncio
from dataclasses import replace

import pytest
import ray
import torch
from rollout_models import save_dense, state
from rollout_requests import DEADLINE, generate, make_requests, results_of
from rollout_weight_source import WeightSource, plan_of
from test_rollout_engine import logprob_error

from rlpipe.shared.sample import Status, VersionSpan
from rollout.partial_response import PartialResponse, first_tokens, interrupted, merged_spans
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, SamplingParameters


def test_neighbouring_spans_of_one_version_are_one():
    spans = (VersionSpan(1, 2), VersionSpan(1, 3), VersionSpan(2, 0), VersionSpan(3, 1))
    assert merged_spans(spans) == (VersionSpan(1, 5), VersionSpan(3, 1))
    assert first_tokens(merged_spans(spans), 4) == (VersionSpan(1, 4),)


def test_what_was_begun_grows_and_shrinks_with_its_versions():
    partial = PartialResponse().extended((5, 6), (-1.0, -2.0), 1).extended((7,), (-3.0,), 2)
    assert partial.versions == (VersionSpan(1, 2), VersionSpan(2, 1))
    assert partial.shortened(2) == PartialResponse((5,), (-1.0,), (VersionSpan(1, 1),))
    assert partial.shortened(9) == PartialResponse()
    routes = torch.arange(4 + 3)  # of the prompt, too
    assert replace(partial, routes=routes).shortened(2).routes.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("end_ids", "stop", "limit", "status", "tokens"),
    [
        ((7,), (), 9, Status.COMPLETED, 3),
        ((), (), 3, Status.TRUNCATED, 3),
        ((), (), 9, Status.ABORTED, 3),
        ((), ("ab", "c"), 9, Status.ABORTED, 1),
    ],
)
def test_an_abort_does_not_hide_how_a_response_ended(end_ids, stop, limit, status, tokens):
    partial = PartialResponse((5, 6, 7), (-1.0,) * 3, (VersionSpan(1, 3),))
    kept, found = interrupted(partial, end_ids, stop, limit)
    assert (found, len(kept.token_ids)) == (status, tokens)


def test_aborted_responses_go_on_with_the_tokens_of_uninterrupted_ones(dense_pool):
    new_tokens = 320  # so many that none can be whole before an abort that a busy machine delays
    requests = make_requests(24, new_tokens=new_tokens)
    whole = generate(dense_pool, requests)
    short = GenerateRequest("short", requests[0].prompt_ids, SamplingParameters(8, ignore_eos=True), 0)

    async def abort_and_go_on():
        client = dense_pool.client()
        asked = [asyncio.ensure_future(client.generate(request)) for request in requests]
        # Then the engines have partial the others, and have not finished them.
        await client.generate(short)
        await client.abort()
        parts = await asyncio.gather(*asked)
        assert client.busy_engines() == []
        continued = [
            GenerateRequest(one.request_id, one.prompt_ids, one.sampling, one.seed, part.partial)
            for one, part in zip(requests, parts, strict=True)
        ]
        return parts, await asyncio.gather(*map(client.generate, continued))

    parts, ended = asyncio.run(abort_and_go_on())
    assert any(part.status is Status.ABORTED and part.token_ids for part in parts)
    assert [one.token_ids for one in ended] == [one.token_ids for one in whole]
    assert [one.status for one in ended] == [one.status for one in whole]
    assert all(len(one.logprobs) == sum(span.tokens for span in one.versions) == new_tokens for one in ended)


def test_a_whole_response_is_answered_as_it_is(dense_pool):
    """Also beside others that are not: SGLang gives the log-probability of a token to a request for none."""
    requests = make_requests(12, new_tokens=6)
    whole = generate(dense_pool, requests)
    again = [
        replace(request, partial=one.partial if index % 2 else PartialResponse())
        for index, (request, one) in enumerate(zip(requests, whole, strict=True))
    ]
    for one, other in zip(whole, generate(dense_pool, again), strict=True):
        assert (other.partial, other.status) == (one.partial, Status.TRUNCATED)


def running_requests(pool: RolloutPool) -> int:
    """As many as SGLang has now."""
    pulses = ray.get([engine.actor.probe.remote() for engine in pool.serving()], timeout=DEADLINE)
    return sum(len(pulse.running) for pulse in pulses)


def test_weights_can_change_while_responses_are_generated(dense_pool, dense_folder, tmp_path):
    other = save_dense(tmp_path, seed=1)
    plan = plan_of(state(other), buckets=2)
    source = WeightSource.remote()
    group = ray.get(source.open.remote(2))
    joined = source.join.remote(group)
    results_of(dense_pool, dense_pool.weights.join([group], dense_pool.up()), "joining")
    ray.get(joined)
    requests = make_requests(16, new_tokens=400)

    async def update_meanwhile():
        client = dense_pool.client()
        asked = [asyncio.ensure_future(client.generate(request)) for request in requests]
        while running_requests(dense_pool) < len(requests):
            await asyncio.sleep(0.05)
        receiving = dense_pool.weights.start_receiving(plan, 7, in_flight=True)
        source.send.remote(state(other), plan)
        receipts = await asyncio.to_thread(results_of, dense_pool, receiving, "weight_sync")
        assert not any(one.done() for one in asked)
        return receipts, await asyncio.gather(*asked)

    receipts, generations = asyncio.run(update_meanwhile())
    assert [one.version for one in receipts] == [7, 7]
    assert all(len(one.token_ids) == 400 for one in generations)
    assert all(one.versions[-1].version == 7 for one in generations)
    mixed = [one for one in generations if len(one.versions) == 2]
    assert mixed
    # The tokens after the change are those of the new weights, with the old tokens read again by them.
    for request, one in zip(requests, generations, strict=True):
        if len(one.versions) == 2:
            old = one.versions[0].tokens
            rest = GenerateRequest(one.request_id, request.prompt_ids + one.token_ids[:old], request.sampling, 0)
            tail = type(one)(one.request_id, one.token_ids[old:], one.logprobs[old:], one.status, (), 0, 0.0, 0)
            assert logprob_error(other, [rest], [tail]) < 1e-4
    receiving = dense_pool.weights.start_receiving(plan, 8)
    source.send.remote(state(dense_folder), plan)
    results_of(dense_pool, receiving, "weight_sync")
    dense_pool.weights.leave()
    ray.kill(source)
