"""Defects of what is learnt from: rewards and their penalties, losses and their metrics, warm starts, adapters."""

from planting import Defect

_WARM_START = (
    "rlpipe/test_supervised.py::"
    "test_after_a_warm_start_the_reference_is_what_it_taught_and_the_schedule_that_of_all_updates"
)
_KL_IN_REWARDS = "rlpipe/test_advantages.py::test_kl_in_the_reward_is_a_lower_score_whatever_the_advantage"
_CLIPPED = "actor/test_policy_losses.py::test_clipped_tokens_are_those_whose_gradient_the_bound_takes"
_MTP = "actor/test_train_steps.py::test_what_was_thrown_away_does_not_count_in_the_loss_of_multi_token_prediction"

LEARNING = [
    Defect(
        "a bonus for entropy has no gradient",
        "actor/passes.py",
        "entropy_gradient=algorithm is not None and algorithm.entropy_coefficient > 0",
        "entropy_gradient=False",
        "actor/test_train_steps.py::test_a_bonus_for_entropy_raises_it",
    ),
    Defect(
        "adapters leave something out of old and reference log-probabilities",
        "actor/trainer.py",
        "with weights, without_dropout(self.policy):",
        "with weights:",
        "actor/test_train_steps.py::test_adapters_leave_nothing_out_of_log_probabilities",
    ),
    Defect(
        "the reference is not what a warm start taught",
        "rlpipe/supervised/warm_start.py",
        "    actor.set_reference()\n",
        "",
        _WARM_START,
    ),
    Defect(
        "the schedule after a warm start has one update an iteration",
        "rlpipe/supervised/warm_start.py",
        "config.run.iterations * config.algorithm.updates_per_iteration)",
        "config.run.iterations)",
        _WARM_START,
    ),
    Defect(
        "a row of a warm start can write special tokens",
        "rlpipe/supervised/warm_start.py",
        "None if data.allow_special_tokens else special",
        "None",
        _WARM_START,
    ),
    Defect(
        "leave-one-out overlooks the KL in the reward",
        "rlpipe/algorithms/advantages.py",
        "return _centred(batch.returns, batch.groups) * sizes",
        "return _centred(batch.scores, batch.groups) * sizes",
        _KL_IN_REWARDS,
        only="rloo",
    ),
    Defect(
        "whitening with a baseline overlooks the KL in the reward",
        "rlpipe/algorithms/advantages.py",
        "_whitened(_centred(batch.returns, batch.groups)",
        "_whitened(_centred(batch.scores, batch.groups)",
        _KL_IN_REWARDS,
        only="baseline",
    ),
    Defect(
        "the KL in the reward is always k1",
        "rlpipe/algorithms/shaping.py",
        "kl_estimate(difference, estimator, np.expm1)",
        'kl_estimate(difference, "k1", np.expm1)',
        "rlpipe/test_advantages.py::test_the_kl_in_the_reward_is_that_of_the_estimator_that_is_set",
    ),
    Defect(
        "an episode is cut off where its first branch is",
        "rlpipe/shared/sample.py",
        "return any(sample.status is Status.TRUNCATED for sample in episode)",
        "return episode[0].status is Status.TRUNCATED",
        "rlpipe/test_episode_branches.py::test_an_episode_is_truncated_whichever_of_its_branches_is",
    ),
    Defect(
        "episodes without a reward are counted by their branches",
        "rlpipe/algorithms/compute.py",
        "failed_samples=len(by_episode(samples)) - len(usable) if len(graded) < len(samples) else 0",
        "failed_samples=len(samples) - len(graded)",
        "rlpipe/test_episode_branches.py::test_an_episode_that_failed_counts_once_whatever_the_number_of_its_branches",
    ),
    Defect(
        "long held-out rows are in the number of rows and in no pack",
        "rlpipe/supervised/examples.py",
        "(PackLimits.training(config.actor), PackLimits.forward_only(config.actor))",
        "(PackLimits.training(config.actor),)",
        "rlpipe/test_supervised.py::test_sequences_longer_than_a_pack_of_the_held_out_pass_are_left_out_too",
    ),
    Defect(
        "tokens that keep their gradient count as clipped",
        "actor/losses/clipped.py",
        "((clipped > plain) * inputs.mask).sum()",
        "((clipped != plain) * inputs.mask).sum()",
        _CLIPPED,
        only="ppo_clip",
    ),
    Defect(
        "sequences that keep their gradient count as clipped",
        "actor/losses/clipped_variants.py",
        "_ratio_metrics(inputs, ratio, clipped > plain)",
        "_ratio_metrics(inputs, ratio, clipped != plain)",
        _CLIPPED,
        only="gspo",
    ),
    Defect(
        "the ratio that CISPO reports is the bounded one",
        "actor/losses/clipped_variants.py",
        "_ratio_metrics(inputs, ratio, weight != ratio)",
        "_ratio_metrics(inputs, weight, weight != ratio)",
        "actor/test_policy_losses.py::test_the_ratio_that_cispo_reports_is_the_one_before_its_bounds",
    ),
    Defect(
        "a checkpoint that is written appears with the next one",
        "actor/worker.py",
        "        self._checkpointer.poll()\n        with self._enough_memory",
        "        with self._enough_memory",
        "actor/test_train_group.py::test_a_checkpoint_appears_with_an_update_after_it_was_written",
    ),
    Defect(
        "ranks are even in tokens and not in what these cost",
        "rlpipe/batching/training_packs.py",
        "plan_packs(lengths, limits, data_parallel, cost)",
        "plan_packs(lengths, limits, data_parallel)",
        "rlpipe/test_batching_packs.py::test_ranks_are_even_in_what_sequences_cost_and_not_in_their_tokens",
    ),
    Defect(
        "the passes of a warm-up count in the loss of multi-token prediction",
        "actor/kernel_warm_up.py",
        "        take_mtp_loss(trainer.policy[-1])\n",
        "",
        _MTP,
    ),
    Defect(
        "the passes of a diagnosis count in the loss of multi-token prediction",
        "actor/diagnosis.py",
        "            take_mtp_loss(chunks[-1])  # of this pass, so that it does not count in the next step\n",
        "",
        _MTP,
    ),
]
