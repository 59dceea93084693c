"""Loss weights: how token losses become one number, with a denominator that is global over the optimizer step.

The loss of a step is `sum(weight * token_loss)` over all tokens of all packs of all ranks. Because each weight is final
before packs are made, any split into packs, micro-batches or ranks gives the same loss and gradient.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum_norm", "group_mean"]


def sequence_weights(
    trained_tokens: NDArray[np.int64],
    groups: NDArray[np.int64],
    aggregation: Aggregation,
    norm_tokens: int,
) -> NDArray[np.float64]:
    """Weight of each trained token of each sequence: float64 [n]; 0 for sequences without trained tokens.

    trained_tokens, groups: int64 [n], the tokens with a loss and the group (0, 1, ...) of each sequence of ONE step.
    With M_i trained tokens in sequence i, S sequences and G groups that have any, and N = `norm_tokens`:
        token_mean         1 / sum_i M_i               DAPO (arXiv 2503.14476, eq. 8)
        sequence_mean      1 / (S M_i)                 GRPO (arXiv 2402.03300, eq. 3)
        sequence_sum_norm  1 / (S N)                   Dr.GRPO (arXiv 2503.20783); N is a constant, the response limit
        group_mean         1 / (G sum_{j in group} M_j)
    A sequence or group without trained tokens has no mean, so it does not count in S or G.
    """
    trained = trained_tokens.astype(np.float64)
    has_loss = trained_tokens > 0
    if not has_loss.any():
        return np.zeros(len(trained))
    if aggregation == "token_mean":
        denominators = np.full(len(trained), trained.sum())
    elif aggregation == "sequence_mean":
        denominators = has_loss.sum() * trained
    elif aggregation == "sequence_sum_norm":
        denominators = np.full(len(trained), float(has_loss.sum() * norm_tokens))
    else:
        group_tokens = np.bincount(groups, weights=trained)
        denominators = np.count_nonzero(group_tokens) * group_tokens[groups]
    weights = np.zeros(len(trained))
    np.divide(1.0, denominators, out=weights, where=has_loss)
    return weights
