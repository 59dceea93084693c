"""Changes to rewards and masks before advantages: length penalties and the KL penalty."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlpipe.shared.kl import kl_estimate
from rlpipe.shared.number_arrays import LossMask
from rlpipe.shared.sample import Episode, Sample, is_truncated


def overlong_penalty(response_tokens: int, max_response_tokens: int, buffer_tokens: int) -> float:
    """Soft overlong punishment in -1..0: DAPO, arXiv 2503.14476, eq. 13.

    0 up to `max_response_tokens - buffer_tokens`, then linear down to -1 at `max_response_tokens`, -1 beyond it.
    """
    over = response_tokens - (max_response_tokens - buffer_tokens)
    if buffer_tokens == 0 or over <= 0:
        return 0.0
    return max(-1.0, -over / buffer_tokens)


def mask_truncated(episode: Episode) -> Episode:
    """Overlong filtering (DAPO, section 3.4): no loss on an episode of which a part was cut off; its score counts."""
    if not is_truncated(episode):
        return episode
    return tuple(sample.changed(loss_mask=LossMask.filled(0, sample.response_tokens)) for sample in episode)


def mask_off_policy(sample: Sample, version: int) -> Sample:
    """No loss on tokens that weights other than `version` sampled."""
    if all(span.version == version for span in sample.versions):
        return sample
    spans = [span.tokens for span in sample.versions]
    current = np.repeat([span.version == version for span in sample.versions], spans)
    return sample.changed(loss_mask=LossMask(np.asarray(sample.loss_mask, np.int8) * current))


def kl_by_sample_of(
    samples: Sequence[Sample],
    policy: Mapping[str, NDArray[np.float32]] | None,
    reference: Mapping[str, NDArray[np.float32]],
    estimator: str,
) -> dict[str, NDArray[np.float64]]:
    """KL to the reference of each response token, by sample id: float64 [response].

    policy, reference: float32 [prompt + response] per sample id, aligned by prediction, as
    `rlpipe.batching.logprobs_by_sample` returns them. policy None: what the rollout engine reported.
    """
    estimates = {}
    for sample in samples:
        span = slice(sample.prompt_tokens - 1, sample.total_tokens - 1)
        if policy is None:
            logprobs = np.asarray(sample.rollout_logprobs, np.float32)
        else:
            logprobs = policy[sample.sample_id][span]
        difference = logprobs.astype(np.float64) - reference[sample.sample_id][span]
        estimates[sample.sample_id] = kl_estimate(difference, estimator, np.expm1)
    return estimates


KLBySample = Mapping[str, NDArray[np.float64]]
"""Per sample id the KL estimate of each response token."""
