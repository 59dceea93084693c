"""Where a text that was sampled up to a stop string ends."""

from collections.abc import Sequence


def before_stop(text: str, stop: Sequence[str], start: int = 0) -> tuple[str, str | None]:
    """The text before the first of `stop` in it, and which that is; the whole text and None where there is none.

    An engine ends a response with the token that completes a stop string, and that token may go on after it. start: of
    the characters that were sampled; those before it were given.
    """
    found = [(place, one) for one in stop if (place := text.find(one, start)) >= 0]
    if not found:
        return text, None
    place, ended_by = min(found)
    return text[:place], ended_by
