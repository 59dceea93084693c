"""Realistic defects, each with the test that has to turn red."""

from episode_defects import EPISODES
from layer_defects import LAYERS
from planting import Defect
from setting_defects import SETTINGS

_ALGORITHMS = [
    Defect(
        "advantage: standard deviation over the batch instead of the group",
        "rlpipe/algorithms/advantages.py",
        "return np.sqrt(squares / np.maximum(np.bincount(groups) - 1, 1))[groups]",
        "return np.full(len(centred), np.sqrt(squares.sum() / max(len(centred) - 1, 1)))",
        "rlpipe/test_advantages.py::test_group_advantages_by_hand_with_an_equal_group_and_a_group_of_one",
    ),
    Defect(
        "advantage: leave-one-out without its factor",
        "rlpipe/algorithms/advantages.py",
        "return _centred(batch.returns, batch.groups) * sizes / np.maximum(sizes - 1, 1)",
        "return _centred(batch.returns, batch.groups) * sizes / sizes",
        "rlpipe/test_advantages.py::test_rloo_is_the_score_less_the_mean_of_the_others",
    ),
    Defect(
        "advantage: wrong sign",
        "rlpipe/batching/sequences.py",
        "        advantages=_predicting(advantages, prompt, response),",
        "        advantages=-_predicting(advantages, prompt, response),",
        "rlpipe/test_batching_packs.py::test_layout_of_a_pack_by_hand",
    ),
    Defect(
        "advantage: token-level ones are overlooked",
        "rlpipe/shared/sample_table.py",
        "if sample.advantage is None or sample.token_advantages is None:",
        "if True:",
        "rlpipe/test_batching_packs.py::test_token_advantages_take_precedence",
    ),
    Defect(
        "truncated responses are trained although they are to be masked",
        "rlpipe/algorithms/compute.py",
        "[mask_truncated(episode) for episode in usable] if config.overlong.mask_truncated else usable",
        "usable",
        "rlpipe/test_advantages.py::test_overlong_filtering_masks_the_loss_but_keeps_the_score",
    ),
    Defect(
        "KL estimator: k3 of the other direction",
        "rlpipe/shared/kl.py",
        "expm1(-difference) + difference)",
        "expm1(difference) - difference)",
        "actor/test_loss_parts.py::test_kl_estimators",
    ),
    Defect(
        "clip: bounds swapped",
        "actor/losses/clipped.py",
        "ratio.clamp(1 - options.clip_low, 1 + options.clip_high)",
        "ratio.clamp(1 - options.clip_high, 1 + options.clip_low)",
        "actor/test_policy_losses.py::test_ppo_clip_with_clip_higher",
    ),
    Defect(
        "clip: the optimistic bound",
        "actor/losses/clipped.py",
        "token_loss=torch.maximum(plain, clipped)",
        "token_loss=torch.minimum(plain, clipped)",
        "actor/test_policy_losses.py::test_ppo_clip_with_clip_higher",
    ),
    Defect(
        "dual clip of positive advantages too",
        "actor/losses/clipped_variants.py",
        "bounded = (inputs.advantages < 0) & (clipped.token_loss > bound)",
        "bounded = clipped.token_loss > bound",
        "actor/test_policy_losses.py::test_dual_clip_bounds_only_negative_advantages",
    ),
    Defect(
        "GSPO: arithmetic mean of the ratios",
        "actor/losses/clipped_variants.py",
        "inputs.to_tokens(inputs.sequence_mean(log_ratio.detach()))",
        "inputs.to_tokens(inputs.sequence_mean(log_ratio.detach().exp()).log())",
        "actor/test_policy_losses.py::test_gspo_uses_the_geometric_mean_of_each_response",
    ),
    Defect(
        "importance weight without its bound",
        "actor/losses/correction.py",
        "return weight if options.weight_max is None else weight.clamp(max=options.weight_max)",
        "return weight",
        "actor/test_policy_losses.py::test_mismatch_corrections",
    ),
    Defect(
        "on-policy ratio with a gradient on both sides",
        "actor/losses/types.py",
        "return self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs",
        "return self.logprobs if self.old_logprobs is None else self.old_logprobs",
        "actor/test_policy_losses.py::test_on_policy_the_gradient_is_that_of_reinforce",
    ),
    Defect(
        "entropy is punished",
        "actor/losses/objective.py",
        "token_loss - options.entropy_coefficient * inputs.entropy",
        "token_loss + options.entropy_coefficient * inputs.entropy",
        "actor/test_policy_losses.py::test_kl_and_entropy_terms_of_the_objective",
    ),
    Defect(
        "no pass for old log-probabilities with several updates an iteration",
        "rlpipe/config/algorithm.py",
        "(stale or self.updates_per_iteration > 1)",
        "stale",
        "rlpipe/test_advantages_config.py::test_the_policy_before_the_update_is_asked_where_the_update_leaves_it",
    ),
]

_PACKS = [
    Defect(
        "loss weights with the denominator of the pack",
        "rlpipe/batching/training_packs.py",
        "laid = lay(step[members], weights[members], counts[counts > 0])",
        "laid = lay(step[members], weights[members] / np.repeat(counts, counts), counts[counts > 0])",
        "rlpipe/test_batching_packs.py::test_every_sample_once_within_budget_and_equal_counts",
    ),
    Defect(
        "mask shifted by one",
        "rlpipe/batching/sequences.py",
        "values[prompt - 1 : -1] = response_values",
        "values[prompt:] = response_values",
        "rlpipe/test_batching_packs.py::test_layout_of_a_pack_by_hand",
    ),
    Defect(
        "tokens of tools are trained",
        "rlpipe/batching/build_pack.py",
        "weights[span] = sequence.loss_mask * np.float32(weight)",
        "weights[span] = np.float32(weight)",
        "rlpipe/test_batching_packs.py::test_layout_of_a_pack_by_hand",
    ),
    Defect(
        "positions go on over the sequences of a pack",
        "rlpipe/batching/build_pack.py",
        "positions = np.arange(total) - np.repeat(starts, ends - starts)",
        "positions = np.arange(total)",
        "rlpipe/test_batching_packs.py::test_layout_of_a_pack_by_hand",
    ),
    Defect(
        "log-probabilities of one sample beside those of another",
        "rlpipe/batching/logprobs.py",
        "return list(zip(pack.sample_ids, pack.cu_seqlens_padded, pack.lengths_tokens, strict=False))",
        "return list(zip(reversed(pack.sample_ids), pack.cu_seqlens_padded, pack.lengths_tokens, strict=False))",
        "rlpipe/test_batching_packs.py::test_logprobs_travel_from_forward_packs_to_training_packs",
    ),
    Defect(
        "a packed sequence attends to the one before",
        "actor/layers/packed.py",
        '        qkv_format="thd",\n        ends=ends,',
        '        qkv_format="thd",\n        ends=(0, total),',
        "actor/test_parity_gradients.py::test_no_sequence_touches_another",
    ),
    Defect(
        "routes of the layer before are replayed",
        "actor/layers/router.py",
        "sequences.routes[:, layer_index]",
        "sequences.routes[:, layer_index - 1]",
        "actor/test_routing_replay.py::test_the_routers_own_choices_replayed_change_nothing",
    ),
]

_MODEL = [
    Defect(
        "log-probabilities at temperature 1 whatever was sampled",
        "actor/passes.py",
        "        temperatures=prepared.temperatures,",
        "        temperatures=None,",
        "actor/test_train_steps.py::test_temperature_sharpens_the_log_probabilities",
    ),
    Defect(
        "the temperature is missing in the gradient",
        "actor/head.py",
        "                gradient.div_(temperatures[rows, None])",
        "                pass",
        "actor/test_head_chunked.py::test_equals_the_unchunked_head_with_ragged_chunks_temperature_and_entropy",
    ),
    Defect(
        "the head's gradient of one tensor rank alone",
        "actor/head.py",
        "return shard.reduce(self._hidden), weight, low",
        "return self._hidden, weight, low",
        "actor/test_head_chunked.py::test_two_ranks_equal_one_with_padded_vocabulary_and_sequence_parallelism",
    ),
    Defect(
        "gradient of the gather over context ranks: the local part only",
        "actor/layers/context_parallel.py",
        "        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)",
        "        local.copy_(gradient.chunk(ctx.group.size())[ctx.group.rank()])",
        "actor/test_parity_gradients.py::test_the_gather_over_context_ranks_sums_gradients_of_all_ranks",
    ),
    Defect(
        "gradients of parameters that tensor ranks share are not summed",
        "actor/optimizer.py",
        "        reduce_replicated_gradients(self._chunks)",
        "        pass",
        "actor/test_parity_layouts.py::test_two_processes_train_as_one",
        "tp2 or tensor",
    ),
    Defect(
        "gradients of experts lose the tokens of other tensor ranks",
        "actor/layers/experts.py",
        "        weight.allreduce = False\n",
        "        weight.allreduce = True\n",
        "actor/test_parity_layouts.py::test_two_processes_train_as_one",
    ),
    Defect(
        "weights of the chosen experts are not normalised",
        "actor/layers/router.py",
        "    return values.softmax(-1), chosen",
        "    return logits.softmax(-1).gather(1, chosen), chosen",
        "actor/test_parity_transformers.py::test_logprobs_and_gradients_equal_transformers",
    ),
    Defect(
        "the loss of multi-token prediction moves the policy",
        "actor/models/policy_model.py",
        "self._reached(hidden.detach()), embedded",
        "self._reached(hidden), embedded",
        "actor/test_parity_gradients.py::test_multi_token_prediction_leaves_the_policy_gradient_alone",
    ),
    Defect(
        "the last stage keeps a head that is not the tied embedding",
        "actor/hf/load_weights.py",
        "        _copy_tied(entries, mine)\n",
        "",
        "actor/test_parity_layouts.py::test_two_processes_train_as_one",
        "tied",
    ),
    Defect(
        "the reference pass uses the policy",
        "actor/trainer.py",
        "weights = self.reference.swapped_in()",
        "weights = nullcontext()",
        "actor/test_train_steps.py::test_reference_policy_is_kept_beside_the_policy",
    ),
]

_OPTIMIZER = [
    Defect(
        "gradients in bfloat16 are added up in bfloat16",
        "actor/trainer.py",
        "grad_reduce_in_fp32=True",
        "grad_reduce_in_fp32=False",
        "actor/test_train_steps.py::test_gradients_of_half_precision_are_added_up_in_full",
    ),
    Defect(
        "weight decay of norms and biases",
        "actor/optimizer.py",
        'self.options.weight_decay * group["wd_mult"]',
        "self.options.weight_decay",
        "actor/test_train_steps.py::test_weight_decay_spares_parameters_with_one_dimension",
    ),
    Defect(
        "gradients are clipped before they are added up over ranks",
        "actor/optimizer.py",
        "        finalize_model_grads(self._chunks, None)\n",
        "        for chunk in self._chunks:\n"
        "            grads = [p.main_grad for p in chunk.parameters() if getattr(p, 'main_grad', None) is not None]\n"
        "            norm = float(torch.stack([g.float().norm() for g in grads]).norm())\n"
        "            for grad in grads:\n"
        "                grad.mul_(min(1.0, self.options.max_gradient_norm / (norm + 1e-6)))\n"
        "        finalize_model_grads(self._chunks, None)\n",
        "actor/test_parity_layouts.py::test_two_processes_train_as_one",
    ),
    Defect(
        "the schedule goes on over a skipped update",
        "actor/trainer.py",
        "            synchronize_compute()\n        self.counts",
        "            self.optimizer.applied_steps += reason is not None\n"
        "            synchronize_compute()\n        self.counts",
        "actor/test_train_steps.py::test_non_finite_loss_skips_the_step_and_touches_nothing",
    ),
    Defect(
        "warm-up late by one step",
        "actor/schedule.py",
        "return peak * (step + 1) / options.warmup_steps",
        "return peak * step / options.warmup_steps",
        "actor/test_train_layout.py::test_learning_rate_warms_up_and_decays",
    ),
    Defect(
        "a new optimizer goes on with the old moments",
        "actor/trainer.py",
        "        self.optimizer.close()\n        self.optimizer = self._new_optimizer(options, total_steps)",
        "        self.optimizer.options, self.optimizer.total_steps = options, total_steps",
        "actor/test_train_steps.py::test_reset_optimizer_starts_over_from_the_present_weights",
    ),
    Defect(
        "frozen parameters are trained",
        "actor/trainer.py",
        "                    parameter.requires_grad_(False)",
        "                    pass",
        "actor/test_train_steps.py::test_frozen_parameters_stay_and_bad_patterns_are_refused",
    ),
    Defect(
        "metrics are means over packs instead of tokens",
        "actor/reduction.py",
        "name: a / max(b, 1.0) for name, a, b in",
        "name: a / max(b, 1.0) * (1 + len(outputs)) / 2 for name, a, b in",
        "actor/test_train_parallel_steps.py::test_every_metric_equals_the_one_of_a_single_process",
    ),
]

_RESUME = [
    Defect(
        "the step count is not restored",
        "actor/optimizer_content.py",
        'torch.full_like(state["step"], float(applied_steps))',
        'torch.zeros_like(state["step"])',
        "actor/test_checkpoint_actor.py::test_continuing_from_a_checkpoint_gives_the_same_bits",
    ),
    Defect(
        "every process goes on with the random numbers of the first",
        "actor/checkpoint.py",
        "own = saved[dist.get_rank()]",
        "own = saved[0]",
        "actor/test_checkpoint_actor.py::test_two_processes_continue_with_the_same_bits",
    ),
    Defect(
        "the position in the data is off by one after a resume",
        "rlpipe/data/stream.py",
        "        self._shuffle = shuffle\n        self.state = state\n",
        "        self._shuffle = shuffle\n"
        "        self.state = StreamState(state.epoch, state.position + (state.position > 0))\n",
        "rlpipe/test_data.py::test_the_stream_takes_every_prompt_once_an_epoch_and_resumes",
    ),
    Defect(
        "every epoch has the order of the first",
        "rlpipe/data/stream.py",
        'random.Random(f"prompt order {self._seed} {epoch}")',
        'random.Random(f"prompt order {self._seed}")',
        "rlpipe/test_data.py::test_the_stream_takes_every_prompt_once_an_epoch_and_resumes",
    ),
    Defect(
        "an epoch ends one prompt early",
        "rlpipe/data/stream.py",
        "ended = position == len(self._prompts)",
        "ended = position >= len(self._prompts) - 1",
        "rlpipe/test_data.py::test_how_many_are_taken_at_a_time_does_not_change_the_stream",
    ),
    Defect(
        "damaged files of a checkpoint are loaded",
        "actor/checkpoint.py",
        "        _check_content(path, state)\n",
        "",
        "actor/test_checkpoint_actor.py::test_damage_is_one_sentence",
    ),
    Defect(
        "prompts that were taken and not trained are forgotten",
        "rlpipe/generation/group_source.py",
        "        groups = [*self._waiting, *self._broken, *self._tasks.values(), *finished]\n",
        "        groups = [*self._waiting, *self._broken, *finished]\n",
        "rlpipe/test_group_source.py::test_async_hands_out_groups_as_they_finish_within_the_staleness",
    ),
]

_ROLLOUT = [
    Defect(
        "samples are trained twice after a refill",
        "rlpipe/generation/group_source.py",
        "        del quota.finished[:wanted]\n",
        "",
        "rlpipe/test_group_source.py",
    ),
    Defect(
        "tokens of a continued response are counted again",
        "rlpipe/generation/group_source.py",
        "self._tokens += tokens - len(partial.token_ids)",
        "self._tokens += tokens",
        "rlpipe/test_group_source.py::"
        "test_partial_responses_go_on_in_the_next_iteration_with_the_versions_of_their_tokens",
    ),
    Defect(
        "dropped groups are not counted",
        "rlpipe/generation/group_source.py",
        '            self._counts[f"groups_dropped_{reason}"] += 1\n            self._replace',
        "            self._replace",
        "rlpipe/test_group_source.py",
    ),
    Defect(
        "responses one version too old are trained",
        "rlpipe/generation/group_source.py",
        "self._version - oldest <= self._config.max_staleness else",
        "self._version - oldest <= self._config.max_staleness + 1 else",
        "rlpipe/test_group_source.py",
    ),
    Defect(
        "the reward of another sample",
        "rlpipe/generation/producer.py",
        "        return tuple(branch.changed(reward=reward) for branch in episode)",
        "        last, self._last = getattr(self, '_last', reward), reward\n"
        "        return tuple(branch.changed(reward=last) for branch in episode)",
        "rlpipe/test_train_end_to_end.py::test_every_sample_has_the_reward_of_its_own_response",
    ),
    Defect(
        "the label is shown to the policy",
        "rlpipe/data/prompts.py",
        "        token_ids = self.special.token_ids(text)\n",
        "        text += str(row.values[dataset.label_column])\n        token_ids = self.special.token_ids(text)\n",
        "rlpipe/test_data.py::test_prompts_are_rendered_and_long_ones_counted",
    ),
    Defect(
        "tokens of tools are trained as the policy's",
        "rlpipe/generation/conversation.py",
        "        self._mask += LossMask.filled(0, len(token_ids))",
        "        self._mask += LossMask.filled(1, len(token_ids))",
        "rlpipe/test_conversation.py::test_tool_output_is_context_and_is_not_trained",
    ),
    Defect(
        "all samples of a run have one seed",
        "rollout/requests.py",
        'f"{run_seed}/{sample_id}"',
        'f"{run_seed}"',
        "rollout/test_rollout_parts.py::test_seeds_are_63_bits_and_differ_by_run_and_sample",
    ),
    Defect(
        "the versions of a continued response are forgotten",
        "rollout/partial_response.py",
        "merged_spans((*self.versions, VersionSpan(version, len(token_ids))))",
        "(VersionSpan(version, len(self.token_ids) + len(token_ids)),)",
        "rollout/test_rollout_interrupt.py::test_what_was_begun_grows_and_shrinks_with_its_versions",
    ),
    Defect(
        "the new version is not recorded",
        "rollout/engine.py",
        "            self._responses.version = version\n",
        "            pass\n",
        "rollout/test_rollout_engine.py::test_new_weights_reach_all_engines_with_their_version_and_equal_checksums",
    ),
    Defect(
        "keys and values of the weights before are used again",
        "rollout/memory_release.py",
        "        while not (await self._watch.call(self._manager.flush_cache())).success:\n",
        "        while False:\n",
        "rollout/test_prefix_cache.py::test_nothing_of_older_weights_is_used",
    ),
    Defect(
        "a bucket of weights stays stale",
        "rollout/weights/receiver.py",
        "            self._loader.load(self._model,",
        "            (self._loader.load if self._taken != 1 else (lambda *_: None))(self._model,",
        "rollout/test_rollout_engine.py::test_new_weights_reach_all_engines_with_their_version_and_equal_checksums",
    ),
    Defect(
        "an engine that comes back samples with the weights of the model's folder",
        "rollout/fleet.py",
        "waits = self._holds_sent_weights or engine.setup.awaits_weights",
        "waits = engine.setup.awaits_weights",
        "rollout/test_rollout_healing.py::test_an_engine_that_starts_while_weights_are_sent_awaits_them",
    ),
    Defect(
        "buckets of weights in the wrong order",
        "rollout/weights/receiver.py",
        "        for bucket in plan:\n            update.take(",
        "        for bucket in reversed(plan):\n            update.take(",
        "rollout/test_rollout_engine.py::test_new_weights_reach_all_engines_with_their_version_and_equal_checksums",
    ),
    Defect(
        "all tokens of a draft are drawn with one random number",
        "rollout/sglang_patches/draft_verification.py",
        "sampler._sample_from_probs(probabilities, repeated, positions, unfiltered)",
        "sampler._sample_from_probs(probabilities, repeated, positions[::nodes].repeat_interleave(nodes), unfiltered)",
        "rollout/test_drafts.py::test_what_is_drawn_after_a_draft_is_what_is_drawn_without_one",
    ),
    Defect(
        "the layer that drafts keeps its old weights",
        "rollout/weights/drafting_model.py",
        "            self._drafting.load_weights(drafting)\n",
        "            pass\n",
        "rollout/test_drafts.py::test_an_update_reaches_the_model_and_the_one_that_drafts_for_it",
    ),
    Defect(
        "a response goes on past the end token that a draft brought with others",
        "rollout/partial_response.py",
        "keep = min(len(response.token_ids), limit_tokens, *(() if end is None else (end,)))",
        "keep = min(len(response.token_ids), limit_tokens)",
        "rollout/test_drafts.py::test_a_run_of_tokens_does_not_go_past_what_ends_the_response",
    ),
    Defect(
        "scales of 8-bit weights are left out",
        "rlpipe/shared/block_fp8.py",
        '        yield f"{name}{SCALE}", scales\n',
        '        yield f"{name}{SCALE}", torch.ones_like(scales)\n',
        "rollout/test_weight_loader.py::test_quantized_experts_are_copied_with_their_scales",
    ),
    Defect(
        "weights in 8 bits do not come into the bucket",
        "actor/weight_sender.py",
        "            quantize_into(piece, scales, tensor)\n",
        "            quantize_into(torch.empty_like(piece), scales, tensor)\n",
        "actor/test_hf_weights.py::test_what_was_loaded_streams_out_unchanged",
    ),
    Defect(
        "conversations beside each other share what a tokenizer holds",
        "rlpipe/data/special_text.py",
        "return copy.deepcopy(self._tokenizer)",
        "return self._tokenizer",
        "rlpipe/test_special_text.py::test_conversations_beside_each_other_get_the_tokens_that_each_gets_alone",
        error="RuntimeError",
    ),
    Defect(
        "a response that moves to another engine begins anew there",
        "rollout/client.py",
        "replace(request, partial=generation.partial)",
        "replace(request, partial=request.partial)",
        "rollout/test_migration.py::test_what_one_engine_began_another_ends",
    ),
    Defect(
        "what has the most left moves, and keeps the other engine as long",
        "rollout/migration.py",
        "one = self.movable.pop()",
        "one = self.movable.pop(0)",
        "rollout/test_migration.py::test_the_engine_that_ends_last_hands_on_what_has_least_left",
    ),
]

_MEASUREMENT = [
    Defect(
        "FLOPs of Gated DeltaNet by attention's pairs",
        "rlpipe/flops/layers.py",
        "return 8 * self.value_heads * self.value_head_dim**2",
        "return 4 * self.value_heads * self.value_head_dim**2",
        "rlpipe/test_flops_pinned.py::test_layers_of_the_hybrid_model",
    ),
    Defect(
        "phases are counted twice",
        "rlpipe/training/iteration.py",
        "whole = self._clock.seconds.pop(phase)",
        "whole = self._clock.seconds[phase]",
        "rlpipe/test_iteration.py",
    ),
    Defect(
        "the guard skips a call that is not safe",
        "actor/comm_guard/guard.py",
        '== "guard"',
        '== "skip"',
        "actor/test_comm_guard.py::test_skipped_operations_are_probed_once_and_counted",
    ),
    Defect(
        "the lag of older weights counts by spans",
        "rlpipe/training/summaries.py",
        "sum((version - span.version) * span.tokens for span in spans) / tokens",
        "sum(version - span.version for span in spans) / len(spans)",
        "rlpipe/test_episode_branches.py::test_the_lag_of_older_weights_counts_by_tokens",
    ),
    Defect(
        "secrets stand in messages",
        "rlpipe/shared/secret_text.py",
        "            text = text.replace(value, HIDDEN)",
        "            pass",
        "rlpipe/test_strangers_and_secrets.py::test_secrets_in_sentences_are_hidden",
    ),
]

DEFECTS = (
    *_ALGORITHMS,
    *_PACKS,
    *_MODEL,
    *_OPTIMIZER,
    *_RESUME,
    *_ROLLOUT,
    *_MEASUREMENT,
    *LAYERS,
    *EPISODES,
    *SETTINGS,
)
