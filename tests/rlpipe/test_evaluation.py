"""Evaluation: what is asked of the engines and when, and the scores of what they answer."""

import itertools
from dataclasses import replace

import pytest

from rlpipe.shared.sample import Prompt, Reward, Sample, Status, VersionSpan
from rlpipe.training.evaluation import Evaluation, pass_at_k, score
from rollout.requests import SamplingParameters
from tests.small_config import small_config

_SAMPLING = {"temperature": 0.7, "top_p": 0.6, "top_k": 5, "stop": ["a"], "stop_token_ids": [3]}
_OTHERS = {"max_response_tokens": 9, "temperature": 0.5, "top_p": 0.4, "top_k": 7, "stop": ["c"], "stop_token_ids": [4]}


class _Engines:
    """Answers every request rightly, and notes it."""

    def __init__(self):
        self.asked = []

    def run(self, requests):
        self.asked += requests
        return [_sample(request.group_id, 0, True) for request in requests]

    def take_grading_failures(self):
        return 2


def _config(evaluation, rollout=None, dataset=None, iterations=7):
    return small_config(
        run={"name": "r", "iterations": iterations},
        rollout=rollout or {},
        eval={"datasets": [{"name": "e", "path": "e.jsonl", **(dataset or {})}], **evaluation},
    )


def _evaluated_after(*iterations, **evaluation):
    """Of `iterations`, those after which the set was evaluated."""
    return [number for number in iterations if _asked(_config(evaluation), number)]


def _asked(config, iteration=0):
    engines = _Engines()
    prompts = {"e": [Prompt(name, name, (1,), "l", "e") for name in "ab"]}
    metrics = Evaluation(config, prompts).run(iteration, engines)
    if engines.asked:
        assert (metrics["eval/e/accuracy"], metrics["eval/e/grading_failures_count"]) == (1, 2)
    assert bool(metrics) == bool(engines.asked) == ("eval/e/accuracy" in metrics)
    return engines.asked


def _sample(group, index, correct):
    return Sample(
        sample_id=f"{group}-{index}",
        group_id=group,
        prompt=Prompt("p", "p", (1,), "l", "d"),
        response_ids=(1, 2),
        response_text="",
        rollout_logprobs=(0.0, 0.0),
        loss_mask=(1, 1),
        versions=(VersionSpan(0, 2),),
        status=Status.COMPLETED,
        engine=0,
        reward=Reward(float(correct), correct, ""),
    )


def test_a_set_is_evaluated_before_the_first_iteration_every_few_and_after_the_last():
    assert _evaluated_after(0, 1, 2, 3, 4, 5, 6, 7, interval_iterations=3) == [0, 3, 6, 7]
    assert _evaluated_after(0, 1, 6, 7, interval_iterations=0) == [0, 7]
    assert _evaluated_after(0, 3, 7, interval_iterations=3, before_training=False) == [3, 7]


def test_a_set_has_a_cadence_and_a_number_of_answers_of_its_own():
    config = _config({"interval_iterations": 2, "samples_per_prompt": 2, "temperature": 1.0})
    assert [request.sample_id for request in _asked(config, 2)] == [
        f"eval-e-000002-0000{prompt}-00{answer}" for prompt in (0, 1) for answer in (0, 1)
    ]
    own = _config(
        {"interval_iterations": 2, "samples_per_prompt": 2, "temperature": 1.0},
        dataset={"interval_iterations": 3, "samples_per_prompt": 3},
    )
    assert [len(_asked(own, iteration)) for iteration in (2, 3)] == [0, 6]
    assert all(request.urgent for request in _asked(own, 3))


def test_answers_are_sampled_as_the_evaluation_says_and_end_as_in_training():
    rollout = {"max_response_tokens": 20, "sampling": _SAMPLING}
    greedy = SamplingParameters(20, 0.0, 1.0, -1, ("a",), (3,))
    assert {request.sampling for request in _asked(_config({}, rollout))} == {greedy}
    own = {"temperature": 0.3, "top_p": 0.2, "max_response_tokens": 11}
    sampled = SamplingParameters(11, 0.3, 0.2, -1, ("a",), (3,))
    assert {request.sampling for request in _asked(_config(own, rollout))} == {sampled}
    of_the_set = SamplingParameters(9, 0.5, 0.4, 7, ("c",), (4,))
    config = _config(own, rollout, {"sampling": _OTHERS})
    assert {request.sampling for request in _asked(config)} == {of_the_set}


def test_training_responses_are_sampled_as_the_rollout_says_and_those_of_a_set_as_it_says():
    config = _config({}, {"max_response_tokens": 20, "sampling": _SAMPLING})
    asked = SamplingParameters.training(config.rollout)
    assert asked == SamplingParameters(20, 0.7, 0.6, 5, ("a",), (3,))
    other = _config({}, dataset={"sampling": _OTHERS}).eval.datasets[0].sampling
    asked = SamplingParameters.training(config.rollout, other)
    assert asked == SamplingParameters(9, 0.5, 0.4, 7, ("c",), (4,))


def test_training_responses_alone_can_be_forced_to_their_limit():
    config = _config({}, {"sampling": {"ignore_eos": True}})
    assert SamplingParameters.training(config.rollout).ignore_eos
    assert not any(request.sampling.ignore_eos for request in _asked(config))


def test_pass_at_k_equals_the_share_of_subsets_with_a_correct_answer():
    answers = [True, False, False, True, False]
    for k in (1, 2, 3, 4, 5):
        subsets = list(itertools.combinations(answers, k))
        assert pass_at_k(5, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_scores_of_an_evaluation():
    samples = [_sample("a", i, i == 0) for i in range(4)] + [_sample("b", i, False) for i in range(4)]
    metrics = score(samples)
    assert (metrics["accuracy"], metrics["reward_mean"], metrics["response_tokens_mean"]) == (1 / 8, 1 / 8, 2)
    assert metrics["pass_at_2"] == pytest.approx(0.25)
    assert metrics["pass_at_4"] == pytest.approx(0.5)


def test_an_answer_without_a_reward_is_a_wrong_one():
    samples = [_sample("a", 0, True), replace(_sample("b", 0, True), reward=None)]
    assert score(samples)["accuracy"] == score(samples)["reward_mean"] == 0.5


def test_a_grader_of_numbers_alone_has_no_accuracy():
    samples = [
        replace(_sample("a", 0, True), reward=Reward(0.25, None, "")),
        replace(_sample("a", 1, True), reward=Reward(0.75, None, "")),
    ]
    metrics = score(samples)
    assert metrics["reward_mean"] == 0.5
    assert not any(name.startswith(("accuracy", "pass_at")) for name in metrics)
