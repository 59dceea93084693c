"""Settings of `algorithm` that cannot work together are refused in one sentence that names the way out."""

import pytest
from pydantic import ValidationError

from actor.losses.loss_registry import LOSSES as REGISTERED_LOSSES
from actor.losses.loss_registry import find_loss
from rlpipe.algorithms import advantage_function
from rlpipe.config.algorithm import ADVANTAGES, GROUP_ADVANTAGES, LOSSES, AlgorithmConfig
from rlpipe.config.root import Config
from rlpipe.shared.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(advantage="grop"), "'grop' is unknown: use one of grpo, dr_grpo"),
        (dict(loss="ppo"), "'ppo' is unknown: use one of ppo_clip"),
        (dict(advantage="dr_grpo"), "set algorithm.aggregation to 'sequence_sum_norm'"),
        (dict(kl=dict(coefficient=0.1, estimator="k1")), "use 'k2' or 'k3'"),
        (dict(loss="gspo", correction=dict(weight="token")), "one ratio per response"),
        (dict(loss="gspo", correction=dict(mask="token", mask_max=2)), "one ratio per response"),
        (dict(old_policy="rollout", correction=dict(weight="token")), "the correction would count twice"),
        (dict(loss="sft", entropy_coefficient=0.1), "has no KL, entropy or correction term"),
        (dict(correction=dict(mask="token")), "needs a bound: set algorithm.correction.mask_max"),
        (dict(correction=dict(mask_max=2.0)), "do nothing while algorithm.correction.mask is 'none'"),
        (dict(correction=dict(mask="token", mask_min=2, mask_max=1)), "lower mask_min"),
        (dict(dual_clip=0.5), "greater than 1"),
    ],
)
def test_impossible_pairs_are_refused(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        AlgorithmConfig(**settings)


@pytest.mark.parametrize(
    ("old_policy", "updates", "stale", "needed"),
    [("actor", 1, False, False), ("actor", 2, False, True), ("actor", 1, True, True), ("rollout", 2, True, False)],
)
def test_the_policy_before_the_update_is_asked_where_the_update_leaves_it(old_policy, updates, stale, needed):
    assert AlgorithmConfig(old_policy=old_policy, updates_per_iteration=updates).needs_old_pass(stale) == needed


MINIMAL = {
    "run": {"name": "r", "iterations": 2},
    "model": {"path": "policy"},
    "data": {"train": [{"name": "t", "path": "t.jsonl"}]},
}


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (dict(rollout=dict(samples_per_prompt=1)), "every advantage would be 0"),
        (
            dict(rollout=dict(prompts_per_iteration=4), algorithm=dict(updates_per_iteration=5)),
            "only 4 groups, which are never split",
        ),
        (dict(algorithm=dict(overlong=dict(buffer_tokens=2000))), "every response would be punished"),
        (dict(actor=dict(max_tokens_per_gpu=1535)), "raise actor.max_tokens_per_gpu to 1536"),
        (dict(actor=dict(forward_max_tokens_per_gpu=1000)), "raise actor.forward_max_tokens_per_gpu to 1536"),
        (
            dict(
                data={**MINIMAL["data"], "max_prompt_tokens": 513},
                actor=dict(processes=2, parallel=dict(context=2), max_tokens_per_gpu=769),
            ),
            "in multiples of 4: raise actor.max_tokens_per_gpu to 770",
        ),
    ],
)
def test_sections_that_contradict_each_other_are_refused(sections, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Config(**{**MINIMAL, **sections})


def test_one_sample_per_prompt_is_fine_without_groups():
    algorithm = dict(advantage="reinforce_plus_plus")
    assert Config(**MINIMAL, rollout=dict(samples_per_prompt=1), algorithm=algorithm).algorithm.loss == "ppo_clip"


def test_the_names_of_the_configuration_are_those_of_the_registries():
    assert all(callable(advantage_function(name)) for name in ADVANTAGES)
    assert set(GROUP_ADVANTAGES) < set(ADVANTAGES)
    assert tuple(REGISTERED_LOSSES) == LOSSES
    assert all(callable(find_loss(name)) for name in LOSSES)


def own_advantage(batch, config):
    return batch.scores - 7


def needs_three(batch, config, more):
    return batch.scores


def test_an_advantage_function_of_your_own_by_dotted_path():
    assert advantage_function(f"{__name__}:own_advantage") is own_advantage
    with pytest.raises(ConfigError, match=r"is not a function of \(batch, config\)"):
        advantage_function(f"{__name__}:needs_three")
    with pytest.raises(ConfigError, match="has no 'absent'"):
        advantage_function(f"{__name__}:absent")
    with pytest.raises(ConfigError, match=r"cannot import 'no.such.module'"):
        advantage_function("no.such.module:f")
