"""Defects of what is kept and told: which prompts and seeds were used, what an early end saves, what engines hear."""

from planting import Defect

BOOKKEEPING = [
    Defect(
        "a group that has just ended is unfinished twice",
        "rlpipe/generation/group_source.py",
        "sorted({group.number for group in groups})",
        "sorted(group.number for group in groups)",
        "rlpipe/test_group_source.py::test_a_prompt_is_unfinished_once_at_every_moment",
    ),
    Defect(
        "a group whose engine failed is forgotten",
        "rlpipe/generation/group_source.py",
        "[*self._waiting, *self._broken, *self._tasks.values(), *finished]",
        "[*self._waiting, *self._tasks.values(), *finished]",
        "rlpipe/test_group_source.py::test_a_group_whose_engine_failed_is_not_forgotten",
    ),
    Defect(
        "whole groups beyond those that an iteration needs vanish",
        "rlpipe/generation/group_source.py",
        "            for group in quota.finished:\n                self._keep_or_drop(group)\n",
        "",
        "rlpipe/test_group_source.py::test_whole_groups_beyond_those_that_an_iteration_needs_are_kept_or_counted",
    ),
    Defect(
        "prompts that still wait after a resume are in no further checkpoint",
        "rlpipe/generation/producer.py",
        "tuple(sorted([*unfinished, *self._pending]))",
        "tuple(unfinished)",
        "rlpipe/test_producer.py::test_prompts_that_still_wait_to_be_taken_again_are_kept_for_the_next_run",
    ),
    Defect(
        "all data sets are sampled as the first one says",
        "rlpipe/generation/producer.py",
        "self._sampling[prompt.dataset]",
        "next(iter(self._sampling.values()))",
        "rlpipe/test_producer.py::test_each_prompt_is_sampled_as_its_own_data_set_says",
    ),
    Defect(
        "an episode is graded by its first branch",
        "rlpipe/generation/producer.py",
        "        sample = episode[-1]\n",
        "        sample = episode[0]\n",
        "rlpipe/test_producer.py::test_what_is_graded_of_an_episode_is_what_was_written_last",
    ),
    Defect(
        "engines are not told the pace by which responses move",
        "rlpipe/generation/producer.py",
        "        self._client.note_pace(pace)\n",
        "",
        "rlpipe/test_producer.py::test_the_engines_are_told_their_pace_and_a_batch_has_what_makers_of_episodes_count",
    ),
    Defect(
        "what makers of episodes count is in no row",
        "rlpipe/generation/producer.py",
        "replace(batch, metrics=batch.metrics | self._inputs.episodes.take_metrics())",
        "batch",
        "rlpipe/test_producer.py::test_the_engines_are_told_their_pace_and_a_batch_has_what_makers_of_episodes_count",
    ),
    Defect(
        "a sample does not tell the temperature that it was drawn with",
        "rlpipe/generation/conversation.py",
        "            temperature=self._prompt_request.sampling.temperature,\n",
        "",
        "rlpipe/test_conversation.py::test_a_sample_has_the_temperature_that_it_was_drawn_with",
    ),
    Defect(
        "each response of a group meets another environment",
        "rlpipe/generation/conversation.py",
        "sample_seed(self._run_seed, self._prompt_request.group_id)",
        "sample_seed(self._run_seed, self._prompt_request.sample_id)",
        "environments/test_episodes.py::test_all_responses_of_a_group_meet_the_same_environment",
    ),
    Defect(
        "tool output that fits exactly leaves a response for no further token",
        "rlpipe/generation/conversation.py",
        "if len(token_ids) >= self.remaining_tokens:",
        "if len(token_ids) > self.remaining_tokens:",
        "rlpipe/test_conversation.py::test_tool_output_that_fills_the_response_ends_it",
    ),
    Defect(
        "what is read counts to the weights that wrote first",
        "rlpipe/generation/conversation.py",
        "VersionSpan(spans[-1].version, len(token_ids))",
        "VersionSpan(spans[0].version, len(token_ids))",
        "rlpipe/test_conversation.py::test_what_is_read_counts_to_the_weights_that_wrote_last_before_it",
    ),
    Defect(
        "the sequence that began last is taken for the one written last",
        "rlpipe/generation/conversation.py",
        "        spoken.sort(key=lambda one: one.turns[-1].number)\n",
        "",
        "rlpipe/test_conversation.py::test_the_sequence_of_the_last_turn_is_the_last_of_its_episode",
    ),
    *(
        Defect(
            f"engines do not hear of {what}",
            "rlpipe/generation/conversation.py",
            f"            {line},\n",
            "",
            "rlpipe/test_conversation.py::"
            "test_engines_are_told_of_every_turn_when_it_is_wanted_and_how_long_it_will_be",
        )
        for what, line in (
            ("an evaluation that waits", "urgent=self._prompt_request.urgent"),
            ("what is spare", "spare=self._prompt_request.spare"),
            (
                "the length that is expected",
                "expected_tokens=expected_rest(self._prompt_request.expected_tokens, len(partial.token_ids))",
            ),
        )
    ),
    *(
        Defect(
            f"engines do not hear of an agent's {what}",
            "rlpipe/agents/agent_episode.py",
            f"                {what}=self.request.{what},\n",
            "",
            "agents/test_agent_maker.py::test_engines_are_told_what_is_urgent_and_what_is_spare",
        )
        for what in ("urgent", "spare")
    ),
    Defect(
        "choices that are asked for again are drawn with the numbers of the first",
        "rlpipe/agents/agent_episode.py",
        "self._asked[*read, wanted.seed] += wanted.choices",
        "self._asked[*read, wanted.seed] += 1",
        "agents/test_endpoint.py::test_choices_that_are_asked_for_again_are_drawn_anew",
    ),
    Defect(
        "an agent's time begins anew at each interruption",
        "rlpipe/agents/agent_maker.py",
        "            running.left_seconds -= time.perf_counter() - begin\n",
        "",
        "agents/test_agent_maker.py::test_the_time_of_an_agent_goes_on_after_an_interruption",
    ),
    Defect(
        "an evaluation has the prompt column of the training rows",
        "rlpipe/agents/agent_maker.py",
        "for one in (*config.data.train, *config.eval.datasets)}",
        "for one in config.data.train}",
        "agents/test_agent_maker.py::test_an_evaluation_has_a_prompt_column_of_its_own",
        error="KeyError",
    ),
    Defect(
        "all agents make the same random choices",
        "rlpipe/agents/agent_maker.py",
        "seed=sample_seed(self._run_seed, request.sample_id)",
        "seed=self._run_seed",
        "agents/test_agent_maker.py::test_each_agent_has_a_seed_of_its_own_that_recurs",
    ),
    Defect(
        "a policy that has changed is saved as that of the iteration before",
        "rlpipe/training/checkpoints.py",
        "        self.whole = None\n        record.finish",
        "        record.finish",
        "rlpipe/test_early_ends.py::test_nothing_is_saved_between_an_update_of_the_policy_and_the_end_of_its_iteration",
    ),
    Defect(
        "an early end saves nothing after the first iteration",
        "rlpipe/training/checkpoints.py",
        "        self.whole = state\n        raise_if_requested()",
        "        raise_if_requested()",
        "rlpipe/test_early_ends.py::test_what_the_last_iteration_left_is_what_an_early_end_saves",
    ),
    Defect(
        "grades that an evaluation lacks count to the next iteration",
        "rlpipe/training/evaluation.py",
        'metrics[f"eval/{dataset.name}/grading_failures_count"] = float(rollouts.take_grading_failures())',
        "pass",
        "rlpipe/test_evaluation.py::test_a_set_is_evaluated_before_the_first_iteration_every_few_and_after_the_last",
        error="KeyError",
    ),
    Defect(
        "dialogues are kept nowhere",
        "rlpipe/training/iteration.py",
        "                self._trackers.log_episodes(number, record.transcripts)\n",
        "",
        "rlpipe/test_iteration.py::test_dialogues_of_an_iteration_are_kept_in_the_folder_of_its_run",
        error="FileNotFoundError",
    ),
    Defect(
        "an update waits for responses in the mode async",
        "rlpipe/training/weight_sync.py",
        'in_flight = self._config.rollout.mode == "async"',
        "in_flight = False",
        "rlpipe/test_weight_sync.py::test_running_responses_are_interrupted_in_the_mode_async_alone",
    ),
    Defect(
        "an engine that is asked while it works is busy twice",
        "rollout/engine_usage.py",
        "            self._since = now\n        interval",
        "        interval",
        "rollout/test_rollout_parts.py::test_a_busy_stretch_counts_once_however_often_it_is_asked_for",
    ),
    Defect(
        "processes of the actor import a tracker and leave its folders behind",
        "actor/group.py",
        '        sys.modules["wandb"] = None  # type: ignore[assignment]\n',
        "",
        "actor/test_train_group.py::test_no_process_has_the_tracker_that_megatron_imports",
    ),
]
