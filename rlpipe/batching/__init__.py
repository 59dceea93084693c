"""From samples to packs: token budget, padding, balance over ranks, loss weights."""

from rlpipe.batching.advisor import BudgetAdvice, advise_budget
from rlpipe.batching.aggregation import sequence_weights
from rlpipe.batching.limits import PackLimits
from rlpipe.batching.logprobs import attach_logprobs, logprobs_by_sample, response_logprobs
from rlpipe.batching.pack_plan import CostModel, PackPlan, cost_per_length, plan_packs, proportional_cost
from rlpipe.batching.pack_report import PackReport, report_on
from rlpipe.batching.sequences import TrainingSequence, supervised_sequence
from rlpipe.batching.training_packs import (
    ForwardPacks,
    TrainingPacks,
    pack_for_logprobs,
    pack_for_training,
    pack_sequences,
)

__all__ = [
    "BudgetAdvice",
    "CostModel",
    "ForwardPacks",
    "PackLimits",
    "PackPlan",
    "PackReport",
    "TrainingPacks",
    "TrainingSequence",
    "advise_budget",
    "attach_logprobs",
    "cost_per_length",
    "logprobs_by_sample",
    "pack_for_logprobs",
    "pack_for_training",
    "pack_sequences",
    "plan_packs",
    "proportional_cost",
    "report_on",
    "response_logprobs",
    "sequence_weights",
    "supervised_sequence",
]
