"""Settings that are ignored: each keeps its default whatever it is given, and a test has to see it."""

from planting import Defect

_BEFORE = '    @model_validator(mode="after")\n    def _values_can_be_used(self) -> Self:\n'


def _ignored(section: str, setting: str, test: str, error: str = "") -> Defect:
    """section: the class of rlpipe.config that has the setting. error: as `Defect.error`."""
    ignore = (
        "    def model_post_init(self, _: Any) -> None:\n"
        f'        if "{section}" in [one.__name__ for one in type(self).__mro__]:\n'
        f'            default = type(self).model_fields["{setting}"].get_default(call_default_factory=True)\n'
        f'            self.__dict__["{setting}"] = default\n\n'
    )
    name = f"{section}.{setting} is ignored"
    return Defect(name, "rlpipe/config/base.py", _BEFORE, ignore + _BEFORE, test, error=error)


_SEEN_BY: dict[str, list[tuple[str, ...]]] = {
    "actor/test_comm_guard_evidence.py::test_a_guard_is_installed_as_its_section_says": [
        ("CommGuardConfig", "evidence"),
        ("CommGuardConfig", "mode"),
        ("CommGuardConfig", "recovery"),
        ("CommGuardConfig", "ttl_seconds"),
    ],
    "actor/test_comm_guard_evidence.py::test_a_policy_of_another_stack_warns_or_is_refused": [
        ("CommGuardConfig", "other_stack"),
        ("CommGuardConfig", "policy"),
    ],
    "actor/test_comm_guard_evidence.py::test_the_threshold_of_the_run_replaces_the_policys": [
        ("CommGuardConfig", "threshold_bytes"),
        ("CommGuardConfig", "threshold_share"),
    ],
    "actor/test_float8_base.py::test_exports_are_the_rounded_model": [
        ("LoraConfig", "base"),
    ],
    "actor/test_group_calls.py::test_a_call_may_take_as_long_as_its_kind_and_is_looked_at_as_often_as_is_said": [
        ("DeadlinesConfig", "checkpoint_seconds"),
        ("DeadlinesConfig", "start_seconds"),
        ("DeadlinesConfig", "train_seconds"),
        ("DeadlinesConfig", "weight_sync_seconds"),
        ("FaultConfig", "probe_seconds"),
    ],
    "actor/test_group_calls.py::test_compilers_of_a_process_keep_what_they_make_where_is_said": [
        ("JitConfig", "cache_directory"),
    ],
    "actor/test_lora_peft.py::test_training_and_files_equal_peft": [
        ("LoraConfig", "alpha"),
        ("LoraConfig", "experts"),
        ("LoraConfig", "start_path"),
        ("LoraConfig", "targets"),
        ("LoraConfig", "use_rslora"),
    ],
    "actor/test_lora_settings.py::test_so_much_of_the_inputs_is_left_out_as_is_said_and_nothing_outside_of_training": [
        ("LoraConfig", "dropout"),
    ],
    "actor/test_lora_settings.py::test_the_first_factor_is_drawn_as_is_said": [
        ("LoraConfig", "init"),
    ],
    "actor/test_loss_parts.py::test_supervised_loss_is_the_negative_log_probability": [
        ("AlgorithmConfig", "loss"),
    ],
    "actor/test_model_config.py::test_megatron_is_configured_as_the_actor_section_says": [
        ("ActorConfig", "dtype"),
        ("ActorConfig", "mtp_loss_weight"),
        ("ActorConfig", "train_mtp"),
        ("ParallelConfig", "context"),
        ("ParallelConfig", "expert"),
        ("ParallelConfig", "sequence"),
        ("ParallelConfig", "virtual_pipeline"),
        ("RecomputeConfig", "granularity"),
        ("RecomputeConfig", "modules"),
    ],
    "actor/test_model_config.py::test_the_kernels_of_gated_delta_net_are_chosen_as_the_actor_section_says": [
        ("ActorConfig", "gdn_backend"),
    ],
    "actor/test_policy_losses.py::test_dual_clip_bounds_only_negative_advantages": [
        ("AlgorithmConfig", "dual_clip"),
    ],
    "actor/test_policy_losses.py::test_kl_and_entropy_terms_of_the_objective": [
        ("AlgorithmConfig", "entropy_coefficient"),
    ],
    "actor/test_policy_losses.py::test_mismatch_corrections": [
        ("CorrectionConfig", "mask", "ValidationError"),
        ("CorrectionConfig", "mask_max", "ValidationError"),
        ("CorrectionConfig", "mask_min"),
        ("CorrectionConfig", "weight"),
        ("CorrectionConfig", "weight_max"),
    ],
    "actor/test_policy_losses.py::test_ppo_clip_with_clip_higher": [
        ("AlgorithmConfig", "clip_high"),
        ("AlgorithmConfig", "clip_low"),
    ],
    "actor/test_rank_clock.py::test_a_process_computes_with_as_many_threads_as_are_said_and_there_are_cores_for": [
        ("ActorConfig", "threads"),
    ],
    "actor/test_train_group.py::test_as_many_checkpoints_are_kept_as_are_said": [
        ("CheckpointConfig", "keep"),
    ],
    "actor/test_train_layout.py::test_learning_rate_warms_up_and_decays": [
        ("OptimizerConfig", "decay_steps"),
        ("OptimizerConfig", "minimum_learning_rate"),
        ("OptimizerConfig", "schedule"),
        ("OptimizerConfig", "warmup_steps"),
    ],
    "actor/test_train_layout.py::test_ranks_are_numbered_as_megatron_does_tensor_first_pipeline_last": [
        ("ActorConfig", "processes", "ValidationError"),
        ("ParallelConfig", "pipeline"),
        ("ParallelConfig", "tensor"),
    ],
    "actor/test_train_steps.py::test_every_option_of_adam_counts_as_in_torch": [
        ("OptimizerConfig", "beta1"),
        ("OptimizerConfig", "beta2"),
        ("OptimizerConfig", "epsilon"),
        ("OptimizerConfig", "learning_rate"),
        ("OptimizerConfig", "max_gradient_norm"),
        ("OptimizerConfig", "weight_decay"),
    ],
    "actor/test_train_steps.py::test_frozen_parameters_stay_and_bad_patterns_are_refused": [
        ("ActorConfig", "frozen_parameters", "ValueError"),
    ],
    "actor/test_train_steps.py::test_moments_in_bfloat16_train_like_those_in_float32": [
        ("OptimizerConfig", "moments_dtype"),
    ],
    "actor/test_train_steps.py::test_training_stops_after_the_allowed_skips_in_a_row": [
        ("ActorConfig", "max_skipped_updates"),
    ],
    "actor/test_trainer_options.py::test_a_trainer_is_built_as_the_run_says": [
        ("ModelConfig", "reference_path"),
    ],
    "agents/test_agent_maker.py::test_a_failure_can_have_a_reward_and_is_trained_then": [
        ("AgentConfig", "failure_reward", "KeyError"),
    ],
    "agents/test_agent_maker.py::test_agents_beyond_the_limit_wait": [
        ("AgentConfig", "concurrency"),
    ],
    "agents/test_agent_maker.py::test_an_agent_makes_an_episode_however_it_is_run": [
        ("AgentConfig", "command", "ValidationError"),
        ("AgentConfig", "options"),
        ("AgentConfig", "run", "ValidationError"),
    ],
    "agents/test_agent_maker.py::test_an_agent_that_fails_costs_its_episode_and_leaves_nothing_behind": [
        ("AgentConfig", "timeout_seconds"),
    ],
    "agents/test_agent_maker.py::test_requests_for_json_are_served_where_the_section_says_so": [
        ("AgentConfig", "response_format", "BadRequestError"),
    ],
    "environments/test_episodes.py::"
    "test_a_chat_is_written_as_the_template_does_and_only_the_policys_tokens_are_trained": [
        ("EnvironmentConfig", "max_turn_tokens"),
    ],
    "environments/test_episodes.py::test_a_limit_that_is_met_ends_the_episode_as_truncated": [
        ("EnvironmentConfig", "episode_seconds"),
        ("EnvironmentConfig", "max_turns"),
    ],
    "environments/test_episodes.py::test_a_reset_is_tried_again_with_a_new_environment": [
        ("EnvironmentConfig", "reset_retries", "EnvironmentFailure"),
    ],
    "environments/test_episodes.py::test_a_turn_ends_at_the_strings_that_are_said": [
        ("EnvironmentConfig", "stop"),
    ],
    "environments/test_episodes.py::test_an_environment_that_fails_or_hangs_costs_its_episode_and_is_closed": [
        ("EnvironmentConfig", "step_seconds"),
    ],
    "environments/test_episodes.py::test_environment_and_function_belong_together": [
        ("GenerateConfig", "function"),
    ],
    "environments/test_episodes.py::test_text_follows_text_and_the_first_messages_of_a_chat_are_the_prompt": [
        ("EnvironmentConfig", "format"),
    ],
    "environments/test_hostile_tools.py::test_a_call_that_hangs_is_given_up_and_keeps_its_place_until_it_ends": [
        ("ToolLimits", "timeout_seconds"),
    ],
    "environments/test_hostile_tools.py::test_a_tool_that_fails_at_first_is_tried_again_and_the_tries_are_counted": [
        ("ToolLimits", "retries"),
    ],
    "environments/test_hostile_tools.py::test_an_episode_with_hostile_tools_ends_whole_and_nothing_is_smuggled_in": [
        ("ToolLimits", "max_answer_characters"),
    ],
    "environments/test_hostile_tools.py::test_places_bound_how_many_calls_run_over_all_episodes": [
        ("ToolLimits", "concurrency"),
    ],
    "environments/test_worked_examples.py::test_a_calculation_takes_pairs_and_ends_in_an_answer": [
        ("EnvironmentConfig", "tool_format"),
    ],
    "environments/test_worked_examples.py::test_the_grid_rewards_each_turn_by_whether_it_comes_nearer": [
        ("EnvironmentConfig", "options"),
    ],
    "plan/test_plan_command.py::test_a_setting_moves_its_part": [
        ("ActorConfig", "logprob_chunk_tokens"),
        ("WeightSyncConfig", "bucket_bytes"),
    ],
    "plan/test_plan_command.py::test_optimizer_states_stay_on_a_gpu_as_far_as_there_is_room": [
        ("OptimizerConfig", "cpu_offload_fraction"),
        ("OptimizerConfig", "device_cache_gigabytes"),
    ],
    "rewards/test_grader_choice.py::test_the_row_chooses_before_the_data_set_and_that_before_the_run": [
        ("DatasetConfig", "reward"),
        ("RewardConfig", "column"),
    ],
    "rewards/test_grader_choice.py::test_the_runs_grader_and_one_of_its_own_have_their_options": [
        ("GraderConfig", "options"),
        ("RewardConfig", "name"),
        ("RewardConfig", "options"),
    ],
    "rewards/test_grading_pool.py::test_a_pool_is_opened_as_the_reward_section_says": [
        ("RewardConfig", "environment"),
        ("RewardConfig", "memory_bytes"),
        ("RewardConfig", "remote_connections"),
        ("RewardConfig", "score_on_failure"),
        ("RewardConfig", "timeout_seconds"),
        ("RewardConfig", "workers"),
    ],
    "rlpipe/test_adapter_updates.py::test_a_resumed_run_keeps_the_way_that_it_measured": [
        ("WeightSyncConfig", "adapters"),
    ],
    "rlpipe/test_advantages.py::test_group_advantages_by_hand_with_an_equal_group_and_a_group_of_one": [
        ("AlgorithmConfig", "normalize_by_std"),
    ],
    "rlpipe/test_bad_input.py::test_an_evaluation_on_training_rows_that_is_allowed_is_told": [
        ("EvalConfig", "allow_training_rows"),
    ],
    "rlpipe/test_bad_input.py::test_rows_are_read_as_the_data_section_says": [
        ("DataConfig", "cache_directory"),
        ("DataConfig", "max_prompt_tokens"),
        ("DataConfig", "skip_bad_rows"),
    ],
    "rlpipe/test_batching_shapes.py::test_packs_are_padded_to_buckets_of_length": [
        ("ActorConfig", "pack_bucket_tokens"),
    ],
    "rlpipe/test_conversation.py::test_a_generate_function_that_cannot_work_is_refused": [
        ("GenerateConfig", "options"),
    ],
    "rlpipe/test_conversations.py::test_examples_are_rendered_as_the_template_is_told": [
        ("DataConfig", "chat_template_arguments"),
    ],
    "rlpipe/test_conversations.py::test_prompts_show_tools_and_what_the_template_is_told": [
        ("DatasetConfig", "tools_column"),
    ],
    "rlpipe/test_data.py::test_a_folder_of_gsm8k_is_read_split_by_split": [
        ("DatasetConfig", "label_column"),
        ("DatasetConfig", "split"),
    ],
    "rlpipe/test_data.py::test_arithmetic_splits_share_no_problem_in_any_order": [
        ("ArithmeticTaskConfig", "digits"),
        ("ArithmeticTaskConfig", "operands"),
        ("ArithmeticTaskConfig", "test_problems"),
        ("ArithmeticTaskConfig", "train_problems"),
    ],
    "rlpipe/test_data.py::test_slices_cut_rows": [
        ("DatasetConfig", "rows"),
    ],
    "rlpipe/test_data.py::test_templates_take_columns": [
        ("DatasetConfig", "apply_chat_template"),
        ("DatasetConfig", "prompt_template"),
    ],
    "rlpipe/test_data_mapping.py::test_a_streamed_data_set_gives_its_first_rows": [
        ("DatasetConfig", "streaming"),
    ],
    "rlpipe/test_data_rows.py::test_a_subset_of_a_folder_is_the_folder_of_that_name": [
        ("DatasetConfig", "subset"),
    ],
    "rlpipe/test_data_rows.py::test_text_of_special_tokens_stays_text_and_is_counted": [
        ("DatasetConfig", "allow_special_tokens"),
    ],
    "rlpipe/test_early_ends.py::test_a_lost_actor_is_started_again_as_often_as_is_allowed": [
        ("FaultConfig", "actor_restarts"),
    ],
    "rlpipe/test_early_ends.py::test_what_is_whole_is_saved_before_an_early_end_where_there_is_time": [
        ("FaultConfig", "grace_seconds"),
    ],
    "rlpipe/test_episode_branches.py::test_an_episode_of_which_a_part_was_cut_off_is_truncated_as_a_whole": [
        ("OverlongConfig", "mask_truncated"),
    ],
    "rlpipe/test_episode_branches.py::test_the_length_of_an_episode_is_that_of_its_longest_branch": [
        ("OverlongConfig", "buffer_tokens"),
        ("OverlongConfig", "penalty"),
    ],
    "rlpipe/test_evaluation.py::test_a_set_has_a_cadence_and_a_number_of_answers_of_its_own": [
        ("EvalConfig", "samples_per_prompt"),
        ("EvalDatasetConfig", "interval_iterations"),
        ("EvalDatasetConfig", "samples_per_prompt"),
    ],
    "rlpipe/test_evaluation.py::test_a_set_is_evaluated_before_the_first_iteration_every_few_and_after_the_last": [
        ("EvalConfig", "before_training"),
        ("EvalConfig", "interval_iterations"),
    ],
    "rlpipe/test_evaluation.py::test_answers_are_sampled_as_the_evaluation_says_and_end_as_in_training": [
        ("EvalConfig", "max_response_tokens"),
        ("EvalConfig", "temperature"),
        ("EvalConfig", "top_p"),
        ("EvalDatasetConfig", "sampling"),
        ("SamplingConfig", "stop"),
        ("SamplingConfig", "stop_token_ids"),
    ],
    "rlpipe/test_evaluation.py::test_training_responses_alone_can_be_forced_to_their_limit": [
        ("SamplingConfig", "ignore_eos"),
    ],
    "rlpipe/test_evaluation.py::"
    "test_training_responses_are_sampled_as_the_rollout_says_and_those_of_a_set_as_it_says": [
        ("RolloutConfig", "max_response_tokens"),
        ("SamplingConfig", "temperature"),
        ("SamplingConfig", "top_k"),
        ("SamplingConfig", "top_p"),
        ("SamplingOverrides", "max_response_tokens"),
        ("SamplingOverrides", "stop"),
        ("SamplingOverrides", "stop_token_ids"),
        ("SamplingOverrides", "temperature"),
        ("SamplingOverrides", "top_k"),
        ("SamplingOverrides", "top_p"),
    ],
    "rlpipe/test_group_source.py::test_async_hands_out_groups_as_they_finish_within_the_staleness": [
        ("RolloutConfig", "max_staleness"),
        ("RolloutConfig", "mode"),
    ],
    "rlpipe/test_group_source.py::test_oversampled_groups_are_aborted_and_counted": [
        ("RolloutConfig", "oversampling"),
    ],
    "rlpipe/test_group_source.py::"
    "test_partial_responses_go_on_in_the_next_iteration_with_the_versions_of_their_tokens": [
        ("RolloutConfig", "partial"),
    ],
    "rlpipe/test_group_source.py::test_replacement_ends_at_the_factor_and_the_missing_groups_are_counted": [
        ("RolloutConfig", "filters"),
        ("RolloutConfig", "max_groups_factor"),
        ("RolloutConfig", "prompts_per_iteration"),
    ],
    "rlpipe/test_jit_monitor.py::test_a_run_s_monitor_is_as_the_section_says": [
        ("JitConfig", "stall_factor"),
        ("JitConfig", "stall_minimum_seconds"),
        ("JitConfig", "warmup_iterations"),
    ],
    "rlpipe/test_learner.py::test_a_pass_is_made_only_for_what_the_loss_reads": [
        ("AlgorithmConfig", "old_policy"),
        ("KLConfig", "coefficient"),
    ],
    "rlpipe/test_learner.py::test_log_probabilities_come_to_the_packs_that_the_loss_reads_them_in": [
        ("AlgorithmConfig", "updates_per_iteration"),
        ("KLConfig", "placement"),
    ],
    "rlpipe/test_learner.py::test_packs_are_as_large_as_the_actor_may_have_them": [
        ("ActorConfig", "max_tokens_per_gpu"),
    ],
    "rlpipe/test_learner.py::test_passes_without_gradients_have_packs_of_their_own_size": [
        ("ActorConfig", "forward_max_tokens_per_gpu"),
    ],
    "rlpipe/test_learner.py::test_the_constant_of_the_sum_is_the_longest_response_that_is_allowed": [
        ("AlgorithmConfig", "aggregation"),
    ],
    "rlpipe/test_learner.py::test_the_divergence_in_the_reward_is_that_of_the_policy_before_the_update": [
        ("AlgorithmConfig", "advantage"),
        ("KLConfig", "estimator"),
    ],
    "rlpipe/test_learner.py::test_tokens_of_older_weights_have_no_loss_where_they_are_masked": [
        ("RolloutConfig", "mask_off_policy"),
    ],
    "rlpipe/test_measurement.py::test_an_alarm_is_a_warning_with_worker_and_kernel_and_a_line_on_file": [
        ("TraceConfig", "iterations"),
    ],
    "rlpipe/test_measurement.py::test_executed_work_is_that_of_the_backend_that_ran": [
        ("ActorConfig", "peak_tflops", "KeyError"),
    ],
    "rlpipe/test_measurement.py::test_with_error_the_run_ends_and_the_line_is_on_file_all_the_same": [
        ("JitConfig", "after_warmup"),
    ],
    "rlpipe/test_memory_sharing.py::test_engines_and_actor_sleep_as_is_said_where_they_share_a_device": [
        ("RayConfig", "sleep"),
    ],
    "rlpipe/test_memory_sharing.py::test_the_actor_is_built_beside_engines_where_they_leave_room": [
        ("RayConfig", "colocate"),
        ("RayConfig", "start"),
    ],
    "rlpipe/test_opening.py::test_a_run_has_its_folder_where_it_is_told": [
        ("RunConfig", "directory"),
    ],
    "rlpipe/test_placement.py::test_as_many_nodes_are_waited_for_as_are_said": [
        ("RayConfig", "nodes"),
    ],
    "rlpipe/test_placement.py::test_ray_is_started_and_joined_as_its_section_says": [
        ("RayConfig", "address"),
        ("RayConfig", "cpus"),
        ("RayConfig", "environment"),
        ("RayConfig", "object_store_bytes"),
    ],
    "rlpipe/test_prepare_policy.py::test_a_policy_has_the_sizes_that_are_asked_for": [
        ("TinyPolicyConfig", "architecture", "ValidationError"),
        ("TinyPolicyConfig", "expert_intermediate_size"),
        ("TinyPolicyConfig", "experts"),
        ("TinyPolicyConfig", "experts_per_token"),
        ("TinyPolicyConfig", "head_dim"),
        ("TinyPolicyConfig", "heads"),
        ("TinyPolicyConfig", "hidden_size"),
        ("TinyPolicyConfig", "intermediate_size"),
        ("TinyPolicyConfig", "key_value_heads"),
        ("TinyPolicyConfig", "layers"),
        ("TinyPolicyConfig", "prediction_layer"),
    ],
    "rlpipe/test_prepare_policy.py::test_an_environment_makes_as_many_tasks_as_are_wanted_where_they_are_wanted": [
        ("PrepareConfig", "directory"),
        ("TasksConfig", "test"),
        ("TasksConfig", "train"),
    ],
    "rlpipe/test_producer.py::test_a_run_goes_on_while_no_more_responses_stay_ungraded_than_are_allowed": [
        ("RewardConfig", "max_failed_share"),
    ],
    "rlpipe/test_producer.py::test_a_run_goes_on_while_no_more_samples_fail_than_are_allowed": [
        ("GenerateConfig", "max_failed_share"),
    ],
    "rlpipe/test_producer.py::test_prompts_that_were_taken_and_not_trained_come_first": [
        ("DataConfig", "shuffle"),
        ("RolloutConfig", "samples_per_prompt"),
    ],
    "rlpipe/test_producer.py::test_responses_of_a_data_set_are_sampled_as_it_says": [
        ("RolloutConfig", "sampling"),
        ("TrainingDatasetConfig", "sampling"),
    ],
    "rlpipe/test_producer.py::test_responses_that_do_not_come_end_the_run_at_its_deadline": [
        ("DeadlinesConfig", "rollout_seconds"),
    ],
    "rlpipe/test_producer.py::test_so_many_transcripts_are_kept_as_are_wanted": [
        ("GenerateConfig", "transcripts_per_iteration"),
    ],
    "rlpipe/test_prometheus.py::test_it_listens_at_the_loopback_and_a_taken_port_is_one_sentence": [
        ("TrackersConfig", "prometheus_address"),
        ("TrackersConfig", "prometheus_port"),
    ],
    "rlpipe/test_saved_policies.py::test_a_best_policy_needs_a_metric_that_there_is": [
        ("CheckpointConfig", "best_metric"),
    ],
    "rlpipe/test_saved_policies.py::test_save_hf_chooses_the_policies": [
        ("CheckpointConfig", "interval_iterations"),
        ("CheckpointConfig", "save_hf"),
    ],
    "rlpipe/test_supervised.py::test_a_run_begins_with_a_warm_start_where_it_has_one": [
        ("Config", "warm_start"),
    ],
    "rlpipe/test_supervised.py::test_a_supervised_step_is_made_as_its_section_says": [
        ("SupervisedConfig", "packing"),
        ("SupervisedConfig", "sequences_per_step"),
    ],
    "rlpipe/test_supervised.py::test_a_warm_start_ends_at_its_loss_or_after_its_steps_and_leaves_a_new_optimizer": [
        ("WarmStartConfig", "learning_rate"),
        ("WarmStartConfig", "response_template"),
        ("WarmStartConfig", "sequences_per_step"),
        ("WarmStartConfig", "stop_at_loss"),
        ("WarmStartConfig", "warmup_steps"),
    ],
    "rlpipe/test_supervised.py::test_every_assistant_turn_of_a_conversation_is_trained_and_nothing_else": [
        ("DatasetConfig", "prompt_column"),
        ("SupervisedConfig", "conversations"),
    ],
    "rlpipe/test_supervised.py::test_examples_are_prepared_as_the_data_section_says": [
        ("DataConfig", "processes"),
    ],
    "rlpipe/test_supervised.py::test_long_sequences_are_left_out_and_counted": [
        ("SupervisedConfig", "max_sequence_tokens"),
    ],
    "rlpipe/test_supervised.py::test_only_the_answer_is_trained": [
        ("SupervisedConfig", "response_template"),
    ],
    "rlpipe/test_train_end_to_end.py::test_a_run_leaves_its_files": [
        ("TrackersConfig", "tensorboard", "FileNotFoundError"),
        ("TrackersConfig", "wandb"),
        ("TrackersConfig", "wandb_project"),
    ],
    "rlpipe/test_turn_credit.py::test_returns_are_discounted_and_the_outcome_belongs_to_the_last_turn": [
        ("AlgorithmConfig", "turn_discount"),
    ],
    "rollout/test_drafts.py::test_sglang_is_told_to_draft_with_the_models_own_layer": [
        ("DraftConfig", "method"),
        ("DraftConfig", "steps"),
        ("DraftConfig", "tokens", "ValidationError"),
        ("DraftConfig", "topk", "ValidationError"),
    ],
    "rollout/test_engine_client.py::test_requests_are_sent_as_the_rollout_says": [
        ("RolloutConfig", "migration"),
        ("RolloutConfig", "request_order"),
        ("RolloutConfig", "request_routing"),
    ],
    "rollout/test_engine_client.py::test_tokens_of_a_lost_engine_are_kept_where_others_would_come": [
        ("AlgorithmConfig", "routing_replay"),
        ("EngineConfig", "deterministic"),
    ],
    "rollout/test_fp8_engine.py::test_most_weights_and_half_of_the_pool_are_saved": [
        ("EngineConfig", "kv_cache_dtype"),
    ],
    "rollout/test_fp8_engine.py::test_sglang_takes_the_folder_for_one_that_is_stored_by_blocks": [
        ("EngineConfig", "quantization", "KeyError"),
    ],
    "rollout/test_rollout_healing.py::test_restarts_are_counted_within_the_hour_and_a_loss_once": [
        ("FaultConfig", "engine_restarts"),
    ],
    "rollout/test_rollout_parts.py::test_an_engine_leaves_room_only_where_its_pools_are_planned": [
        ("EngineConfig", "tensor_parallel"),
    ],
    "rollout/test_rollout_parts.py::test_engines_are_set_up_as_the_run_says": [
        ("Config", "seed"),
        ("JitConfig", "warm_up"),
        ("RolloutConfig", "engines"),
        ("WeightSyncConfig", "verify"),
    ],
    "rollout/test_rollout_parts.py::test_extra_arguments_are_passed_on_and_reserved_ones_name_our_key": [
        ("EngineConfig", "sglang"),
    ],
    "rollout/test_rollout_parts.py::test_sglang_is_started_as_the_engine_section_says": [
        ("EngineConfig", "context_tokens"),
        ("EngineConfig", "dtype"),
        ("EngineConfig", "max_running_requests"),
        ("EngineConfig", "memory_fraction"),
    ],
    "rollout/test_rollout_parts.py::test_the_default_kv_pool_holds_every_running_request_at_its_longest": [
        ("EngineConfig", "kv_cache_tokens"),
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
    "rollout/test_supervisor.py::test_probes_are_sent_as_often_as_is_said": [
        ("FaultConfig", "engine_probe_seconds"),
    ],
}
"""By test: class and name of the settings that it sees, with the error by which, where that is of a library."""

SETTINGS = [
    _ignored(section, setting, test, *error)
    for test, settings in _SEEN_BY.items()
    for section, setting, *error in settings
]
SEEN = {(section, setting) for settings in _SEEN_BY.values() for section, setting, *_ in settings}
