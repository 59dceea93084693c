"""The whole objective of one pack: the registered loss, the KL and entropy terms, and the metrics all losses share."""

from dataclasses import replace

import torch
from torch import Tensor

from actor.losses.correction import correct_mismatch
from actor.losses.loss_registry import find_loss
from actor.losses.requirements import SUPERVISED, needs_reference
from actor.losses.types import LossInputs, LossOutput
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.kl import kl_estimate

MISMATCH = ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max")
"""Metrics that compare log-probabilities of the engine and the actor, which must have the same weights."""


def objective(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """token_loss = policy loss + kl.coefficient * KL - entropy_coefficient * entropy, per token."""
    output = find_loss(options.loss)(_against_old_policy(inputs, options), options)
    if options.loss == SUPERVISED:
        return _with_totals(output, inputs, {"train/loss": output.token_loss})
    output = correct_mismatch(output, inputs, options.correction)
    token_loss, terms = output.token_loss, {"train/policy_loss": output.token_loss}
    if needs_reference(options):
        assert inputs.ref_logprobs is not None
        terms["train/kl_loss"] = kl_estimate(inputs.logprobs - inputs.ref_logprobs, options.kl.estimator, torch.expm1)
        token_loss = token_loss + options.kl.coefficient * terms["train/kl_loss"]
    assert inputs.entropy is not None
    if options.entropy_coefficient > 0:
        token_loss = token_loss - options.entropy_coefficient * inputs.entropy
    output = replace(output, token_loss=token_loss)
    return _with_sampling_metrics(_with_totals(output, inputs, {"train/loss": token_loss, **terms}), inputs)


def _against_old_policy(inputs: LossInputs, options: AlgorithmConfig) -> LossInputs:
    """The ratio is taken against the actor before the update, or against what the rollout engine reported."""
    return replace(inputs, old_logprobs=inputs.rollout_logprobs) if options.old_policy == "rollout" else inputs


def _with_totals(output: LossOutput, inputs: LossInputs, terms: dict[str, Tensor]) -> LossOutput:
    totals = {name: (term.detach() * inputs.weights).sum() for name, term in terms.items()}
    return replace(output, totals={**output.totals, **totals})


def _with_sampling_metrics(output: LossOutput, inputs: LossInputs) -> LossOutput:
    """Entropy, and the distance between the engine's log-probabilities and ours for the policy that sampled."""
    assert inputs.entropy is not None
    tokens = inputs.mask.sum()
    distance = (inputs.anchor_logprobs - inputs.rollout_logprobs).abs() * inputs.mask
    means = {
        "train/entropy": ((inputs.entropy.detach() * inputs.mask).sum(), tokens),
        MISMATCH[0]: (distance.sum(), tokens),
    }
    maxima = {MISMATCH[1]: distance.max()}
    return replace(output, means={**output.means, **means}, maxima={**output.maxima, **maxima})
