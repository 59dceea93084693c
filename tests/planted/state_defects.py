"""Defects of checkpoints, adapters and what a run keeps of itself."""

from planting import Defect

_CONTINUED = "actor/test_checkpoint_actor.py::test_two_processes_continue_with_the_same_bits"
_MEASURED = "rlpipe/test_adapter_updates.py::test_the_way_whose_update_and_responses_take_less_is_chosen"
_DATA = "rlpipe/test_early_ends.py::test_a_state_tells_which_data_its_position_belongs_to"
_FLOPS = "rlpipe/test_trained_share.py::test_flops_of_adapters"

STATES = [
    Defect(
        "a stage without adapters cannot resume",
        "actor/checkpoint.py",
        "loaded.get(_chunk_key(trainer, index), {})",
        "loaded[_chunk_key(trainer, index)]",
        _CONTINUED,
        only="pp2_adapters_of_one_stage",
    ),
    Defect(
        "a schedule goes on over the updates that were skipped before a checkpoint",
        "actor/checkpoint.py",
        '"applied_steps": trainer.optimizer.applied_steps,',
        '"applied_steps": trainer.counts.attempted,',
        "actor/test_checkpoint_actor.py::test_continuing_from_a_checkpoint_gives_the_same_bits",
        only="float32",
    ),
    Defect(
        "a checkpoint of another data type is loaded",
        "actor/checkpoint.py",
        '        "dtype": actor.dtype,\n',
        "",
        "actor/test_checkpoint_actor.py::test_damage_is_one_sentence",
        only="other_dtype",
    ),
    Defect(
        "a save throws the one away that is under way",
        "actor/checkpoint.py",
        '"saving a checkpoint")\n        self.finish()\n',
        '"saving a checkpoint")\n',
        "actor/test_checkpoint_actor.py::test_a_save_does_not_throw_away_the_one_that_is_under_way",
    ),
    Defect(
        "a checkpoint lacks the update that is on the device alone",
        "actor/checkpoint.py",
        "        self._trainer.optimizer.finish()\n        final",
        "        final",
        "actor/test_checkpoint_actor.py::test_what_slots_on_the_device_hold_alone_is_saved",
    ),
    Defect(
        "a policy begins as its reference",
        "actor/trainer.py",
        "            reference = ReferenceWeights(self._parameters())\n"
        "            load_hf(self.policy, self.description, self.options.model_path)\n",
        "            reference = ReferenceWeights(self._parameters())\n",
        "actor/test_train_steps.py::test_policy_and_reference_of_folders_of_their_own_are_what_lies_there",
    ),
    Defect(
        "a reference pass that fails leaves the reference in the policy's place",
        "actor/reference.py",
        "        try:\n            yield\n        finally:\n            self._copy(self._policy, self.parameters)\n",
        "        yield\n        self._copy(self._policy, self.parameters)\n",
        "actor/test_train_steps.py::test_reference_policy_is_kept_beside_the_policy",
    ),
    Defect(
        "an update after a skipped one is not compared with the engine",
        "actor/trainer.py",
        "any(before.applied for before in reports)",
        "bool(reports)",
        "actor/test_train_steps.py::test_an_update_after_another_does_not_take_the_policy_s_change_for_a_difference_"
        "between_engine_and_actor",
        error="KeyError",
    ),
    Defect(
        "the dropout of adapters ends with the first pass of log-probabilities",
        "actor/hf/adapter_modules.py",
        "        for lora in found:\n            lora.train()\n",
        "        pass\n",
        "actor/test_train_steps.py::test_adapters_leave_inputs_out_again_after_a_pass_of_log_probabilities",
    ),
    Defect(
        "tensor ranks drop other inputs of a factor that they share",
        "actor/layers/lora.py",
        "_OWN if own else _SAME_EVERYWHERE",
        "_OWN",
        "actor/test_lora_checkpoint.py::test_dropout_leaves_a_factor_that_all_have_the_same_everywhere",
    ),
    Defect(
        "adapters begin alike whatever the seed",
        "actor/hf/adapter_weights.py",
        'f"{self._seed} {name}"',
        'f"{name}"',
        "actor/test_lora_settings.py::test_factors_of_other_names_and_of_other_seeds_begin_otherwise",
    ),
    Defect(
        "the loss of multi-token prediction is of one context rank",
        "actor/reduction.py",
        "get_data_parallel_group(with_context_parallel=True)",
        "get_data_parallel_group()",
        "actor/test_parity_layouts.py::test_two_processes_train_as_one",
        only="mtp-cp2_mtp",
    ),
    Defect(
        "the wait of an update for a checkpoint is told nobody",
        "actor/worker.py",
        "                **self._checkpointer.take_metrics(),\n",
        "",
        "actor/test_train_group.py::test_a_training_call_reports_steps_metrics_and_the_seconds_of_all_ranks",
    ),
    Defect(
        "the most memory is the last",
        "actor/memory_peaks.py",
        "max(self._host_bytes or 0, used_bytes())",
        "used_bytes()",
        "actor/test_host_memory.py::test_the_most_memory_since_the_last_look_is_told_once",
    ),
    Defect(
        "a response is too long by the limit of all data",
        "rlpipe/training/learner.py",
        "max_response_tokens=self._config.longest_training_response_tokens",
        "max_response_tokens=self._config.rollout.max_response_tokens",
        "rlpipe/test_learner.py::test_a_response_is_too_long_by_the_limit_of_the_data",
    ),
    Defect(
        "adapters go the slower way",
        "rlpipe/training/adapter_updates.py",
        'trials["alone"].seconds < trials["merged"].seconds',
        'trials["alone"].seconds > trials["merged"].seconds',
        _MEASURED,
    ),
    Defect(
        "the way of adapters is chosen by their update alone",
        "rlpipe/training/adapter_updates.py",
        "return self.update_seconds + self.iteration_tokens / self.tokens_per_second",
        "return self.update_seconds",
        _MEASURED,
    ),
    Defect(
        "the first update of a way counts as each",
        "rlpipe/training/adapter_updates.py",
        "    weights.push(version)  # brings what later updates find there\n",
        "",
        _MEASURED,
    ),
    Defect(
        "what was generated to choose a way counts in the first iteration",
        "rlpipe/training/adapter_updates.py",
        "    pool.take_usage()  # belongs to no iteration\n",
        "",
        _MEASURED,
    ),
    Defect(
        "an actor whose call failed is asked to save",
        "rlpipe/training/checkpoints.py",
        "if self._grace_seconds and (isinstance(error, KeyboardInterrupt) or self._actor.answering):",
        "if self._grace_seconds:",
        "rlpipe/test_early_ends.py::"
        "test_an_actor_whose_call_failed_is_not_asked_to_save_and_one_that_was_interrupted_is",
    ),
    Defect(
        "a signal in the middle of a call saves nothing",
        "rlpipe/training/checkpoints.py",
        "if self._grace_seconds and (isinstance(error, KeyboardInterrupt) or self._actor.answering):",
        "if self._grace_seconds and self._actor.answering:",
        "rlpipe/test_early_ends.py::"
        "test_an_actor_whose_call_failed_is_not_asked_to_save_and_one_that_was_interrupted_is",
    ),
    Defect(
        "what is in the way of a last save is not ended",
        "rlpipe/training/checkpoints.py",
        "                    interrupt()\n",
        "",
        "rlpipe/test_early_ends.py::test_what_may_be_in_the_way_of_a_save_is_ended_before_it",
    ),
    Defect(
        "a checkpoint does not tell which data its position belongs to",
        "rlpipe/training/session.py",
        "position.position, pending, fingerprint, lengths)",
        'position.position, pending, "", lengths)',
        _DATA,
    ),
    Defect(
        "a supervised checkpoint does not tell which data its position belongs to",
        "rlpipe/training/sft.py",
        "at.position, data=self.examples.fingerprint)",
        "at.position)",
        _DATA,
    ),
    Defect(
        "what is left of a replaced run takes the place of the one that has begun",
        "rlpipe/training/opening.py",
        "    if has_begun(directory):\n        shutil.rmtree(replaced)\n        return\n",
        "",
        "rlpipe/test_opening.py::test_what_is_left_of_a_replaced_run_never_takes_the_place_of_one_that_has_begun",
    ),
    Defect(
        "a frozen embedding that is the head saves nothing",
        "rlpipe/training/trained_share.py",
        "frozen, tied=policy.tied_embeddings)",
        "frozen, tied=False)",
        "rlpipe/test_trained_share.py::test_a_frozen_embedding_that_is_the_head_saves_the_product_of_the_head",
    ),
    Defect(
        "a plan takes adapted experts for frozen ones",
        "rlpipe/training/trained_share.py",
        "untrained=work, trained_experts=experts)",
        "untrained=work, trained_experts=False)",
        "rlpipe/test_trained_share.py::test_plans_count_what_is_trained",
    ),
    Defect(
        "an adapter of all experts has the FLOPs of one of them",
        "rlpipe/training/trained_share.py",
        "return adapted.parameters * adapted.weight.sources[0].shape[0]",
        "return adapted.parameters",
        "rlpipe/test_trained_share.py::test_every_chosen_expert_has_the_flops_of_its_adapter",
        only="shared",
    ),
    Defect(
        "a look-up of an adapter counts as a product",
        "rlpipe/training/trained_share.py",
        "return prod(adapted.b.sources[0].shape)",
        "return adapted.parameters",
        _FLOPS,
    ),
]
