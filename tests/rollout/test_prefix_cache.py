"""What engines keep of prompts: used where it is there, never over new weights, and without a change of any bit."""

import asyncio
import random
import signal
from dataclasses import replace

import psutil
import pytest
import ray
from rollout_models import state
from rollout_requests import answers, converse, generate, make_requests, most_cached_tokens, results_of
from rollout_weight_source import WeightSource, plan_of
from test_rollout_restart import scheduler_processes

from rlpipe.config.fault import FaultConfig
from rlpipe.shared.sample import Status
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, SamplingParameters, sample_seed


def forget_all(pool: RolloutPool) -> None:
    """Empties the engines' caches."""
    pool.sleep(("kv_cache",))
    pool.wake(("kv_cache",))


def conversations_of(pool: RolloutPool, count: int, turns: int):
    client = pool.client()
    try:
        return asyncio.run(converse(client, count, turns)), client.take_routing()
    finally:
        client.close()


def as_tokens(said):
    return [[(one.token_ids, one.logprobs) for one in turns] for turns in said]


def test_turns_find_what_was_before_and_their_tokens_are_those_without_a_cache(dense_pool):
    forget_all(dense_pool)
    dense_pool.take_usage()
    said, routing = conversations_of(dense_pool, 12, 4)
    assert (routing.later_turns, routing.moved_turns) == (36, 0)
    assert {len({one.engine for one in turns}) for turns in said} == {1}
    assert sum(one.cached_tokens for turns in said for one in turns) == most_cached_tokens(said)
    usage = dense_pool.take_usage()
    assert sum(one.cached_tokens for one in usage) == most_cached_tokens(said)
    assert sum(one.prompt_tokens for one in usage) == sum(one.prompt_tokens for turns in said for one in turns)

    # Each turn again, alone with an empty cache: the whole prompt is computed then.
    numbers = random.Random(5)
    text = tuple(numbers.randrange(256) for _ in range(40))
    for turn in range(4):
        forget_all(dense_pool)
        sampling = SamplingParameters(16, ignore_eos=True)
        (alone,) = generate(dense_pool, [GenerateRequest("alone", text, sampling, sample_seed(3, "c5"))])
        assert alone.cached_tokens == 0
        assert (alone.token_ids, alone.logprobs) == (said[5][turn].token_ids, said[5][turn].logprobs)
        text += alone.token_ids + tuple(numbers.randrange(256) for _ in range(8))


@pytest.mark.parametrize(("prompt_tokens", "samples"), [(151, 6), (41, 8)])  # by a request of its own, and held back
def test_samples_of_a_group_compute_their_prompt_once(dense_pool, prompt_tokens, samples):
    forget_all(dense_pool)
    prompt = tuple(random.Random(1).randrange(256) for _ in range(prompt_tokens - 1))
    sampling = SamplingParameters(12, ignore_eos=True)
    groups = [
        GenerateRequest(f"{name}{index}", (ord(name), *prompt), sampling, index, group_id=name)
        for name in "ab"
        for index in range(samples)
    ]
    together = generate(dense_pool, groups)
    for name in "ab":
        of_group = [one for one in together if one.request_id.startswith(name)]
        assert len({one.engine for one in of_group}) == 1
        computed = sum(one.prompt_tokens - one.cached_tokens for one in of_group)
        assert computed == prompt_tokens + samples - 1  # and each its last token
    forget_all(dense_pool)
    alone = [generate(dense_pool, [replace(request, group_id="")])[0] for request in groups[::5]]
    assert answers(alone).items() <= answers(together).items()


def test_nothing_of_older_weights_is_used(dense_pool, dense_folder):
    requests = make_requests(6)
    generate(dense_pool, requests)
    again = generate(dense_pool, requests)
    assert sum(one.cached_tokens for one in again) > 0
    plan = plan_of(state(dense_folder), buckets=2)
    source = WeightSource.remote()
    group = ray.get(source.open.remote(2))
    joined = source.join.remote(group)
    results_of(dense_pool, dense_pool.weights.join([group], dense_pool.up()), "joining")
    ray.get(joined)
    receiving = dense_pool.weights.start_receiving(plan, 3)
    source.send.remote(state(dense_folder), plan)
    results_of(dense_pool, receiving, "weight_sync")
    updated = generate(dense_pool, requests)
    dense_pool.weights.leave()
    ray.kill(source)
    assert [one.cached_tokens for one in updated] == [0] * 6
    assert answers(updated) == answers(again)


@pytest.mark.slow
def test_conversations_of_a_lost_engine_go_on_elsewhere_with_the_same_tokens(
    ray_session, dense_folder, dense_pool, config_of, tmp_path
):
    forget_all(dense_pool)
    wanted, _ = conversations_of(dense_pool, 12, 6)
    config = config_of(engines=2).model_copy(update={"fault": FaultConfig(engine_restarts=1)})
    faults = []
    with RolloutPool.start(config, dense_folder, log_directory=str(tmp_path), on_fault=faults.append) as pool:
        pool.wait_until_ready()
        client = pool.client()

        async def converse_while_one_is_lost():
            talking = asyncio.ensure_future(converse(client, 12, 6))
            while client.take_routing().later_turns < 6:
                await asyncio.sleep(0.01)
            (scheduler,) = scheduler_processes(psutil.Process(pool.worker_pids()[0]))
            scheduler.send_signal(signal.SIGKILL)
            return await talking

        said = asyncio.run(converse_while_one_is_lost())
        client.close()
        assert pool.take_fault_counts()["requests_reissued"] > 0
    assert as_tokens(said) == as_tokens(wanted)
    assert all(one.status is Status.TRUNCATED for turns in said for one in turns)
    assert {turns[-1].engine for turns in said} >= {1}
