"""Which random numbers a response is drawn with: those of its sample and of the tokens that it follows.

Whoever asks for the same response of the same sample gets it, whether by a generate function or by an agent's request.
"""

import hashlib
from array import array
from collections.abc import Sequence

from rlpipe.generation.prompt_requests import PromptRequest
from rollout.requests import sample_seed


def sequence_digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Of a sequence that goes on with `token_ids`; `before` is the digest up to them, empty at its beginning.

    It depends on where the pieces part: each but the last ends with a response of the policy.
    """
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=16).digest()


class ResponseSeeds:
    """Of one sample. The response to the row's own prompt has the sample's seed; every other one has its own, so that
    branches of an episode that stand at the same position are drawn independently."""

    def __init__(self, run_seed: int, request: PromptRequest) -> None:
        self._run_seed = run_seed
        self._sample_id = request.sample_id
        self._prompt_ids = request.prompt.token_ids

    def seed(self, before: bytes, token_ids: tuple[int, ...], again: int = 0, chosen: int | None = None) -> int:
        """63 bits, for the response to `token_ids`, which go on from a sequence of the digest `before`.

        again: how often a response to all of them was asked for already. chosen: a number of the agent's.
        """
        if not before and again == 0 and chosen is None and token_ids == self._prompt_ids:
            return sample_seed(self._run_seed, self._sample_id)
        read = sequence_digest(before, token_ids)
        return sample_seed(self._run_seed, f"{self._sample_id}/{read.hex()}/{chosen}/{again}")
