"""Megatron's distributed Adam with masters and moments in host memory, its learning rate, and its clipped step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from actor.host_memory import HostMemory
from actor.megatron_patches.offloaded_adam import OffloadedAdam, offloaded_adam
from actor.models.build_model import reduce_replicated_gradients
from actor.schedule import learning_rate_at
from actor.streamed_adam import StreamedAdam
from rlpipe.config.actor import OptimizerConfig
from rlpipe.shared.collection import collect_everything
from rlpipe.shared.errors import ActorError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Optimizer:
    """Adam over the parameters of data-parallel wrapped model chunks.

    The distributed optimizer shards masters and moments over data-parallel ranks; `cpu_offload_fraction` of them live
    in host memory. Parameters with one dimension have no weight decay.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        options: OptimizerConfig,
        dtype: str,
        total_steps: int,
        host_memory: HostMemory | None = None,
    ) -> None:
        self.options = options
        self.total_steps = total_steps
        self.applied_steps = 0
        self.wait_for_reader: Callable[[], None] = _nobody
        """Returns once nobody reads the states any more; an update changes them."""
        self._chunks = list(chunks)
        with offloaded_adam(options.moments_dtype, host_memory):
            self.megatron: Any = get_megatron_optimizer(_megatron_config(options, dtype), self._chunks)
        for adam in self.adams:
            adam.zero_state()
        if host_memory is not None:
            host_memory.give_back()

    @property
    def adams(self) -> list[OffloadedAdam]:
        """Of dense and of expert parameters; a rank that trains nothing of a kind has none for it."""
        parts = [part.optimizer for part in self.megatron.chained_optimizers]
        return [part for part in parts if part is not None]

    @property
    def streamed(self) -> list[StreamedAdam]:
        """Those whose states come from host memory for an update on the device."""
        return [adam.streamed for adam in self.adams if adam.streamed is not None]

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return learning_rate_at(self.applied_steps, self.options, self.total_steps)

    def zero_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.megatron.zero_grad()

    def finish_gradients(self) -> None:
        """Add gradients up over data and context ranks, and over tensor ranks where a parameter is replicated.

        No division: the global denominator is inside the loss weights.
        """
        finalize_model_grads(self._chunks, None)
        reduce_replicated_gradients(self._chunks)

    def gradient_norm(self) -> float:
        """Global L2 norm over dense and expert parameters, before clipping. Collective."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    def step(self, gradient_norm: float, staying_slots: Sequence[int] = ()) -> None:
        """Clip to `max_gradient_norm` and update; call after `gradient_norm`.

        staying_slots: of each of `streamed`, how many slots keep their states on the device after the update.
        """
        if not math.isfinite(gradient_norm):
            raise ActorError(f"refused an optimizer step with gradient norm {gradient_norm}")
        for group in self.megatron.param_groups:
            group["lr"] = self.learning_rate * group["lr_mult"]
            group["weight_decay"] = self.options.weight_decay * group["wd_mult"]
        for adam, slots in zip(self.streamed, staying_slots, strict=False):
            adam.staying_slots = slots
        self.wait_for_reader()
        self.wait_for_reader = _nobody
        for part in self.megatron.chained_optimizers:
            if part.get_parameters():
                clip_grad_by_total_norm_fp32(
                    part.get_parameters(), self.options.max_gradient_norm, gradient_norm, use_decoupled_grad=True
                )
        self.megatron.step_with_ready_grads()
        self.applied_steps += 1

    def finish(self) -> None:
        """Returns once the states in host memory are those of the last step."""
        for adam in self.adams:
            adam.finish()

    def close(self) -> None:
        """Let go of all states; call before another optimizer is made, which would not fit beside this one."""
        for adam in self.adams:
            adam.close()
        self.megatron = None
        collect_everything()  # Megatron's optimizers refer to themselves


def _nobody() -> None:
    """There is none."""


def _megatron_config(options: OptimizerConfig, dtype: str) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=options.learning_rate,
        min_lr=options.minimum_learning_rate,
        weight_decay=options.weight_decay,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_eps=options.epsilon,
        clip_grad=options.max_gradient_norm,
        bf16=dtype == "bfloat16",
        params_dtype=_DTYPES[dtype],
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=options.cpu_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=False,  # OffloadedAdam does that
    )
