"""Whether an engine's answer can be one to what it was asked."""

import math

import numpy as np

from rlpipe.shared.number_arrays import TokenIds, TokenLogprobs, Tokens
from rlpipe.shared.sample import Status
from rollout.requests import GenerateRequest, Generation

_ROUNDING_NATS = 1e-3
_ANSWERS = (Status.COMPLETED, Status.TRUNCATED, Status.ABORTED)


def why_unusable(request: GenerateRequest, answer: Generation) -> str | None:
    """What is wrong with `answer`; None where nothing is."""
    tokens, begun = len(answer.token_ids), len(request.partial.token_ids)
    if len(answer.logprobs) != tokens:
        return f"{tokens} tokens and {len(answer.logprobs)} log-probabilities"
    if answer.status not in _ANSWERS:
        return f"status {answer.status!r}"
    if not tokens and answer.status is not Status.ABORTED:
        return "no token"
    if tokens > max(begun, request.sampling.max_new_tokens):
        return f"{tokens} tokens, where {request.sampling.max_new_tokens} are allowed"
    kept = min(tokens, begun)
    if answer.token_ids[:kept] != request.partial.token_ids[:kept]:
        return "other tokens than those that it was to go on from"
    if not _are_token_ids(answer.token_ids):
        return "a token that is no token id"
    if not _are_log_probabilities(answer.logprobs):
        unlike = (value for value in answer.logprobs if not (math.isfinite(value) and value <= _ROUNDING_NATS))
        worst = next(unlike, min(answer.logprobs))  # each may be finite where their sum is not
        return f"the log-probability {worst}"
    spans = sum(span.tokens for span in answer.versions)
    if spans != tokens:
        return f"{tokens} tokens, of which {spans} have a weight version"
    return None


def _are_token_ids(values: Tokens) -> bool:
    if isinstance(values, TokenIds):
        return bool(values.array.min(initial=0) >= 0)
    return set(map(type, values)) <= {int} and min(values, default=0) >= 0


def _are_log_probabilities(values: TokenLogprobs) -> bool:
    """A sum is finite only if all its terms are. One operation over all of them, since the driver does this for every
    token of a rollout, while the engines may have nothing more to do."""
    found = np.asarray(values, np.float64) if isinstance(values, tuple) else values.array
    with np.errstate(over="ignore"):
        total = found.sum(dtype=np.float64)
    return bool(np.isfinite(total)) and bool(found.max(initial=-np.inf) <= _ROUNDING_NATS)
