"""Loss weights: how token losses become one number, with a denominator that is global over the optimizer step.

The loss of a step is `sum(weight * token_loss)` over all tokens of all packs of all ranks. Because each weight is final
before packs are made, any split into packs, micro-batches or ranks gives the same loss and gradient.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum_norm", "episode_mean", "group_mean"]


def sequence_weights(
    trained_tokens: NDArray[np.int64],
    groups: NDArray[np.int64],
    aggregation: Aggregation,
    norm_tokens: int,
    episodes: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """Weight of each trained token of each sequence: float64 [n]; 0 for sequences without trained tokens.

    trained_tokens, groups, episodes: int64 [n], the tokens with a loss, the group and the episode (0, 1, ...) of each
    sequence of ONE step; without `episodes` each sequence is one.
    With M_i trained tokens in sequence i, S sequences, E episodes and G groups that have any, and N = `norm_tokens`:
        token_mean         1 / sum_i M_i               DAPO (arXiv 2503.14476, eq. 8)
        sequence_mean      1 / (S M_i)                 GRPO (arXiv 2402.03300, eq. 3)
        sequence_sum_norm  1 / (S N)                   Dr.GRPO (arXiv 2503.20783); N is a constant, the response limit
        episode_mean       1 / (E sum_{j in episode} M_j)
        group_mean         1 / (G sum_{j in group} M_j)
    A sequence, episode or group without trained tokens has no mean, so it does not count in S, E or G.
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
    elif aggregation == "episode_mean":
        denominators = _unit_denominators(np.arange(len(trained)) if episodes is None else episodes, trained)
    else:
        denominators = _unit_denominators(groups, trained)
    weights = np.zeros(len(trained))
    np.divide(1.0, denominators, out=weights, where=has_loss)
    return weights


def _unit_denominators(units: NDArray[np.int64], trained: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [n]: units that have trained tokens, times those of the sequence's own."""
    tokens = np.bincount(units, weights=trained).astype(np.float64)
    return float(np.count_nonzero(tokens)) * tokens[units]
