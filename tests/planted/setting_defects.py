"""Settings that are ignored: each keeps its default whatever it is given, and a test has to see it."""

from planting import Defect

_BEFORE = '    @model_validator(mode="after")\n    def _values_can_be_used(self) -> Self:\n'


def _ignored(section: str, setting: str, test: str, only: str = "") -> Defect:
    """section: the class of rlpipe.config that has the setting."""
    ignore = (
        "    def model_post_init(self, _: Any) -> None:\n"
        f'        if "{section}" in [one.__name__ for one in type(self).__mro__]:\n'
        f'            default = type(self).model_fields["{setting}"].get_default(call_default_factory=True)\n'
        f'            self.__dict__["{setting}"] = default\n\n'
    )
    name = f"{section}.{setting} is ignored"
    return Defect(name, "rlpipe/config/base.py", _BEFORE, ignore + _BEFORE, test, only)


_SEEN_BY = {
    "rlpipe/test_evaluation.py::test_a_set_is_evaluated_before_the_first_iteration_every_few_and_after_the_last": [
        ("EvalConfig", "interval_iterations"),
        ("EvalConfig", "before_training"),
    ],
    "rlpipe/test_evaluation.py::test_a_set_has_a_cadence_and_a_number_of_answers_of_its_own": [
        ("EvalConfig", "samples_per_prompt"),
        ("EvalDatasetConfig", "interval_iterations"),
        ("EvalDatasetConfig", "samples_per_prompt"),
    ],
    "rlpipe/test_evaluation.py::test_answers_are_sampled_as_the_evaluation_says_and_end_as_in_training": [
        ("EvalConfig", "temperature"),
        ("EvalConfig", "top_p"),
        ("EvalConfig", "max_response_tokens"),
        ("EvalDatasetConfig", "sampling"),
        ("SamplingConfig", "stop"),
        ("SamplingConfig", "stop_token_ids"),
    ],
    "rlpipe/test_evaluation.py::"
    "test_training_responses_are_sampled_as_the_rollout_says_and_those_of_a_set_as_it_says": [
        ("RolloutConfig", "max_response_tokens"),
        ("SamplingConfig", "temperature"),
        ("SamplingConfig", "top_p"),
        ("SamplingConfig", "top_k"),
        ("SamplingOverrides", "max_response_tokens"),
        ("SamplingOverrides", "temperature"),
        ("SamplingOverrides", "top_p"),
        ("SamplingOverrides", "top_k"),
        ("SamplingOverrides", "stop"),
        ("SamplingOverrides", "stop_token_ids"),
    ],
    "rlpipe/test_evaluation.py::test_training_responses_alone_can_be_forced_to_their_limit": [
        ("SamplingConfig", "ignore_eos"),
    ],
    "rlpipe/test_bad_input.py::test_an_evaluation_on_training_rows_that_is_allowed_is_told": [
        ("EvalConfig", "allow_training_rows"),
    ],
    "rlpipe/test_learner.py::test_a_pass_is_made_only_for_what_the_loss_reads": [
        ("AlgorithmConfig", "old_policy"),
        ("KLConfig", "coefficient"),
    ],
    "rlpipe/test_learner.py::test_log_probabilities_come_to_the_packs_that_the_loss_reads_them_in": [
        ("AlgorithmConfig", "updates_per_iteration"),
        ("KLConfig", "placement"),
    ],
    "rlpipe/test_learner.py::test_the_divergence_in_the_reward_is_that_of_the_policy_before_the_update": [
        ("KLConfig", "estimator"),
        ("AlgorithmConfig", "advantage"),
    ],
    "rlpipe/test_learner.py::test_the_constant_of_the_sum_is_the_longest_response_that_is_allowed": [
        ("AlgorithmConfig", "aggregation"),
    ],
    "rlpipe/test_learner.py::test_tokens_of_older_weights_have_no_loss_where_they_are_masked": [
        ("RolloutConfig", "mask_off_policy"),
    ],
    "rlpipe/test_learner.py::test_packs_are_as_large_as_the_actor_may_have_them": [
        ("ActorConfig", "max_tokens_per_gpu"),
    ],
    "rlpipe/test_episode_branches.py::test_the_length_of_an_episode_is_that_of_its_longest_branch": [
        ("OverlongConfig", "buffer_tokens"),
        ("OverlongConfig", "penalty"),
    ],
    "rlpipe/test_episode_branches.py::test_an_episode_of_which_a_part_was_cut_off_is_truncated_as_a_whole": [
        ("OverlongConfig", "mask_truncated"),
    ],
    "rlpipe/test_producer.py::test_a_run_goes_on_while_no_more_samples_fail_than_are_allowed": [
        ("GenerateConfig", "max_failed_share"),
    ],
    "rlpipe/test_producer.py::test_so_many_transcripts_are_kept_as_are_wanted": [
        ("GenerateConfig", "transcripts_per_iteration"),
    ],
    "rlpipe/test_group_source.py::test_replacement_ends_at_the_factor_and_the_missing_groups_are_counted": [
        ("RolloutConfig", "max_groups_factor"),
        ("RolloutConfig", "filters"),
        ("RolloutConfig", "prompts_per_iteration"),
    ],
    "rlpipe/test_group_source.py::"
    "test_partial_responses_go_on_in_the_next_iteration_with_the_versions_of_their_tokens": [
        ("RolloutConfig", "partial"),
    ],
    "rlpipe/test_group_source.py::test_oversampled_groups_are_aborted_and_counted": [
        ("RolloutConfig", "oversampling"),
    ],
    "rlpipe/test_group_source.py::test_async_hands_out_groups_as_they_finish_within_the_staleness": [
        ("RolloutConfig", "mode"),
        ("RolloutConfig", "max_staleness"),
    ],
    "rlpipe/test_supervised.py::test_a_warm_start_ends_at_its_loss_or_after_its_steps_and_leaves_a_new_optimizer": [
        ("WarmStartConfig", "stop_at_loss"),
        ("WarmStartConfig", "sequences_per_step"),
        ("WarmStartConfig", "learning_rate"),
        ("WarmStartConfig", "warmup_steps"),
    ],
    "rollout/test_engine_client.py::test_requests_are_sent_as_the_rollout_says": [
        ("RolloutConfig", "request_routing"),
        ("RolloutConfig", "request_order"),
        ("RolloutConfig", "migration"),
    ],
    "rollout/test_supervisor.py::test_probes_are_sent_as_often_as_is_said": [
        ("FaultConfig", "engine_probe_seconds"),
    ],
    "rollout/test_supervisor.py::test_an_answer_within_the_deadline_is_not_missed": [
        ("FaultConfig", "engine_probe_deadline_seconds"),
    ],
    "rollout/test_supervisor.py::test_an_engine_is_looked_at_when_it_missed_so_many_of_its_last_probes": [
        ("FaultConfig", "engine_missed_probes"),
        ("FaultConfig", "engine_probes"),
    ],
    "rollout/test_supervisor.py::"
    "test_an_engine_without_an_answer_is_lost_at_once_where_it_is_stopped_and_else_in_time": [
        ("FaultConfig", "engine_hang_seconds"),
    ],
    "rollout/test_rollout_healing.py::test_restarts_are_counted_within_the_hour_and_a_loss_once": [
        ("FaultConfig", "engine_restarts"),
    ],
    "actor/test_train_steps.py::test_every_option_of_adam_counts_as_in_torch": [
        ("OptimizerConfig", "learning_rate"),
        ("OptimizerConfig", "beta1"),
        ("OptimizerConfig", "beta2"),
        ("OptimizerConfig", "epsilon"),
        ("OptimizerConfig", "weight_decay"),
        ("OptimizerConfig", "max_gradient_norm"),
    ],
    "actor/test_train_layout.py::test_learning_rate_warms_up_and_decays": [
        ("OptimizerConfig", "warmup_steps"),
        ("OptimizerConfig", "schedule"),
        ("OptimizerConfig", "decay_steps"),
        ("OptimizerConfig", "minimum_learning_rate"),
    ],
}
"""By test: the settings that it alone, or it among others, has to see."""

SETTINGS = [_ignored(*setting, test) for test, settings in _SEEN_BY.items() for setting in settings]
