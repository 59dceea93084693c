"""The prompt that samples of a group have in common is computed once in an engine, and then taken from its cache."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager

from rlpipe.estimate.engine_pools import LEAST_SHARED_TOKENS
from rollout.requests import GenerateRequest

_COMPARED_TOKENS = 32

Prompt = tuple[str, int, tuple[int, ...]]


class SharedPrompts:
    """Requests that come together would be computed together, each with the whole prompt: nothing is in the cache yet.

    prefill: computes the keys and values of a request's prompt but for its last token, which is always computed, for it
    is what the first new one is sampled from; leaves them in the cache, and answers how many it computed. Nothing is
    shared where it is None.
    """

    def __init__(self, prefill: Callable[[GenerateRequest], Awaitable[int]] | None) -> None:
        self._prefill = prefill
        self._expected: Counter[Prompt] = Counter()
        self._prefills: dict[tuple[Prompt, int], asyncio.Task[int]] = {}

    def expect(self, requests: Iterable[GenerateRequest]) -> None:
        """They run from now on, each within `running`."""
        self._expected.update(_prompt(request) for request in requests)

    @contextmanager
    def running(self, request: GenerateRequest) -> Iterator[None]:
        """Until the end of its response."""
        try:
            yield
        finally:
            prompt = _prompt(request)
            self._expected[prompt] -= 1
            if not self._expected[prompt]:
                del self._expected[prompt]
                self._prefills = {key: task for key, task in self._prefills.items() if key[0] != prompt}

    async def ready(self, request: GenerateRequest, version: int) -> int:
        """Waits until the prompt is in the cache, where weights of `version` are worth it; how many tokens were
        computed for that on behalf of this request, the first of its group."""
        prompt = _prompt(request)
        is_alone = not request.group_id or self._expected[prompt] < 2
        if self._prefill is None or is_alone or len(request.prompt_ids) < LEAST_SHARED_TOKENS:
            return 0
        is_first = (prompt, version) not in self._prefills
        if is_first:
            self._prefills[prompt, version] = asyncio.ensure_future(self._prefill(request))
        tokens = await asyncio.shield(self._prefills[prompt, version])
        return tokens if is_first else 0


def _prompt(request: GenerateRequest) -> Prompt:
    """What tells prompts apart within a group, whose later turns differ at their end; long ones are slow to hash."""
    return request.group_id, len(request.prompt_ids), request.prompt_ids[-_COMPARED_TOKENS:]
