"""Real SGLang engines on this machine: answers, log-probabilities, repeatability, weights, limits."""

import random
import re
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
import torch
from rollout_models import reference_logprobs, save_dense, state
from rollout_requests import answers, generate, make_requests, mixed_requests, results_of
from rollout_weight_source import WeightSource, plan_of

from rlpipe.shared.errors import DeadlineError, RolloutError
from rlpipe.shared.number_arrays import Logprobs, TokenIds
from rlpipe.shared.sample import Status
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, SamplingParameters


def logprob_error(folder, requests, generations) -> float:
    differences = []
    for request, generation in zip(requests, generations, strict=True):
        temperature = request.sampling.temperature or 1.0
        expected = reference_logprobs(folder, request.prompt_ids, generation.token_ids, temperature)
        differences.append((expected - torch.tensor(generation.logprobs)).abs().max().item())
    return max(differences)


def test_answers_come_in_order_with_one_logprob_per_token_and_are_seen_as_they_finish(dense_pool):
    requests = make_requests(6)
    seen = []
    generations = generate(dense_pool, requests, on_finished=seen.append)
    assert [one.request_id for one in generations] == [one.request_id for one in requests]
    assert {one.request_id for one in seen} == {one.request_id for one in requests}
    assert all(len(one.logprobs) == len(one.token_ids) == 24 for one in generations)
    assert all(one.status is Status.TRUNCATED and one.retractions == 0 for one in generations)


def test_schedulers_have_imported_beside_their_engine_and_have_their_name(dense_pool):
    for pid, engine in zip(dense_pool.worker_pids(), dense_pool.serving(), strict=True):
        assert len([child for child in psutil.Process(pid).children() if "scheduler" in child.name()]) == 1
        log = Path(engine.setup.log_path).read_text()
        assert len(re.findall(r"a scheduler to be imported for \d+\.\d s, then waited \d+\.\d s\n", log)) == 1
        assert "becomes a scheduler" not in log


def test_engines_decode_what_they_wrote_as_the_driver_would(dense_pool, dense_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(dense_folder)
    for one in generate(dense_pool, make_requests(4)):
        assert one.text == tokenizer.decode(list(one.token_ids), skip_special_tokens=True)
        assert isinstance(one.token_ids, TokenIds) and isinstance(one.logprobs, Logprobs)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.5}, {"temperature": 0.5, "top_p": 0.5}, {"temperature": 0.0}]
)
def test_logprobs_are_those_of_softmax_of_logits_over_temperature_before_filtering(dense_pool, dense_folder, sampling):
    requests = make_requests(4, **sampling)
    generations = generate(dense_pool, requests)
    assert logprob_error(dense_folder, requests, generations) < 1e-4


def test_greedy_takes_the_most_likely_token(dense_pool, dense_folder):
    from transformers import AutoModelForCausalLM

    (request,) = make_requests(1, new_tokens=8, temperature=0.0)
    (generation,) = generate(dense_pool, [request])
    model = AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.float32).eval()
    expected = model.generate(
        torch.tensor([request.prompt_ids]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generation.token_ids == tuple(expected[0, len(request.prompt_ids) :].tolist())


def test_answers_do_not_depend_on_order_company_or_engine(dense_pool):
    requests = mixed_requests()
    expected = answers(generate(dense_pool, requests))
    shuffled = random.Random(1).sample(requests, len(requests))
    again = {}
    for part in (shuffled[:1], shuffled[1:3], shuffled[3:]):
        again |= answers(generate(dense_pool, part))
    assert again == expected


def test_seeds_alone_distinguish_samples_of_one_prompt(dense_pool):
    (request,) = make_requests(1)
    copies = [GenerateRequest(f"copy{seed}", request.prompt_ids, request.sampling, seed) for seed in (1, 1, 2, 3)]
    renamed = [GenerateRequest(f"c{index}", one.prompt_ids, one.sampling, one.seed) for index, one in enumerate(copies)]
    tokens = [one.token_ids for one in generate(dense_pool, renamed)]
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 3


def test_a_stop_token_ends_a_response_and_belongs_to_it(dense_pool):
    (request,) = make_requests(1)
    (whole,) = generate(dense_pool, [request])
    stop = whole.token_ids[5]
    stopping = SamplingParameters(24, stop_token_ids=(stop,), ignore_eos=False)
    (stopped,) = generate(dense_pool, [GenerateRequest("stopping", request.prompt_ids, stopping, request.seed)])
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert stopped.status is Status.COMPLETED


def test_requests_are_spread_over_engines_and_work_is_counted(dense_pool):
    while any(one.busy_seconds for one in dense_pool.take_usage()):  # other tests leave requests behind that go on
        time.sleep(0.1)
    requests = make_requests(8)
    generations = generate(dense_pool, requests)
    usage = dense_pool.take_usage()
    assert sum(one.prompt_tokens for one in usage) == sum(len(one.prompt_ids) for one in requests)
    assert [one.requests for one in usage] == [4, 4]
    for engine in usage:
        assert engine.response_tokens == sum(len(one.token_ids) for one in generations if one.engine == engine.engine)
        assert engine.busy_seconds > 0
    assert [one.requests for one in dense_pool.take_usage()] == [0, 0]


def test_more_requests_than_fit_at_a_time_are_all_answered(dense_pool):
    requests = make_requests(60, new_tokens=2)
    assert len(answers(generate(dense_pool, requests))) == 60


def test_new_weights_reach_all_engines_with_their_version_and_equal_checksums(dense_pool, dense_folder, tmp_path):
    other = save_dense(tmp_path, seed=1)
    tensors = state(other)
    plan = plan_of(tensors, buckets=3)
    source = WeightSource.remote()
    group = ray.get(source.open.remote(2))
    joined = source.join.remote(group)
    results_of(dense_pool, dense_pool.weights.join([group], dense_pool.up()), "joining")
    ray.get(joined)
    for version, folder in ((1, other), (2, dense_folder)):
        receiving = dense_pool.weights.start_receiving(plan, version)
        sent = ray.get(source.send.remote(state(folder), plan))
        receipts = results_of(dense_pool, receiving, "weight_sync")
        assert [one.checksums for one in receipts] == [sent, sent]
        requests = make_requests(4)
        generations = generate(dense_pool, requests)
        assert logprob_error(folder, requests, generations) < 1e-4
        assert {span.version for one in generations for span in one.versions} == {version}
        assert [one.version for one in receipts] == [version, version]
    dense_pool.weights.leave()
    ray.kill(source)


def test_a_sleeping_engine_refuses_what_it_cannot_do_and_wakes_as_it_was(dense_pool):
    requests = make_requests(4)
    before = answers(generate(dense_pool, requests))
    dense_pool.sleep(("kv_cache",))
    dense_pool.sleep(("kv_cache", "weights"))
    with pytest.raises(RolloutError, match=r"engine \d has given the device memory of its weights back, so generating"):
        generate(dense_pool, requests)
    dense_pool.wake(("weights",))
    with pytest.raises(RolloutError, match=r"its kv_cache back.*call RolloutPool.wake\(\('kv_cache',\)\) first"):
        generate(dense_pool, requests)
    dense_pool.wake(("kv_cache",))
    assert answers(generate(dense_pool, requests)) == before


def test_a_request_longer_than_the_context_is_refused_before_anything_runs(dense_pool):
    long = GenerateRequest("long", (1,) * 500, SamplingParameters(24), 0)
    with pytest.raises(RolloutError, match=r"'long': 500 prompt tokens and up to 24 response tokens exceed the 510"):
        generate(dense_pool, [*make_requests(2), long])
    assert len(generate(dense_pool, make_requests(2))) == 2


def test_a_request_that_is_not_answered_yet_cannot_be_made_again(dense_pool):
    with pytest.raises(RolloutError, match="'r0' is not answered yet and cannot be made again"):
        generate(dense_pool, make_requests(1) * 2)


def test_a_passed_deadline_names_the_engine_and_shows_its_stack(dense_pool):
    with pytest.raises(DeadlineError, match=r"rollout: no answer from engine \d.*(?s:.*)Stacks"):
        generate(dense_pool, make_requests(8, new_tokens=400), deadline_seconds=0.05)


@pytest.mark.slow
def test_a_prompt_cut_in_two_leaves_no_request_behind(ray_session, dense_folder, config_of, tmp_path):
    """SGLang counts the request in the middle of its prompt twice; all eight must run together nevertheless."""
    sglang = {"chunked_prefill_size": 64, "log_level": "info", "decode_log_interval": 1}
    config = config_of(max_running_requests=8, sglang=sglang)
    prompt, sampling = tuple(range(1, 41)), SamplingParameters(40, ignore_eos=True)
    with RolloutPool.start(config, dense_folder, log_directory=str(tmp_path)) as pool:
        pool.wait_until_ready()
        requests = [GenerateRequest(str(index), prompt, sampling, index) for index in range(8)]
        assert len(answers(generate(pool, requests))) == 8
        decoding = re.findall(r"Decode batch, #running-req: (\d+)", (tmp_path / "rollout_engine_0.log").read_text())
    assert set(decoding) == {"8"}


@pytest.mark.slow
def test_slots_that_become_free_are_filled_several_at_a_time(ray_session, dense_folder, config_of, tmp_path):
    config = config_of(max_running_requests=64, sglang={"log_level": "info"})
    requests = [
        replace(request, sampling=replace(request.sampling, max_new_tokens=10 + 7 * index % 150))
        for index, request in enumerate(make_requests(192))
    ]
    with RolloutPool.start(config, dense_folder, log_directory=str(tmp_path)) as pool:
        pool.wait_until_ready()
        assert [len(one.token_ids) for one in generate(pool, requests)] == [
            request.sampling.max_new_tokens for request in requests
        ]
        log = (tmp_path / "rollout_engine_0.log").read_text()
    taken_up = [int(count) for count in re.findall(r"Prefill batch, #new-seq: (\d+)", log)]
    assert sum(taken_up) == len(requests)
    assert len(taken_up) <= len(requests) / 3, taken_up
