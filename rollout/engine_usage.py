"""How much an engine worked."""

import time

from rlpipe.shared.phases import Span
from rollout.requests import EngineUsage, added_counts


class UsageClock:
    """Adds up tokens and the seconds in which at least one request was running."""

    def __init__(self) -> None:
        self._running = 0
        self._since = 0.0
        self._taken_at = time.perf_counter()
        self._busy_seconds = 0.0
        self._tokens = 0
        self._requests = 0
        self._retractions = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._kept_drafts: tuple[int, ...] = ()
        self._keep_spans = False
        self._span_since = 0.0
        self._spans: list[Span] = []

    def begin(self, requests: int) -> None:
        if self._running == 0:
            self._since = self._span_since = time.perf_counter()
        self._running += requests

    def end(self, requests: int) -> None:
        self._running -= requests
        if self._running == 0:
            self._busy_seconds += time.perf_counter() - self._since
            self.note_span("generate", self._span_since)

    def note_span(self, name: str, since: float) -> None:
        """Remember what happened from `since` (of `time.perf_counter`) until now, where spans are kept."""
        if self._keep_spans:
            seconds = time.perf_counter() - since
            self._spans.append(Span(name, time.time() - seconds, seconds))

    def take_spans(self, keep: bool) -> tuple[Span, ...]:
        """Those since the last call; whether those until the next one are kept. A busy stretch that has not ended is
        cut here."""
        if self._running:
            self.note_span("generate", self._span_since)
            self._span_since = time.perf_counter()
        self._keep_spans = keep
        spans, self._spans = tuple(self._spans), []
        return spans

    def count(
        self,
        tokens: int,
        retractions: int,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        kept_drafts: tuple[int, ...] = (),
    ) -> None:
        """One finished request."""
        self._kept_drafts = added_counts(self._kept_drafts, kept_drafts)
        self._tokens += tokens
        self._requests += 1
        self._retractions += retractions
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def take(self, engine: int) -> EngineUsage:
        """What was added up since the last call; a busy stretch that has not ended counts up to now."""
        now = time.perf_counter()
        if self._running:
            self._busy_seconds += now - self._since
            self._since = now
        interval, self._taken_at = now - self._taken_at, now
        usage = EngineUsage(
            engine,
            interval,
            self._busy_seconds,
            self._tokens,
            self._requests,
            self._retractions,
            self._prompt_tokens,
            self._cached_tokens,
            self._kept_drafts,
        )
        self._busy_seconds = 0.0
        self._kept_drafts = ()
        self._tokens = self._requests = self._retractions = self._prompt_tokens = self._cached_tokens = 0
        return usage
