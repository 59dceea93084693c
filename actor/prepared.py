"""A pack made ready for the device, and its token tensors put together again over context parallelism."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from actor.layers.packed import PackInputs, pack_to_device
from actor.losses.types import LossInputs
from rlpipe.shared.pack import Pack


@dataclass(frozen=True)
class PreparedPack:
    """`inputs` are this rank's tokens; `trained` (int64, on the device) numbers those of them that have a target;
    `temperatures` is float32 [t], or None for 1."""

    pack: Pack
    inputs: PackInputs
    trained: Tensor
    temperatures: Tensor | None

    @property
    def device(self) -> torch.device:
        return self.inputs.token_ids.device

    @property
    def total_tokens(self) -> int:
        return self.inputs.sequences.total_tokens


def prepare(pack: Pack, device: torch.device) -> PreparedPack:
    """Copy this rank's part of `pack` to the device."""
    inputs = pack_to_device(pack, device)
    own = inputs.rows[inputs.rows < inputs.pack_tokens]
    trained = np.flatnonzero(pack.loss_mask[own])
    temperatures = None if pack.temperatures is None else inputs.take(pack.temperatures)
    return PreparedPack(pack, inputs, torch.from_numpy(trained).to(device, non_blocking=True), temperatures)


def whole_pack(values: Tensor, prepared: PreparedPack) -> Tensor:
    """[t] of this context rank -> [T] of the whole pack in its own order, on every context rank.

    Every context rank goes on to compute the whole pack's loss, so the gradient of its own tokens is complete and is
    NOT added up over the ranks; losses therefore see whole sequences whatever the layout.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    rows = torch.from_numpy(prepared.inputs.rows).to(values.device, non_blocking=True)
    return _WholePack.apply(values, rows, prepared.total_tokens)


class _WholePack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, total: int) -> Tensor:
        ctx.save_for_backward(rows)
        whole = values.new_zeros(total)
        whole[rows] = values
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return gradients[0][rows], None, None


def loss_inputs(prepared: PreparedPack, logprobs: Tensor, entropy: Tensor | None, with_reference: bool) -> LossInputs:
    """The loss's view of a pack; `logprobs` and `entropy` are float32 [T] of the whole pack."""
    pack = prepared.pack
    reference = pack.ref_logprobs
    if with_reference and reference is None:  # a dummy pack: ActorLayout.check_reference has looked at the others
        reference = np.zeros_like(pack.loss_mask)
    lengths = np.diff(np.asarray(prepared.inputs.sequences.ends))
    return LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        mask=_take_whole(prepared, pack.loss_mask),
        weights=_take_whole(prepared, pack.loss_weights),
        advantages=_take_whole(prepared, pack.advantages),
        rollout_logprobs=_take_whole(prepared, pack.rollout_logprobs),
        old_logprobs=None if pack.old_logprobs is None else _take_whole(prepared, pack.old_logprobs),
        ref_logprobs=_take_whole(prepared, reference) if with_reference and reference is not None else None,
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(prepared.device),
        sequences=len(lengths),
    )


def _take_whole(prepared: PreparedPack, values: np.ndarray) -> Tensor:
    whole = np.zeros(prepared.total_tokens, np.float32)
    whole[: len(values)] = values
    return torch.from_numpy(whole).to(prepared.device, non_blocking=True)
