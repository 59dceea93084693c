"""The Ray actor that runs one process of the training side."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actor import distributed
from actor.checkpoint import Checkpointer
from actor.collectives.exchange_timer import ExchangeTimer
from actor.collectives.interception import listen, take_unknown_calls
from actor.comm_guard.install import install_comm_guard
from actor.device import (
    allocated_memory_bytes,
    device_name,
    free_memory_bytes,
    import_compilers,
    reserved_memory_bytes,
    synchronize,
)
from actor.device_memory import enough_device_memory
from actor.early_compilation import compile_early
from actor.hf.adapter_weights import save_adapters
from actor.hf.policy_folder import save_hf
from actor.host_memory import HostMemory
from actor.kernel_warm_up import warm_up
from actor.layers.causal_attention import check_flash_attention
from actor.layers.gdn_backend import GdnChoice, choose_gdn_backend
from actor.layers.gdn_kernels import load_kernels
from actor.megatron_patches.optimizer_fixes import install_optimizer_fixes
from actor.megatron_patches.pipeline_fixes import install_pipeline_fixes
from actor.memory_peaks import MemoryPeaks
from actor.rank_clock import RankClock
from actor.runtime import install_megatron_runtime
from actor.train_report import RankTrainReport, RankUsage, Resident, WeightSendReport
from actor.trainer import Trainer, TrainerOptions, Which
from actor.weight_sender import WeightSender
from rlpipe.config.actor import OptimizerConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.config.layout import ActorLayout
from rlpipe.config.root import Config
from rlpipe.estimate.memory import BESIDE_TORCH_BYTES
from rlpipe.jit_monitor import JitMonitor, JitSettings, stall_log
from rlpipe.model.hub import model_folder
from rlpipe.model.model_reader import trainable_model
from rlpipe.shared.collection import keep_what_lives
from rlpipe.shared.guarded_port import LOOPBACK, Endpoint, guarded
from rlpipe.shared.pack import Pack, PackFrame
from rlpipe.shared.policy_facts import PolicyFacts
from rlpipe.shared.remote import WorkerAddress, register_worker
from rlpipe.shared.weights import WeightBucket, WeightContent, WeightGroup


class ActorWorker:
    """One process. Methods are called on all processes at the same time, because they exchange data with each other."""

    def __init__(self, config: Config, rank: int, log_directory: str | None, begin: float) -> None:
        """begin: when the process began to import, of `time.perf_counter`."""
        self._config = config
        self._begin = begin
        self._start_seconds: dict[str, float] = {}
        self._rank = rank
        self._store: Any = None
        self._gdn: GdnChoice | None = None
        self._host_memory: HostMemory | None = None
        self._iteration = 0
        self._monitor = JitMonitor.install(
            JitSettings.of(config.jit), rank, on_stall=stall_log(f"actor-{rank}", log_directory)
        )
        self._clock = RankClock(on_part=self._monitor.enter_phase)
        # More threads than cores wait for each other in a spin, many times slower than one.
        torch.set_num_threads(min(config.actor.threads, len(os.sched_getaffinity(0))))
        install_megatron_runtime()
        install_optimizer_fixes()
        install_pipeline_fixes()
        listen(ExchangeTimer(self._clock, self._monitor.first_use))
        self._guard = install_comm_guard(config.actor.comm_guard, rank)
        self._memory = MemoryPeaks()

    def import_kernels(self, host_states_bytes: int) -> None:
        """Import what the model's layers and their compilers need, and compile what needs little device memory;
        meanwhile make host memory for optimizer states. Imports come before that; beside it they take five times as
        long."""
        self._gdn = choose_gdn(self._config)
        import_compilers()
        model = trainable_model(self._config.model.path)
        kernels = None if self._gdn is None else load_kernels(self._gdn.backend)
        imported = time.perf_counter()
        self._start_seconds["import"] = imported - self._begin
        self._host_memory = HostMemory(host_states_bytes)
        if self._config.jit.warms_up(torch.cuda.is_available()):
            compile_early(self._config, model, kernels, self._monitor)
        self._start_seconds["compile"] = time.perf_counter() - imported

    def take_start_seconds(self) -> dict[str, float]:
        """Parts of this process's start, in order."""
        return self._start_seconds

    def free_device_bytes(self) -> int:
        """Memory of this process's device that is free, or that torch holds of it here; 0 on a CPU."""
        return free_memory_bytes() + reserved_memory_bytes()

    def resident_bytes(self) -> int:
        """Device memory that this process's tensors take now, an allowance for what lies beside torch's included."""
        return allocated_memory_bytes() + BESIDE_TORCH_BYTES

    def address(self) -> WorkerAddress:
        return register_worker(f"actor-{self._rank}")

    def open_store(self) -> Endpoint:
        """Rank 0: start the rendezvous; returns where other nodes find it."""
        import ray

        self._store = distributed.open_store(LOOPBACK, self._config.actor.processes, self._timeout_seconds)
        return guarded(ray.util.get_node_ip_address(), self._store.port)

    def start(self, rendezvous: Endpoint) -> tuple[str, ...]:
        """Check what kernels need, join the other processes, build the model, load its weights, make the optimizer.

        Returns sentences for the user.
        """
        actor = self._config.actor
        check_flash_attention()
        begin = time.perf_counter()
        if self._store is None:
            self._store = distributed.join_store(*rendezvous.reach(), actor.processes, self._timeout_seconds)
        distributed.join_processes(self._store, self._rank, actor.processes, self._timeout_seconds)
        distributed.start_model_parallel(actor, self._config.seed)
        joined = time.perf_counter()
        self._trainer = Trainer(trainer_options(self._config), self._clock, self._host_memory)
        self._checkpointer = Checkpointer(self._trainer, self._config.checkpoint.keep)
        self._sender = WeightSender(
            self._trainer.policy,
            self._trainer.description,
            actor.dtype,
            self._config.weight_sync.bucket_bytes,
            None if self._config.ray.colocate else ActorLayout.of(actor),
            with_mtp=self._config.sends_draft_weights,
            quantization=self._config.rollout.engine.quantization,
        )
        self._start_seconds |= {"join": joined - begin, "build": time.perf_counter() - joined}
        self._start_seconds |= {f"build_{part}": spent for part, spent in self._trainer.build_seconds.items()}
        return () if self._gdn is None else (self._gdn.note,)

    def train(self, steps: Sequence[Sequence[PackFrame]], algorithm: AlgorithmConfig) -> RankTrainReport:
        self._checkpointer.poll()
        with self._enough_memory("train"), self._monitor.step(self._iteration, "train"):
            report = self._trainer.train([[pack.laid_out() for pack in packs] for packs in steps], algorithm)
        self._memory.look()
        return report

    def warm_up(self, training: Sequence[Pack], forward_only: Sequence[Pack], algorithm: AlgorithmConfig) -> None:
        if self._config.jit.warms_up(torch.cuda.is_available()):
            with self._enough_memory("the warm-up"):
                warm_up(self._trainer, training, forward_only, algorithm, self._config.longest_sequence_tokens)
        keep_what_lives()

    def logprobs(self, packs: Sequence[PackFrame], which: Which) -> list[NDArray[np.float32]]:
        part = "ref_logprob" if which == "reference" else "old_logprob"
        with self._enough_memory(part), self._clock.part(part), self._monitor.step(self._iteration, part):
            return self._trainer.logprobs([pack.laid_out() for pack in packs], which)

    def _enough_memory(self, call: str) -> AbstractContextManager[None]:
        def state_bytes() -> int:
            return sum(adam.held_bytes for adam in self._trainer.optimizer.streamed)

        return enough_device_memory(f"{call} on rank {self._rank}", self._config.actor, state_bytes)

    def set_reference(self) -> None:
        self._checkpointer.finish()
        self._trainer.set_reference()

    def reset_optimizer(self, options: OptimizerConfig, total_steps: int) -> None:
        self._checkpointer.finish()
        self._trainer.reset_optimizer(options, total_steps)

    def share_with_engines(self, limit_bytes: int) -> None:
        self._trainer.memory.share_with_engines(limit_bytes - BESIDE_TORCH_BYTES)

    def keep_resident(self, wanted: Resident, limit_bytes: int | None) -> None:
        """limit_bytes: None where engines take their weights next, for which everything else has to make room."""
        with self._clock.part("offload"):
            if limit_bytes is None:
                held = free_memory_bytes() + reserved_memory_bytes() - self._engine_bytes
            else:
                held = limit_bytes - BESIDE_TORCH_BYTES
            self._trainer.keep_resident(wanted, held)

    def save_checkpoint(self, directory: Path, iteration: int, driver_state: dict[str, Any], wait: bool) -> Path:
        with self._clock.part("checkpoint"):
            path = self._checkpointer.save(directory, iteration, driver_state)
            if wait:
                self._checkpointer.finish()
        return path

    def finish_checkpoint(self) -> None:
        self._checkpointer.finish()

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        return self._checkpointer.load(path)

    def save_hf(self, directory: Path, facts: PolicyFacts | None) -> None:
        self._trainer.memory.require("weights", "writing the policy")
        source, lora = model_folder(self._config.model.path), self._config.actor.lora
        save_hf(self._trainer.policy, self._trainer.description, directory, source, facts)
        if lora is not None:
            save_adapters(self._trainer.policy, lora, directory / "adapter", self._config.model.path)

    def weight_plans(self) -> Mapping[WeightContent, tuple[WeightBucket, ...]]:
        return self._sender.plans

    def listen_for_engine(self) -> str:
        return self._sender.listen()

    def join_weight_groups(self, groups: Sequence[WeightGroup], joining: Sequence[Any]) -> str:
        """Why it did not work; empty where it did."""
        seconds = self._config.deadlines.weight_sync_seconds
        return self._sender.join(groups, self._store, seconds, lambda: _any_failed(joining))

    def send_weights(self, verify: bool, receiving: Sequence[Any], content: WeightContent) -> WeightSendReport:
        self._trainer.memory.require("weights", "sending weights")
        with self._clock.part("weight_sync"):
            return self._sender.send(verify, lambda: _any_failed(receiving), content)

    def take_usage(self, next_iteration: int, keep_spans: bool) -> RankUsage:
        synchronize()
        seconds, spans = self._clock.take()
        report = self._monitor.drain()
        self._clock.keep_spans = keep_spans
        self._iteration = self._monitor.recorder.step = next_iteration
        return RankUsage(
            rank=self._rank,
            host=socket.gethostname(),
            device_name=device_name(),
            gdn_backend=self._gdn.backend if self._gdn else "",
            part_seconds=seconds,
            spans=spans,
            jit=report,
            metrics={
                **self._guard.take(),
                **self._memory.take(),
                **self._checkpointer.take_metrics(),
                "ranks/unknown_exchanges": float(take_unknown_calls()),
            },
        )

    def stop(self) -> None:
        """Finish a running save and leave all groups."""
        if hasattr(self, "_trainer"):
            self._checkpointer.finish()
            self._sender.leave()
        self._guard.uninstall()
        distributed.leave()

    @property
    def _engine_bytes(self) -> int:
        """Device memory of a colocated engine's weights, and of the buffers they arrive through; the engine's rounding
        and its own needs are in the reserve."""
        weights = sum(bucket.size_bytes for bucket in self._sender.plans["merged"])
        buffers = 2 * self._config.weight_sync.bucket_bytes
        return weights // self._config.rollout.engine.tensor_parallel + buffers + 2 * 2**30

    @property
    def _timeout_seconds(self) -> float:
        deadlines = self._config.deadlines
        return max(deadlines.start_seconds, deadlines.train_seconds, deadlines.checkpoint_seconds)


def _any_failed(references: Sequence[Any]) -> bool:
    """Whether one of these calls has ended with an error."""
    import ray

    if not references:
        return False
    ready, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
    try:
        ray.get(ready)
    except ray.exceptions.RayError:
        return True
    return False


def choose_gdn(config: Config) -> GdnChoice | None:
    """What Gated DeltaNet layers run on; None without such layers. Raises an RlpipeError where they cannot run."""
    sizes = trainable_model(config.model.path).gated_delta_net
    return None if sizes is None else choose_gdn_backend(config.actor.gdn_backend, sizes, config.actor.dtype)


def trainer_options(config: Config) -> TrainerOptions:
    """What the whole configuration says about the trainer."""
    reference = config.model.reference_path
    return TrainerOptions(
        model_path=model_folder(config.model.path),
        reference_path=None if reference is None else model_folder(reference),
        keep_reference=config.algorithm.kl.coefficient > 0 or reference is not None,
        actor=config.actor,
        total_steps=config.run.iterations * config.algorithm.updates_per_iteration,
        seed=config.seed,
    )
