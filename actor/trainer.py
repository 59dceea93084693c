"""One process's share of the policy: model, optimizer, training steps, log-probabilities. Knows nothing of Ray."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from numpy.typing import NDArray

from actor.device import has_own_memory, synchronize, synchronize_compute
from actor.device_memory import DeviceMemory
from actor.diagnosis import packs_with_bad_gradients
from actor.hf.adapter_modules import install_adapters, pack_base, without_dropout
from actor.hf.adapter_weights import start_adapters
from actor.hf.frozen_parameters import frozen_targets
from actor.hf.load_weights import load_hf
from actor.hf.tensor_placement import global_name
from actor.host_memory import HostMemory
from actor.losses.objective import MISMATCH
from actor.models.build_model import build_model
from actor.models.policy_model import PolicyModel, take_mtp_loss
from actor.optimizer import Optimizer
from actor.passes import HeadOptions, PackResult, forward_backward, score_packs
from actor.rank_clock import MegatronTimers, RankClock
from actor.reduction import any_rank, first_non_finite, reduce_metrics, sum_over_data_and_context, union_of_ids
from actor.reference import ReferenceWeights
from actor.train_report import RankTrainReport, Resident, StepReport, UpdateCounts
from rlpipe.config.actor import ActorConfig, OptimizerConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.config.layout import ActorLayout
from rlpipe.model.actor_checks import check_reference
from rlpipe.model.description import TrainableModel
from rlpipe.model.model_reader import trainable_model
from rlpipe.shared.errors import ActorError
from rlpipe.shared.pack import Pack

Which = Literal["policy", "reference"]


@dataclass(frozen=True)
class TrainerOptions:
    """What a trainer is built from. `total_steps`: optimizer steps of the run, the end of a learning-rate decay.
    `seed`: of adapters that begin afresh."""

    model_path: Path
    reference_path: Path | None
    keep_reference: bool
    actor: ActorConfig
    total_steps: int
    seed: int = 0


class Trainer:
    """Build it in every process after `actor.distributed.start_model_parallel`; every method is collective."""

    def __init__(
        self, options: TrainerOptions, clock: RankClock | None = None, host_memory: HostMemory | None = None
    ) -> None:
        """host_memory: for the states of the first optimizer."""
        self.options = options
        self.clock = clock or RankClock()
        self.layout = ActorLayout.of(options.actor)
        self.description: TrainableModel = trainable_model(options.model_path)
        self.build_seconds: dict[str, float] = {}  # part -> seconds
        with self._build_part("model"):
            self.policy: list[PolicyModel] = build_model(self.description, options.actor)
            if options.actor.lora is not None:
                install_adapters(self.policy, options.actor.lora)
        with self._build_part("weights"):
            self.reference = self._load_weights()
        with self._build_part("gradients"):
            self._freeze()
            self.chunks = _wrap(self.policy)
            for chunk in self.policy:
                chunk.config.timers = MegatronTimers(self.clock)
        with self._build_part("optimizer"):
            self.optimizer = self._new_optimizer(options.actor.optimizer, options.total_steps, host_memory)
        self.memory = DeviceMemory(self.chunks, self.clock.part)
        self.counts = UpdateCounts()

    @contextmanager
    def _build_part(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        synchronize()
        self.build_seconds[part] = time.perf_counter() - begin

    def keep_resident(self, wanted: Resident, limit_bytes: int | None = None) -> None:
        """Have no more than `wanted` in device memory; what was freed comes back bit by bit.

        limit_bytes: as `DeviceMemory.keep_resident` takes it.
        """
        self.memory.keep_resident(wanted, self.optimizer, limit_bytes)

    def train(self, steps: Sequence[Sequence[Pack]], algorithm: AlgorithmConfig) -> RankTrainReport:
        """One optimizer step per entry of `steps`, which holds this data rank's packs of that step."""
        reports: list[StepReport] = []
        for number, packs in enumerate(steps, start=1):
            with self.clock.part("train"):
                report = self.train_step(packs, algorithm, last=number == len(steps))
            moved = algorithm.old_policy == "rollout" and any(before.applied for before in reports)
            reports.append(report.without(MISMATCH) if moved else report)
            self.clock.settle()
            if self.counts.skipped_in_a_row >= self.options.actor.max_skipped_updates:
                break
        return RankTrainReport(steps=tuple(reports), counts=self.counts)

    def train_step(self, packs: Sequence[Pack], algorithm: AlgorithmConfig, last: bool = False) -> StepReport:
        """Forward and backward over `packs`, then an optimizer step, or a skip on all ranks where something is not
        finite. Metrics are complete on the last pipeline stage only. last: no other step follows soon."""
        self.memory.stage_states(self.optimizer)
        results = self.accumulate(packs, algorithm)
        with self.clock.part("optimizer"):
            self.optimizer.finish_gradients()
        metrics = reduce_metrics(results) | self._mtp_metric()
        culprits = first_non_finite(results)
        reason, norm = None, math.nan
        if any_rank(culprits is not None):
            reason = "the loss or a log-probability is not finite"
        else:
            with self.clock.part("optimizer"):
                norm = self.optimizer.gradient_norm()
            if not math.isfinite(norm):
                reason = f"the gradient norm is {norm}"
                culprits = packs_with_bad_gradients(self.chunks, packs, self._head, algorithm, self.layout)
        metrics |= {"train/gradient_norm": norm, "train/learning_rate": self.optimizer.learning_rate}
        if last:
            self.memory.release_activations()
        with self.clock.part("optimizer"):
            if reason is None:
                self.optimizer.step(norm, self.memory.states_that_stay(self.optimizer))
            synchronize_compute()
        self.counts = self.counts.after(applied=reason is None)
        return self._report(metrics, reason, culprits)

    def accumulate(self, packs: Sequence[Pack], algorithm: AlgorithmConfig) -> list[PackResult]:
        """Gradients of `packs` in place of those that are there, without the exchange that `finish_gradients` ends."""
        self.memory.require("all", "training")
        with self.clock.part("optimizer"):
            self.optimizer.zero_gradients()
        return forward_backward(self.chunks, self.layout.filled(packs), self._head, algorithm)

    def logprobs(self, packs: Sequence[Pack], which: Which) -> list[NDArray[np.float32]]:
        """float32 [T] per pack, 0 where `loss_mask` is 0; [] except on the last pipeline stage."""
        self.memory.require("weights", "a log-probability pass")
        if which == "policy":
            weights: AbstractContextManager[None] = nullcontext()
        elif self.reference is None:
            raise ActorError(
                "no reference policy is kept: set algorithm.kl.coefficient above 0 or give model.reference_path"
            )
        else:
            weights = self.reference.swapped_in()
        with weights, without_dropout(self.policy):
            scored = score_packs(self.chunks, self.layout.filled(packs), self._head)
        return [
            logprobs[: pack.padded_tokens].float().cpu().numpy() for logprobs, pack in zip(scored, packs, strict=False)
        ]

    def set_reference(self) -> None:
        """The present policy becomes the reference; nothing happens where none is kept."""
        self.memory.require("weights", "taking the policy as the reference")
        if self.reference is not None:
            self.reference.take_policy()

    def reset_optimizer(self, options: OptimizerConfig, total_steps: int) -> None:
        """Fresh moments and masters from the present weights, step 0 of a new schedule, counters at zero."""
        self.memory.require("weights", "a new optimizer")
        self.optimizer.close()
        self.optimizer = self._new_optimizer(options, total_steps)
        self.counts = UpdateCounts()

    @property
    def _head(self) -> HeadOptions:
        return HeadOptions(self.description.vocab_size, self.options.actor.head_chunk_tokens(has_own_memory()))

    def _mtp_metric(self) -> dict[str, float]:
        """Loss of the multi-token-prediction layers; {} where this rank trains none."""
        loss = take_mtp_loss(self.policy[-1])
        return {} if loss is None else {"train/mtp_loss": sum_over_data_and_context(loss)}

    def _load_weights(self) -> ReferenceWeights | None:
        """Load the reference first where it has its own folder, so that one set of device weights suffices."""
        if self.options.keep_reference and self.options.reference_path is not None:
            check_reference(self.description, trainable_model(self.options.reference_path))
            load_hf(self.policy, self.description, self.options.reference_path)
            reference = ReferenceWeights(self._parameters())
            load_hf(self.policy, self.description, self.options.model_path)
            return reference
        load_hf(self.policy, self.description, self.options.model_path)
        lora = self.options.actor.lora
        if lora is not None:
            pack_base(self.policy, lora)
            start_adapters(self.policy, lora, self.options.seed)
            return ReferenceWeights.without_adapters(self.policy) if self.options.keep_reference else None
        return ReferenceWeights(self._parameters()) if self.options.keep_reference else None

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.policy for parameter in chunk.parameters()]

    def _freeze(self) -> None:
        if not self.options.actor.frozen_parameters:
            return
        frozen = frozen_targets(self.description, self.options.actor)
        for chunk in self.policy:
            for name, parameter in chunk.named_parameters():
                if global_name(chunk, name) in frozen:
                    parameter.requires_grad_(False)

    def _new_optimizer(
        self, options: OptimizerConfig, total_steps: int, host_memory: HostMemory | None = None
    ) -> Optimizer:
        return Optimizer(self.chunks, options, self.options.actor.dtype, total_steps, host_memory)

    def _report(self, metrics: dict[str, float], reason: str | None, culprits: tuple[str, ...] | None) -> StepReport:
        if reason is None:
            return StepReport(applied=True, metrics=metrics)
        return StepReport(False, metrics, reason, union_of_ids(culprits or ()))


def _wrap(policy: Sequence[PolicyModel]) -> list[torch.nn.Module]:
    """Data-parallel wrappers. Gradients are summed, never averaged: `calculate_per_token_loss` is set in the model's
    configuration, and the global denominator is inside the loss weights. Where there are several data or context ranks,
    gradients travel during the backward pass of the last pack."""
    several = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=several,
        check_for_nan_in_grad=False,
    )
    wrapped: list[torch.nn.Module] = [
        DistributedDataParallel(chunk.config, options, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(policy)
    ]
    if several:
        syncs = [chunk.no_sync for chunk in wrapped]
        policy[0].config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return wrapped
