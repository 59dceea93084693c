"""Whether an engine's answer can be one to what it was asked."""

import math

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
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in answer.token_ids):
        return "a token that is no token id"
    if not all(math.isfinite(value) and value <= _ROUNDING_NATS for value in answer.logprobs):
        worst = next(value for value in answer.logprobs if not (math.isfinite(value) and value <= _ROUNDING_NATS))
        return f"the log-probability {worst}"
    spans = sum(span.tokens for span in answer.versions)
    if spans != tokens:
        return f"{tokens} tokens, of which {spans} have a weight version"
    return None
