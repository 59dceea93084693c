"""What an engine's running responses have come to, for whoever asks while they run."""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlpipe.shared.number_arrays import Logprobs, TokenIds
from rollout.healing import NewTokens, Pulse
from rollout.partial_response import PartialResponse


@dataclass
class _Running:
    """A request in SGLang. partial: what it was asked to go on from. told: tokens of the response that pulses told."""

    request_id: str
    partial: PartialResponse
    since: float
    told: int = 0


class Progress:
    """Reads the states that SGLang keeps of its requests, by its ids; a state holds the tokens that have come so far,
    which SGLang's scheduler sends every `SGLANG_FORCE_STREAM_INTERVAL` steps."""

    def __init__(self, states: Mapping[str, Any]) -> None:
        self._states = states
        self._running: dict[str, _Running] = {}

    @contextmanager
    def of(self, request_id: str, sglang_id: str, partial: PartialResponse) -> Iterator[None]:
        """While SGLang answers a request."""
        self._running[sglang_id] = _Running(request_id, partial, time.time())
        try:
            yield
        finally:
            del self._running[sglang_id]

    def sglang_ids(self, request_ids: Collection[str]) -> list[str]:
        """SGLang's ids of those of `request_ids` that it answers now."""
        return [name for name, one in self._running.items() if one.request_id in request_ids]

    def pulse(self, version: int, last_message: float) -> Pulse:
        """version: of the weights that sample now. last_message: moment of `time.time` of SGLang's last one."""
        oldest = min((one.since for one in self._running.values()), default=time.time())
        silent = time.time() - max(oldest, last_message) if self._running else 0.0
        grown = tuple(new for name, one in self._running.items() for new in self._new_tokens(name, one, version))
        return Pulse(silent, tuple(one.request_id for one in self._running.values()), grown)

    def _new_tokens(self, sglang_id: str, one: _Running, version: int) -> Iterator[NewTokens]:
        begun = one.partial
        for span in begun.versions if not one.told else ():
            start, one.told = one.told, one.told + span.tokens
            yield NewTokens(
                one.request_id, start, begun.token_ids[start : one.told], begun.logprobs[start : one.told], span.version
            )
        state = self._states.get(sglang_id)
        if state is None:
            return
        known = one.told - len(begun.token_ids)
        token_ids = TokenIds(state.output_ids[known:])
        logprobs = Logprobs(state.output_token_logprobs_val[known:])
        if token_ids and len(token_ids) == len(logprobs):
            start, one.told = one.told, one.told + len(token_ids)
            yield NewTokens(one.request_id, start, token_ids, logprobs, version)
