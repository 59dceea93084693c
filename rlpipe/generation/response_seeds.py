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
        self._opening = sequence_digest(b"", request.prompt.token_ids)

    def seed(self, read: bytes, again: int = 0, chosen: int | None = None) -> int:
        """63 bits. read: digest of all tokens that the response follows. again: how often a response to them was asked
        for before. chosen: a number of the agent's."""
        if read == self._opening and again == 0 and chosen is None:
            return sample_seed(self._run_seed, self._sample_id)
        return sample_seed(self._run_seed, f"{self._sample_id}/{read.hex()}/{chosen}/{again}")
