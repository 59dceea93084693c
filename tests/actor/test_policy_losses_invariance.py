"""The loss and the gradient of a step do not depend on how its samples are split into packs, ranks and order."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actor.losses.objective import objective
from actor.losses.types import LossInputs
from rlpipe.batching import PackLimits, TrainingSequence, pack_sequences
from rlpipe.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig
from rlpipe.shared.pack import Pack

VOCABULARY = 11
NORM_TOKENS = 30


@cache
def make_sequences(seed: int, count: int) -> list[TrainingSequence]:
    random = np.random.default_rng(seed)
    sequences = []
    for number in range(count):
        tokens = int(random.integers(2, 24))
        mask = (random.random(tokens) < 0.7).astype(np.float32)
        mask[-1] = 0
        sequences.append(
            TrainingSequence(
                sequence_id=f"{seed}-{number}",
                group_id=f"g{number // 3}",
                token_ids=random.integers(0, VOCABULARY, tokens),
                loss_mask=mask,
                advantages=mask * np.float32(random.normal()),
                rollout_logprobs=mask * (-2 + 0.3 * random.normal(size=tokens)).astype(np.float32),
            )
        )
    return sequences


def loss_and_gradient(packs: list[Pack], options: AlgorithmConfig) -> tuple[float, torch.Tensor]:
    """A bigram policy: one row of logits per token. Old log-probs are made from the targets alone."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for pack in packs:
        lengths = np.diff(pack.cu_seqlens_padded)
        mask = torch.tensor(pack.loss_mask, dtype=torch.float64)
        distribution = table[torch.tensor(pack.token_ids)].log_softmax(-1)
        targets = torch.tensor(pack.targets)
        inputs = LossInputs(
            logprobs=distribution.gather(-1, targets[:, None]).squeeze(-1) * mask,
            mask=mask,
            weights=torch.tensor(pack.loss_weights, dtype=torch.float64),
            advantages=torch.tensor(pack.advantages, dtype=torch.float64),
            rollout_logprobs=torch.tensor(pack.rollout_logprobs, dtype=torch.float64),
            sequence_ids=torch.tensor(np.repeat(np.arange(len(lengths)), lengths)),
            sequences=len(lengths),
            entropy=-(distribution.exp() * distribution).sum(-1) * mask,
            old_logprobs=-(1.5 + 0.15 * (targets % 7)) * mask,
            ref_logprobs=-(2.0 + 0.1 * (targets % 5)) * mask,
        )
        total = total + (objective(inputs, options).token_loss * inputs.weights).sum()
    total.backward()
    return float(total.detach()), table.grad


def packs_of(sequences, aggregation: str, budget: int, ranks: int, multiple: int) -> list[Pack]:
    packed = pack_sequences(
        sequences,
        PackLimits(budget, multiple, multiple),
        data_parallel=ranks,
        aggregation=aggregation,
        norm_tokens=NORM_TOKENS,
    )
    return [pack for rank in packed.ranks for step in rank for pack in step]


@pytest.mark.parametrize(
    "options",
    [
        dict(loss="ppo_clip", kl=KLConfig(coefficient=0.2), entropy_coefficient=0.1),
        dict(loss="ppo_dual_clip", kl=KLConfig(coefficient=0.2, estimator="k2")),
        dict(loss="gspo", correction=CorrectionConfig(weight="sequence", mask="geometric", mask_max=2.0)),
        dict(loss="cispo", correction=CorrectionConfig(weight="token", mask="token", mask_min=0.1, mask_max=3.0)),
        dict(loss="sft"),
    ],
    ids=lambda options: options["loss"],
)
@settings(max_examples=12)
@given(
    aggregation=st.sampled_from(["token_mean", "sequence_mean", "sequence_sum_norm", "group_mean"]),
    seed=st.integers(0, 5),
    count=st.integers(1, 14),
    budget=st.integers(24, 200),
    ranks=st.integers(1, 4),
    multiple=st.sampled_from([1, 4, 8]),
    order=st.randoms(use_true_random=False),
)
def test_split_and_order_change_nothing(options, aggregation, seed, count, budget, ranks, multiple, order):
    config = AlgorithmConfig(**options, aggregation=aggregation)
    sequences = make_sequences(seed, count)
    whole = loss_and_gradient(packs_of(sequences, aggregation, 10_000, 1, 1), config)
    shuffled = list(sequences)
    order.shuffle(shuffled)
    split = loss_and_gradient(packs_of(shuffled, aggregation, budget, ranks, multiple), config)
    assert split[0] == pytest.approx(whole[0], rel=1e-9, abs=1e-12)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-9, atol=1e-12)
