"""Defects of the objective, of episodes and their credit, of rewards and of what is evaluated."""

from planting import Defect

EPISODES = [
    Defect(
        "the divergence from the reference is rewarded",
        "actor/losses/objective.py",
        "token_loss = token_loss + options.kl.coefficient",
        "token_loss = token_loss - options.kl.coefficient",
        "actor/test_policy_losses.py::test_kl_and_entropy_terms_of_the_objective",
    ),
    Defect(
        "the divergence in the reward is that of the token after",
        "rlpipe/algorithms/shaping.py",
        "span = slice(sample.prompt_tokens - 1, sample.total_tokens - 1)",
        "span = slice(sample.prompt_tokens, sample.total_tokens)",
        "rlpipe/test_advantages.py::test_the_kl_of_a_response_is_that_of_the_tokens_that_predict_it",
    ),
    Defect(
        "sequences without a loss count in the mean",
        "rlpipe/batching/aggregation.py",
        "denominators = has_loss.sum() * trained",
        "denominators = len(trained) * trained",
        "rlpipe/test_batching_aggregation.py::test_weights_by_hand",
    ),
    Defect(
        "tokens of older weights keep their loss and those of the newest lose it",
        "rlpipe/algorithms/shaping.py",
        "np.repeat([span.version == version for",
        "np.repeat([span.version != version for",
        "rlpipe/test_advantages.py::test_tokens_of_other_weights_lose_their_loss_where_that_is_asked_for",
    ),
    Defect(
        "a response beyond its limit is punished without bound",
        "rlpipe/algorithms/shaping.py",
        "return max(-1.0, -over / buffer_tokens)",
        "return -over / buffer_tokens",
        "rlpipe/test_advantages.py::test_soft_overlong_punishment",
    ),
    Defect(
        "rewards of later turns are not discounted",
        "rlpipe/algorithms/turns.py",
        "later = discount * following[line]",
        "later = following[line]",
        "rlpipe/test_turn_credit.py::test_returns_are_discounted_and_the_outcome_belongs_to_the_last_turn",
    ),
    Defect(
        "one agent is credited with another's turns",
        "rlpipe/algorithms/turns.py",
        "line = lines.setdefault((number, turn.agent), len(lines))",
        "line = lines.setdefault((number, ''), len(lines))",
        "rlpipe/test_turn_credit.py::test_agents_answer_for_their_own_rewards_and_are_compared_with_themselves",
    ),
    Defect(
        "a response that branches share is trained in each of them",
        "rlpipe/agents/token_tree.py",
        "[trained_in[node.order] == index for node in leaf.path()]",
        "[True for _ in leaf.path()]",
        "agents/test_endpoint.py::test_branches_are_opened_counted_and_told_with_the_first_message_that_differs",
    ),
    Defect(
        "what an agent reads is trained",
        "rlpipe/agents/token_tree.py",
        "mask += (*((0,) * len(context)),",
        "mask += (*((1,) * len(context)),",
        "agents/test_endpoint.py::test_trained_tokens_are_the_sampled_ones_over_200_random_dialogues",
    ),
    Defect(
        "all answers to a prompt are drawn with one seed",
        "rlpipe/generation/response_seeds.py",
        "self._sample_id = request.sample_id",
        "self._sample_id = request.group_id",
        "rlpipe/test_conversation.py::"
        "test_a_turn_is_drawn_with_numbers_that_follow_from_its_sample_and_the_tokens_before_it",
    ),
    Defect(
        "groups of equal rewards are kept and the others dropped",
        "rlpipe/generation/filters.py",
        'return "equal_rewards" if len(scores) < 2 else None',
        'return "equal_rewards" if len(scores) >= 2 else None',
        "rlpipe/test_conversation.py::test_the_first_filter_that_drops_gives_the_reason",
    ),
    Defect(
        "graders count alike whatever their weights",
        "rewards/weighted.py",
        "score=sum(part.weight * reward.score for",
        "score=sum(reward.score for",
        "rewards/test_other_graders.py::test_weighted_sums_scores_and_keeps_the_parts",
    ),
    Defect(
        "supervised training learns the question too",
        "rlpipe/batching/sequences.py",
        "mask = _predicting(1 if answer_mask is None else answer_mask,",
        "mask = _predicting(1,",
        "rlpipe/test_supervised.py::test_every_assistant_turn_of_a_conversation_is_trained_and_nothing_else",
    ),
    Defect(
        "pass@k of the first k answers",
        "rlpipe/training/evaluation.py",
        "return 1.0 - comb(answers - correct, k) / comb(answers, k)",
        "return float(correct >= 1)",
        "rlpipe/test_iteration.py::test_pass_at_k_equals_the_share_of_subsets_with_a_correct_answer",
    ),
    Defect(
        "a failed answer leaves the accuracy",
        "rlpipe/training/evaluation.py",
        'metrics["accuracy"] = sum(map(sum, groups.values())) / count',
        'metrics["accuracy"] = sum(map(sum, groups.values())) / len(rewards)',
        "rlpipe/test_iteration.py::test_an_answer_without_a_reward_is_a_wrong_one",
    ),
]
