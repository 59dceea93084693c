"""How long responses became so far, which tells how long the next ones will become."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from rlpipe.shared.sample import Prompt

LengthState = Mapping[str, Mapping[str, float]]
"""Of a `LengthHistory`, for a checkpoint: mean tokens by `prompts` and by `datasets`."""

_NEWEST_SHARE = 0.5
_REMEMBERED_PROMPTS = 2**17


class LengthHistory:
    """Mean tokens of the responses to each prompt, where the newest group counts as much as all before, since the
    policy changes; and of each data set, for prompts that were never answered. Prompts of long ago are forgotten."""

    def __init__(self, state: LengthState | None = None) -> None:
        state = state or {}
        self._prompts = dict(state.get("prompts", {}))
        self._datasets = dict(state.get("datasets", {}))

    def expected(self, prompt: Prompt) -> int | None:
        """Tokens of a whole response; None before the first of its data set is known."""
        known = self._prompts.get(prompt.prompt_id, self._datasets.get(prompt.dataset))
        return None if known is None else max(1, round(known))

    def note(self, prompt: Prompt, lengths: Sequence[int]) -> None:
        """The lengths of the responses of a group."""
        mean = fmean(lengths)
        for means, key in ((self._prompts, prompt.prompt_id), (self._datasets, prompt.dataset)):
            before = means.pop(key, mean)
            means[key] = round(before + _NEWEST_SHARE * (mean - before), 1)
        while len(self._prompts) > _REMEMBERED_PROMPTS:
            del self._prompts[next(iter(self._prompts))]

    def state(self) -> LengthState:
        return {"prompts": dict(self._prompts), "datasets": dict(self._datasets)}
