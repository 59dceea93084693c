"""From graded samples to an updated policy: the driver's side of training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from rlpipe.algorithms import AdvantageResult, compute_advantages, kl_by_sample_of, mask_off_policy
from rlpipe.batching import (
    BudgetAdvice,
    PackLimits,
    TrainingPacks,
    advise_budget,
    attach_logprobs,
    logprobs_by_sample,
    pack_for_logprobs,
    pack_for_training,
)
from rlpipe.batching.logprobs import LogprobsBySample
from rlpipe.batching.pack_plan import flops_cost
from rlpipe.batching.pack_routes import attach_routes, checked_routes
from rlpipe.config.root import Config
from rlpipe.flops.route_shape import route_shape
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.pack import PackFrame
from rlpipe.shared.sample import Sample
from rlpipe.shared.sample_table import SampleTable

if TYPE_CHECKING:
    from actor.group import ActorGroup, Pending
    from actor.train_report import TrainReport


class Learner:
    """Reference and old log-probabilities, advantages, packs and the update of one iteration."""

    def __init__(self, config: Config, actor: "ActorGroup") -> None:
        self._config = config
        self._actor = actor
        self._limits = PackLimits.training(config.actor)
        self._forward_limits = PackLimits.forward_only(config.actor)
        self._cost = flops_cost(config.model.path)
        replay = config.algorithm.routing_replay
        self._route_shape = route_shape(describe_model(config.model.path).shape) if replay else None

    def reference_logprobs(self, samples: Sequence[Sample]) -> LogprobsBySample | None:
        """Log-probabilities under the reference policy; None where no KL term needs them."""
        return self._logprobs(samples, "reference") if self._config.algorithm.kl.coefficient > 0 else None

    def old_logprobs(self, samples: Sequence[Sample], version: int) -> LogprobsBySample | None:
        """Log-probabilities under the policy before the update, which has weights of `version`.

        None where every token was sampled by that policy and one step is made, since they then equal the ones of the
        update's own forward pass; and where `algorithm.old_policy` takes the engine's.
        """
        stale = any(span.version != version for sample in samples for span in sample.versions)
        return self._logprobs(samples, "policy") if self._config.algorithm.needs_old_pass(stale) else None

    @property
    def old_policy_choice(self) -> str:
        """What the run will do about old log-probabilities, for its first lines."""
        algorithm = self._config.algorithm
        if not algorithm.needs_old_pass(stale=True):
            return "old log-probabilities: those that the engines report, no pass for them"
        if algorithm.needs_old_pass(stale=False):
            return f"old log-probabilities: a pass each iteration, for its {algorithm.updates_per_iteration} updates"
        if self._config.rollout.may_be_stale:
            return "old log-probabilities: a pass where responses are older than the policy, skipped elsewhere"
        return "old log-probabilities: pass skipped, each iteration is one on-policy step"

    def advantages(
        self, samples: SampleTable, reference: LogprobsBySample | None, old: LogprobsBySample | None, version: int
    ) -> AdvantageResult:
        """Advantages of the samples that can be trained, by weights of `version`."""
        if self._config.rollout.mask_off_policy:
            samples = samples.with_samples([mask_off_policy(sample, version) for sample in samples])
        kl = self._config.algorithm.kl
        penalties = None
        if reference is not None and kl.placement == "reward":
            penalties = kl_by_sample_of(samples, old, reference, kl.estimator)
        return compute_advantages(
            samples,
            self._config.algorithm,
            max_response_tokens=self._config.longest_training_response_tokens,
            kl_by_sample=penalties,
        )

    def pack(
        self, samples: Sequence[Sample], reference: LogprobsBySample | None, old: LogprobsBySample | None
    ) -> TrainingPacks:
        """The update's packs with the log-probabilities that its loss needs."""
        packs = pack_for_training(
            samples,
            self._limits,
            data_parallel=self._actor.layout.data_parallel,
            aggregation=self._config.algorithm.aggregation,
            norm_tokens=self._config.longest_training_response_tokens,
            updates=self._config.algorithm.updates_per_iteration,
            cost=self._cost,
        )
        packs = replace(packs, ranks=self._routed(packs.ranks, samples))
        in_loss = reference if self._config.algorithm.kl.placement == "loss" else None
        return replace(packs, ranks=attach_logprobs(packs.ranks, old=old, reference=in_loss))

    def advice(self, packs: TrainingPacks) -> BudgetAdvice:
        """Whether another token budget would need fewer packs for lengths like these."""
        return advise_budget(
            [np.asarray(lengths) for lengths in packs.step_lengths_tokens],
            self._limits,
            data_parallel=self._actor.layout.data_parallel,
            context_parallel=self._config.actor.parallel.context,
        )

    def begin_train(self, packs: TrainingPacks) -> "Pending[TrainReport]":
        """One optimizer step per step of `packs`, which the actor makes while the driver does something else."""
        return self._actor.begin_train(packs.ranks, self._config.algorithm)

    def _logprobs(self, samples: Sequence[Sample], which: Literal["policy", "reference"]) -> LogprobsBySample:
        packs = pack_for_logprobs(
            samples, self._forward_limits, data_parallel=self._actor.layout.data_parallel, cost=self._cost
        ).ranks
        if which == "policy":
            packs = [rank[0] for rank in self._routed([[rank] for rank in packs], samples)]
        return logprobs_by_sample(packs, self._actor.logprobs(packs, which))

    def _routed(self, packs: list[list[list[PackFrame]]], samples: Sequence[Sample]) -> list[list[list[PackFrame]]]:
        """With the engine's expert choices where they are replayed."""
        if self._route_shape is None:
            return packs
        shape = self._route_shape
        return attach_routes(packs, {one.sample_id: checked_routes(one, shape) for one in samples}, shape)
