"""A pack: several sequences laid end to end (THD), the unit of one forward and backward pass.

All per-token arrays are aligned by PREDICTION: entry `t` belongs to the prediction of `targets[t]` from the tokens up
to and including `token_ids[t]`. So nothing is shifted inside the model, and a mask entry of 1 at `t` means that the
log-probability of `targets[t]` enters the loss. Lengths are Python integers made on the host, once; no device tensor
is ever read back to learn a length.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class PackFrame:
    """Where the `n` sequences of a pack lie in its `T` = `cu_seqlens_padded[-1]` tokens, and what was found for these
    tokens after they were packed: all that the driver looks at. Their content may be laid out where it is used.

    sample_ids: the n samples, in order.
    cu_seqlens: n + 1 real ends when laid without padding; cu_seqlens_padded: n + 1 ends as laid out.
    old_logprobs, ref_logprobs: float32 [T] or None where that pass is not needed.
    routes: int16 [T, layers, experts per token], experts that tokens are sent to, or None where the router decides.
    """

    sample_ids: tuple[str, ...]
    cu_seqlens: tuple[int, ...]
    cu_seqlens_padded: tuple[int, ...]
    old_logprobs: NDArray[np.float32] | None = None
    ref_logprobs: NDArray[np.float32] | None = None
    routes: NDArray[np.int16] | None = None

    def laid_out(self) -> "Pack":
        """With its content as the passes take it."""
        raise NotImplementedError

    @property
    def lengths_tokens(self) -> tuple[int, ...]:
        """Real lengths of the sequences."""
        return tuple(b - a for a, b in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False))

    @property
    def padded_tokens(self) -> int:
        return self.cu_seqlens_padded[-1]

    @property
    def real_tokens(self) -> int:
        return self.cu_seqlens[-1]


@dataclass(frozen=True, kw_only=True)
class Pack(PackFrame):
    """`T` = `cu_seqlens_padded[-1]` tokens of `n` sequences. `dummy_pack` makes one without samples.

    token_ids, targets: int64 [T]; the last real position of a sequence has no target (0, mask 0), as has padding.
    position_ids: int64 [T], restart at 0 in each sequence.
    loss_mask: float32 [T], 1 where the prediction is trained.
    loss_weights: float32 [T], `loss_mask` divided by the GLOBAL denominator of the chosen loss aggregation: the loss of
        an optimizer step is the plain sum of `loss_weights * token_loss` over all packs of all ranks.
    advantages: float32 [T]. rollout_logprobs: float32 [T], 0 outside the response.
    temperatures: float32 [T], by which logits are divided; None means 1.
    """

    token_ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    loss_weights: NDArray[np.float32]
    advantages: NDArray[np.float32]
    rollout_logprobs: NDArray[np.float32]
    temperatures: NDArray[np.float32] | None = None

    def laid_out(self) -> "Pack":
        return self


def dummy_pack(padded_tokens: int) -> Pack:
    """A pack for a rank that has run out of samples: it takes part in every exchange and adds nothing to the loss.

    One sequence of no real tokens and `padded_tokens` of padding, with zero masks and weights, and no samples.
    """
    zeros = np.zeros(padded_tokens, np.float32)
    ids = np.zeros(padded_tokens, np.int64)
    return Pack(
        sample_ids=(),
        token_ids=ids,
        targets=ids,
        position_ids=np.arange(padded_tokens, dtype=np.int64),
        loss_mask=zeros,
        loss_weights=zeros,
        advantages=zeros,
        rollout_logprobs=zeros,
        cu_seqlens=(0, 0),
        cu_seqlens_padded=(0, padded_tokens),
    )
