"""Which requests of an engine decode at a time, where their keys and values outgrow its memory.

SGLang 0.5.17 lets a request begin that a part of its tokens has room for (`PrefillAdder.add_one_req`): its prompt here.
When memory is full, those with the fewest tokens lose their place (`ScheduleBatch.retract_decode`), wait until others
are done, and are computed anew as far as they had come.
"""

from collections.abc import Iterator
from dataclasses import dataclass

_PIECES = 16
"""Of the tokens in which fewer and fewer requests have room, as many stretches with a number of their own."""


@dataclass(frozen=True)
class Stretch:
    """Steps in which the same requests decode, with so many tokens behind each on average."""

    requests: int
    context_tokens: float
    steps: float


@dataclass(frozen=True)
class Round:
    """Requests that begin together, and what follows. `again` of them had lost their places; `again_tokens` of each are
    computed a second time first."""

    requests: int
    again: int
    again_tokens: float
    stretches: tuple[Stretch, ...]


def decoding_rounds(requests: int, prompt_tokens: float, response_tokens: float, room_tokens: int) -> Iterator[Round]:
    """Of `requests` responses of one length that begin together; one at least has room until its end.

    room_tokens: of the pool for keys and values. Those that lose their places begin in the next round, beside those
    whose prompts had no room before; each is taken to have come as far as all of these had on average.
    """
    again, again_tokens = 0, 0.0
    while requests:
        together = requests if requests * prompt_tokens <= room_tokens else max(1, int(room_tokens // prompt_tokens))
        fit = min(together, max(1, int(room_tokens // (prompt_tokens + response_tokens))))
        full = min(response_tokens, room_tokens / together - prompt_tokens)  # what each has when memory is full
        stretches = [Stretch(together, prompt_tokens + full / 2, full)]
        lost, tokens_lost = 0, 0.0
        running, piece = together, (response_tokens - full) / _PIECES
        for number in range(_PIECES if fit < together else 0):
            begin = full + number * piece
            left = max(fit, int(room_tokens // (prompt_tokens + begin + piece)))
            lost, tokens_lost = lost + running - left, tokens_lost + (running - left) * begin
            running = left
            stretches.append(Stretch(running, prompt_tokens + begin + piece / 2, piece))
        yield Round(together, again, again_tokens, tuple(stretches))
        again, again_tokens = lost, prompt_tokens + tokens_lost / max(1, lost)
        requests += lost - together
        come = tokens_lost / max(1, requests)
        prompt_tokens, response_tokens = prompt_tokens + come, response_tokens - come
