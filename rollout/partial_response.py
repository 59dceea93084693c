"""Responses that were interrupted and go on later, perhaps under newer weights."""

from collections.abc import Collection
from dataclasses import dataclass, field

from rlpipe.shared.expert_routes import Routes
from rlpipe.shared.number_arrays import TokenLogprobs, Tokens
from rlpipe.shared.sample import Status, VersionSpan
from rollout.reported_routes import joined_routes


@dataclass(frozen=True)
class PartialResponse:
    """The response so far: `logprobs` has one entry per token, the tokens of `versions` add up to all of them.

    `routes` are those of prompt and response, where they are asked for.
    """

    token_ids: Tokens = ()
    logprobs: TokenLogprobs = ()
    versions: tuple[VersionSpan, ...] = ()
    routes: Routes | None = field(default=None, compare=False)

    def extended(
        self, token_ids: Tokens, logprobs: TokenLogprobs, version: int, routes: Routes | None = None
    ) -> "PartialResponse":
        """With more tokens, sampled by weights of `version`; `routes` are those of the whole sequence."""
        return PartialResponse(
            self.token_ids + token_ids,
            self.logprobs + logprobs,
            merged_spans((*self.versions, VersionSpan(version, len(token_ids)))),
            joined_routes(self.routes, routes),
        )

    def shortened(self, tokens: int) -> "PartialResponse":
        """Without its last `tokens` tokens."""
        keep = max(0, len(self.token_ids) - tokens)
        routes = None if self.routes is None else self.routes[: len(self.routes) - (len(self.token_ids) - keep)]
        return PartialResponse(self.token_ids[:keep], self.logprobs[:keep], first_tokens(self.versions, keep), routes)


def merged_spans(spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """The same spans without empty ones, and with neighbours of one version as one."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = VersionSpan(span.version, merged[-1].tokens + span.tokens)
        elif span.tokens:
            merged.append(span)
    return tuple(merged)


def first_tokens(spans: tuple[VersionSpan, ...], tokens: int) -> tuple[VersionSpan, ...]:
    """The spans of the first `tokens` tokens."""
    kept: list[VersionSpan] = []
    for span in spans:
        kept.append(VersionSpan(span.version, min(span.tokens, tokens)))
        tokens -= kept[-1].tokens
    return merged_spans(tuple(kept))


def without_overshoot(
    response: PartialResponse, status: Status, since: int, end_ids: Collection[int], limit_tokens: int
) -> tuple[PartialResponse, Status]:
    """A response of which several tokens came at once, without those behind its end.

    SGLang cuts them off itself, unless the limit or an abort came with the same tokens: then it looks no further for
    a token of `end_ids`. since: tokens that were looked at before.
    """
    new = response.token_ids[since:]
    end = next((since + place + 1 for place, token in enumerate(new) if token in end_ids), None)
    keep = min(len(response.token_ids), limit_tokens, *(() if end is None else (end,)))
    if keep == len(response.token_ids):
        return response, status
    return response.shortened(len(response.token_ids) - keep), (Status.COMPLETED if keep == end else Status.TRUNCATED)


def interrupted(
    partial: PartialResponse,
    end_ids: Collection[int],
    stop: tuple[str, ...],
    limit_tokens: int,
    tokens_at_once: int = 1,
) -> tuple[PartialResponse, Status]:
    """What of an aborted response can go on, or how it has in truth ended.

    An abort hides the reason for which the last token would have ended the response: a token of `end_ids`, or the
    limit. A stop string may lie across the interruption, and the engine looks for it among new tokens only: as many
    tokens as the longest one has characters are taken back, and sampled again; where several tokens come at once
    (`tokens_at_once`), none of the last ones was looked at.
    """
    if partial.token_ids and partial.token_ids[-1] in end_ids:
        return partial, Status.COMPLETED
    if len(partial.token_ids) >= limit_tokens:
        return partial, Status.TRUNCATED
    taken_back = max(map(len, stop)) + tokens_at_once - 1 if stop else 0
    return partial.shortened(taken_back), Status.ABORTED
