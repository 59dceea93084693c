"""A policy that loses what it could is told of on the console, one that learns is not."""

import json
import math
from pathlib import Path

import pytest

from rlpipe.config.load import load_config
from rlpipe.training.reward_watch import RewardWatch

GATES = Path(__file__).resolve().parents[2] / "benchmarks/results/gates.jsonl"
COLLAPSE = (0.690, 0.102, 0.079, 0.015, 0.014, 0.0)  # of a policy of 40 layers, 64 prompts an iteration


def _warnings(rewards, prompts=64):
    watch = RewardWatch(load_config("configs/demo/arithmetic.yaml", [f"rollout.prompts_per_iteration={prompts}"]))
    found = {}
    for iteration, mean in enumerate(rewards, 1):
        metrics = {"rollout/reward_mean": mean, "rollout/reward_std": math.sqrt(mean * (1 - mean))}
        found[iteration] = watch.warnings(iteration, metrics)
    return {iteration: warnings[0] for iteration, warnings in found.items() if warnings}


def test_a_policy_that_falls_apart_is_told_once():
    (told,) = _warnings(COLLAPSE).items()
    assert told[0] == 2
    assert "fell from 0.690 in iteration 1 to 0.102" in told[1]
    assert "actor.optimizer.learning_rate" in told[1]


def test_a_second_fall_is_told_again():
    assert list(_warnings((0.9, 0.5, 0.55, 0.5, 0.05))) == [2, 5]


@pytest.mark.parametrize("rewards", [(0.5, 0.45, 0.4, 0.42), (0.02, 0.0, 0.01), (0.0, 0.0), (1.0, 1.0, 0.9)])
def test_what_chance_explains_or_nobody_minds_is_not_told(rewards):
    assert not _warnings(rewards)


def test_few_prompts_prove_less():
    assert _warnings((0.7, 0.4), prompts=256)
    assert not _warnings((0.7, 0.4), prompts=16)


def test_no_recorded_run_that_learned_would_have_been_warned():
    curves = [json.loads(line) for line in GATES.read_text().splitlines()]
    correct = [curve for curve in curves if curve["rewards"] and max(curve["rewards"]) <= 1]  # the mean tells the rest
    assert len({curve["gate"] for curve in correct}) > 10
    assert not [curve["gate"] for curve in correct if _warnings(curve["rewards"])]
