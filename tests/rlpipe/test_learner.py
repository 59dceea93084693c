"""From samples to the packs of an update as the configuration says, with an actor that answers in the process."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rlpipe.config.layout import ActorLayout
from rlpipe.shared.sample import Prompt, Reward, Sample, Status, VersionSpan
from rlpipe.shared.sample_table import SampleTable
from rlpipe.training.learner import Learner
from tests.small_config import small_config

OLD, REFERENCE, ENGINE = -1.25, -1.0, -2.0


class _Actor:
    """The policy gives every token `OLD`, the reference `REFERENCE`; notes what was asked and what is trained."""

    def __init__(self, config):
        self.layout = ActorLayout.of(config.actor)
        self.asked, self.packs = [], []

    def logprobs(self, packs, which):
        self.asked.append(which)
        self.packs += map(len, packs)
        value = np.float32(OLD if which == "policy" else REFERENCE)
        return [[np.full(pack.padded_tokens, value) for pack in rank] for rank in packs]

    def begin_train(self, ranks, algorithm):
        return SimpleNamespace(ranks=ranks, algorithm=algorithm)


def _learner(rollout=None, actor=None, sampling=None, **algorithm):
    config = small_config(
        model={"path": "Qwen3-8B"},
        data={"train": [{"name": "t", "path": "t.jsonl", "sampling": sampling or {}}], "max_prompt_tokens": 2},
        rollout={"max_response_tokens": 32, **(rollout or {})},
        algorithm=algorithm,
        actor=actor or {},
    )
    return Learner(config, _Actor(config))


def _samples(*scores, version=3, tokens=4):
    """Of groups of two, of weights of `version`."""
    return SampleTable.of(
        [
            Sample(
                sample_id=f"s{index}",
                group_id=f"g{index // 2}",
                prompt=Prompt("p", "p", (1, 2), "l", "t"),
                response_ids=(3,) * tokens,
                response_text="",
                rollout_logprobs=(ENGINE,) * tokens,
                loss_mask=(1,) * tokens,
                versions=(VersionSpan(version, tokens),),
                status=Status.COMPLETED,
                engine=0,
                reward=Reward(score, None, ""),
            )
            for index, score in enumerate(scores)
        ]
    )


def _packs(learner, samples, version=3):
    """Of an iteration: [step][pack] of the one rank."""
    reference, old = learner.reference_logprobs(samples), learner.old_logprobs(samples, version)
    trained = learner.advantages(samples, reference, old, version).samples
    (rank,) = learner.begin_train(learner.pack(trained, reference, old)).ranks
    return [[pack.laid_out() for pack in step] for step in rank]


def _joined(steps, name):
    """Values of all trained tokens, in one array; None where a pack has none."""
    values = [(getattr(pack, name), pack.loss_mask > 0) for step in steps for pack in step]
    return None if values[0][0] is None else np.concatenate([value[mask] for value, mask in values])


def test_a_pass_is_made_only_for_what_the_loss_reads():
    cases = [
        ({}, 3, []),
        ({}, 2, ["policy"]),
        ({"updates_per_iteration": 2}, 3, ["policy"]),
        ({"updates_per_iteration": 2, "old_policy": "rollout"}, 2, []),
        ({"kl": {"coefficient": 0.1}}, 3, ["reference"]),
        ({"kl": {"coefficient": 0.1, "placement": "reward"}}, 2, ["reference", "policy"]),
    ]
    for algorithm, version, asked in cases:
        learner = _learner(**algorithm)
        _packs(learner, _samples(0.0, 1.0, 0.0, 1.0, version=version))
        assert learner._actor.asked == asked, algorithm


def test_one_token_of_older_weights_asks_for_the_pass():
    learner = _learner()
    first, *others = _samples(0.0, 1.0, 0.0, 1.0)
    continued = first.changed(versions=(VersionSpan(2, 1), VersionSpan(3, 3)))
    _packs(learner, SampleTable.of([continued, *others]))
    assert learner._actor.asked == ["policy"]


def test_a_run_says_beforehand_which_passes_it_makes():
    partial = {"partial": True, "oversampling": 2.0}
    said = [
        (_learner(), "pass skipped, each iteration is one on-policy step"),
        (_learner(partial, correction={"weight": "token"}), "older than the policy, skipped elsewhere"),
        (_learner(updates_per_iteration=2), "a pass each iteration, for its 2 updates"),
        (_learner(old_policy="rollout"), "those that the engines report, no pass for them"),
    ]
    for learner, end in said:
        assert learner.old_policy_choice.endswith(end)


def test_log_probabilities_come_to_the_packs_that_the_loss_reads_them_in():
    in_loss = _packs(_learner(kl={"coefficient": 0.1}, updates_per_iteration=2), _samples(0.0, 1.0, 0.0, 1.0))
    assert len(in_loss) == 2
    assert (_joined(in_loss, "old_logprobs") == OLD).all()
    assert (_joined(in_loss, "ref_logprobs") == REFERENCE).all()
    assert (_joined(in_loss, "rollout_logprobs") == ENGINE).all()
    in_reward = _packs(_learner(kl={"coefficient": 0.1, "placement": "reward"}), _samples(0.0, 1.0))
    assert _joined(in_reward, "ref_logprobs") is None and _joined(in_reward, "old_logprobs") is None


@pytest.mark.parametrize(("version", "policy"), [(3, ENGINE), (2, OLD)])
def test_the_divergence_in_the_reward_is_that_of_the_policy_before_the_update(version, policy):
    """Which the engine had, unless the actor computes its log-probabilities anyway."""
    kl = {"coefficient": 0.5, "placement": "reward", "estimator": "k1"}
    learner = _learner(kl=kl, advantage="dr_grpo", aggregation="sequence_sum_norm")
    samples = list(_samples(0.0, 1.0, version=version))
    one, two = samples
    longer = replace(one, response_ids=(3,) * 6, rollout_logprobs=(ENGINE,) * 6, loss_mask=(1,) * 6)
    table = SampleTable.of([longer.changed(versions=(VersionSpan(version, 6),)), two])
    reference, old = learner.reference_logprobs(table), learner.old_logprobs(table, 3)
    first, second = learner.advantages(table, reference, old, 3).samples
    difference = 0.5 * (policy - REFERENCE)
    returns = 0.0 - 6 * difference, 1.0 - 4 * difference
    assert (first.advantage, second.advantage) == pytest.approx(
        [(returns[0] - returns[1]) / 2, (returns[1] - returns[0]) / 2]
    )


@pytest.mark.parametrize(("masked", "trained"), [(True, 3 + 4), (False, 4 + 4)])
def test_tokens_of_older_weights_have_no_loss_where_they_are_masked(masked, trained):
    one, two = _samples(0.0, 1.0)
    samples = SampleTable.of([one.changed(versions=(VersionSpan(2, 1), VersionSpan(3, 3))), two])
    learner = _learner(rollout={"mode": "async", "mask_off_policy": masked}, old_policy="rollout")
    assert sum(pack.loss_mask.sum() for step in _packs(learner, samples) for pack in step) == trained


def test_the_constant_of_the_sum_is_the_longest_response_that_is_allowed():
    learner = _learner(advantage="dr_grpo", aggregation="sequence_sum_norm")
    weights = _joined(_packs(learner, _samples(0.0, 1.0)), "loss_weights")
    assert weights == pytest.approx(np.full(8, 1 / (2 * 32)))


def test_a_response_is_too_long_by_the_limit_of_the_data():
    learner = _learner(sampling={"max_response_tokens": 8}, overlong={"buffer_tokens": 4, "penalty": 1.0})
    samples = _samples(0.0, 1.0, tokens=6)
    assert learner.advantages(samples, None, None, 3).counts.overlong_penalized == 2


def test_packs_are_as_large_as_the_actor_may_have_them():
    samples = _samples(0.0, 1.0, 0.0, 1.0, tokens=30)  # 32 with their prompt
    sizes = {
        budget: [len(step) for step in _packs(_learner(actor={"max_tokens_per_gpu": budget}), samples)]
        for budget in (34, 66, 128)
    }
    assert sizes == {34: [4], 66: [2], 128: [1]}


def test_passes_without_gradients_have_packs_of_their_own_size():
    learner = _learner(actor={"max_tokens_per_gpu": 128, "forward_max_tokens_per_gpu": 34}, kl={"coefficient": 0.1})
    samples = _samples(0.0, 1.0, 0.0, 1.0, tokens=30)
    learner.reference_logprobs(samples)
    assert learner._actor.packs == [4]
    assert [len(step) for step in _packs(learner, samples)] == [1]
