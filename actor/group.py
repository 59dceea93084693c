"""The driver's handle on the training side, all processes as one object. Imports neither torch nor Megatron."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from actor.losses.requirements import needs_reference
from actor.lost_ranks import CallWatch
from actor.train_report import RankTrainReport, RankUsage, Resident, TrainReport, WeightSendReport
from rlpipe.config.actor import OptimizerConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.config.layout import ActorLayout
from rlpipe.config.root import Config
from rlpipe.jit_monitor import worker_caches
from rlpipe.shared.collection import imports_kept
from rlpipe.shared.ended_processes import ENDED, why_ended
from rlpipe.shared.errors import ActorError, ActorLostError
from rlpipe.shared.guarded_port import Endpoint
from rlpipe.shared.interrupts import raise_if_requested
from rlpipe.shared.pack import Pack, PackFrame
from rlpipe.shared.policy_facts import PolicyFacts
from rlpipe.shared.remote import WorkerAddress, address_in_table, cluster_accelerator, gather, kill_processes
from rlpipe.shared.weights import WeightBucket, WeightContent, WeightGroup

T = TypeVar("T")
_STOP_SECONDS = 60.0
_LOOK_SECONDS = 0.5


class ActorPlacement(Protocol):
    """Where the processes go: one bundle per process."""

    @property
    def gpus_per_bundle(self) -> float: ...

    def strategy(self, index: int) -> Any:
        """Ray scheduling strategy of process `index`."""


class Pending(Generic[T]):
    """A call that runs on all processes while the driver does something else."""

    def __init__(self, wait: Callable[[], T]) -> None:
        self._wait = wait

    def result(self) -> T:
        """Wait for it, with the deadline of its phase; errors of the workers are raised here."""
        return self._wait()


class ActorGroup:
    """Start it with `ActorGroup.start`; every method calls all processes at once, with a deadline.

    `notes` are sentences for the user about what the processes found; `start_seconds` has the parts of their start, of
    each that of the slowest process; `endpoint` is where process 0's store is found, in which other processes may meet
    it, too.
    """

    def __init__(
        self, config: Config, workers: list[Any], addresses: list[WorkerAddress], host_states_bytes: int = 0
    ) -> None:
        self._config = config
        self._workers = workers
        # Before anything else is asked of them, while engines start.
        self._address_references = self._call("address")
        self._importing = self._call("import_kernels", host_states_bytes)
        self._addresses = addresses
        self._answering = True
        self.notes: tuple[str, ...] = ()
        self.start_seconds: dict[str, float] = {}
        self.endpoint = Endpoint("", 0)
        self.layout = ActorLayout.of(config.actor)

    @classmethod
    def start(
        cls, config: Config, placement: ActorPlacement | None = None, log_directory: str | None = None
    ) -> "ActorGroup":
        """Start the processes, join them, load the policy. Ray must be initialised.

        log_directory: where a process writes its stacks when it stalls; without it they go to Ray's logs.

        Raises:
            ModelError, ActorError, ResourceError: what a worker found wrong; DeadlineError: no answer in time.
        """
        group = cls.launch(config, placement, log_directory)
        try:
            group.join()
        except BaseException:
            group.stop()
            raise
        return group

    @classmethod
    def launch(
        cls,
        config: Config,
        placement: ActorPlacement | None = None,
        log_directory: str | None = None,
        host_states_bytes: int = 0,
    ) -> "ActorGroup":
        """Start the processes, which import in the background and take no device memory until `join`.

        host_states_bytes: of a process's optimizer states in host memory, which it makes meanwhile; more are made when
        they are needed, and what is too much is given back then.
        """
        workers = [_start_process(config, rank, placement, log_directory) for rank in range(config.actor.processes)]
        return cls(config, workers, [], host_states_bytes)

    def join(self) -> None:
        """Join the processes, load the policy. Raises as `start` does; `stop` has to be called then."""
        seconds = self._config.deadlines.start_seconds
        self._find(seconds)
        (self.endpoint,) = self._gather([self._workers[0].run.remote("open_store")], seconds, "start")
        notes = self._all("start", seconds, self.endpoint)
        self.notes = tuple(dict.fromkeys(note for one in notes for note in one))
        parts = self._all("take_start_seconds", seconds)
        self.start_seconds = {part: max(one[part] for one in parts) for part in parts[0]}

    def train(
        self, packs_by_data_rank: Sequence[Sequence[Sequence[PackFrame]]], algorithm: AlgorithmConfig
    ) -> TrainReport:
        """`begin_train`, and its result."""
        return self.begin_train(packs_by_data_rank, algorithm).result()

    def begin_train(
        self, packs_by_data_rank: Sequence[Sequence[Sequence[PackFrame]]], algorithm: AlgorithmConfig
    ) -> Pending[TrainReport]:
        """One optimizer step per entry of `packs_by_data_rank[data_rank]`.

        Raises:
            ActorError: ranks have different numbers of steps or packs (found before anything is sent), a pack does not
                fit the layout, or `actor.max_skipped_updates` updates in a row were skipped.
        """
        self._check_steps(packs_by_data_rank, algorithm)
        references = self._by_data_rank("train", packs_by_data_rank, algorithm)
        self._answering = False  # until the result is there: whoever stops before that does not wait

        def report() -> TrainReport:
            reports: list[RankTrainReport] = self._gather(references, self._config.deadlines.train_seconds, "train")
            merged = _merge(reports, self.layout)
            self._check_skipped(reports[0], merged)
            return merged

        return Pending(report)

    def logprobs(
        self, packs_by_data_rank: Sequence[Sequence[PackFrame]], which: Literal["policy", "reference"] = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        """Log-probabilities of the trained tokens, float32 [T] per pack and 0 where `loss_mask` is 0."""
        self.layout.check_packs(packs_by_data_rank, f"{which} log-probabilities")
        references = self._by_data_rank("logprobs", packs_by_data_rank, which)
        answers = self._gather(references, self._config.deadlines.train_seconds, f"{which}_logprob")
        return [answers[rank] for rank in self.layout.reporting_ranks]

    def set_reference(self) -> None:
        """The present policy becomes the reference policy; a no-op where no reference is kept."""
        self._all("set_reference", self._config.deadlines.train_seconds)

    def reset_optimizer(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Fresh moments and a new schedule, between a supervised phase and reinforcement learning.

        total_steps: where the decay of the learning rate ends if `optimizer.decay_steps` is empty.
        """
        self._all("reset_optimizer", self._config.deadlines.train_seconds, optimizer, total_steps)

    def free_device_bytes(self) -> int:
        """Least device memory that a process of the actor has or could have, and which may not have joined yet; 0 on a
        CPU."""
        self._find(self._config.deadlines.start_seconds)
        return min(self._all("free_device_bytes", self._config.deadlines.start_seconds))

    def resident_bytes(self) -> int:
        """Most device memory that a process of the actor holds now; 0 where it does not count."""
        return max(self._all("resident_bytes", self._config.deadlines.start_seconds))

    def share_with_engines(self, limit_bytes: int) -> None:
        """While engines generate, each process may hold `limit_bytes` of the device."""
        self._all("share_with_engines", self._config.deadlines.train_seconds, limit_bytes)

    def keep_resident(self, wanted: Resident, limit_bytes: int | None = None) -> None:
        """Have no more than `wanted` in device memory: "nothing", "weights", or "all" (weights and gradients).

        What was freed comes back bit by bit. Training needs "all", which is where the actor starts; all other calls
        that touch weights need "weights" and raise ActorError below it. limit_bytes: what each process may hold beside
        engines in all, states of the optimizer included; None leaves room for the engines' weights.
        """
        self._all("keep_resident", self._config.deadlines.train_seconds, wanted, limit_bytes)

    def save_checkpoint(
        self, directory: Path, iteration: int, driver_state: dict[str, Any], wait: bool = False
    ) -> Path:
        """Save to `directory/iteration_*`, in the background unless `wait`; returns that folder.

        driver_state: any JSON value of the driver, given back by `load_checkpoint`.
        """
        seconds = self._config.deadlines.checkpoint_seconds
        return self._all("save_checkpoint", seconds, directory.absolute(), iteration, driver_state, wait)[0]

    def finish_checkpoint(self) -> None:
        """Wait until a running save is complete."""
        self._all("finish_checkpoint", self._config.deadlines.checkpoint_seconds)

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Load a checkpoint saved under any parallel layout; returns its driver state. Raises CheckpointError."""
        return self._all("load_checkpoint", self._config.deadlines.checkpoint_seconds, path.absolute())[0]

    def save_hf(self, directory: Path, facts: PolicyFacts | None = None) -> None:
        """Write the policy in Hugging Face layout, with what `facts` tell of it."""
        self._all("save_hf", self._config.deadlines.checkpoint_seconds, directory.absolute(), facts)

    def weight_plans(self) -> Mapping[WeightContent, tuple[WeightBucket, ...]]:
        """What `begin_send_weights` sends, in order, for each content that this policy can be sent as."""
        return self._all("weight_plans", self._config.deadlines.start_seconds)[0]

    def listen_for_engines(self) -> list[str]:
        """Addresses, one per process, at which the engine on the same device can open its buffers."""
        return self._all("listen_for_engine", self._config.deadlines.weight_sync_seconds)

    def begin_join_weight_groups(self, groups: Sequence[WeightGroup], joining: Sequence[Any] = ()) -> Pending[str]:
        """Those processes join that are to send, and leave what they had joined; the engines must join meanwhile.

        One group of all engines, or for each engine one of it and the processes on its devices. The result says why it
        did not work; it is empty where it did. joining: references to the engines' calls; one that fails is not waited
        for.
        """
        references = self._call("join_weight_groups", list(groups), list(joining))
        seconds = self._config.deadlines.weight_sync_seconds
        return Pending(lambda: "; ".join(filter(None, self._gather(references, seconds, "join_weight_groups"))))

    def begin_send_weights(
        self, verify: bool = False, receiving: Sequence[Any] = (), content: WeightContent = "merged"
    ) -> Pending[WeightSendReport]:
        """Send the policy to the joined engines, which must be receiving at the same time.

        receiving: references to the engines' calls. An engine that fails ends the transfer, which the report tells; the
        processes of the actor are as they were.
        """
        references = self._call("send_weights", verify, list(receiving), content)
        seconds = self._config.deadlines.weight_sync_seconds
        return Pending(lambda: _merge_sent(self._gather(references, seconds, "weight_sync")))

    def warm_up(self, training: Sequence[Pack], forward_only: Sequence[Pack], algorithm: AlgorithmConfig) -> None:
        """Run packs with and without gradients on all processes, so that their kernels compile, and change nothing."""
        self._all("warm_up", self._config.deadlines.start_seconds, training, forward_only, algorithm)

    def take_usage(self, next_iteration: int, keep_spans: bool = False) -> tuple[RankUsage, ...]:
        """What each process did since the last call. What follows belongs to `next_iteration`; keep_spans: keep every
        stretch of it for a trace."""
        return self.begin_take_usage(next_iteration, keep_spans).result()

    def begin_take_usage(self, next_iteration: int, keep_spans: bool = False) -> Pending[tuple[RankUsage, ...]]:
        """`take_usage`, while the driver asks somebody else, too."""
        references = self._call("take_usage", next_iteration, keep_spans)
        seconds = self._config.deadlines.train_seconds
        return Pending(lambda: tuple(self._gather(references, seconds, "take_usage")))

    @property
    def answering(self) -> bool:
        """Whether the last call was answered: none failed or was interrupted."""
        return self._answering

    def stop(self) -> None:
        """End the processes, after a running save is complete; at once if a call was interrupted or failed, because
        processes may then wait for each other. Safe to call twice."""
        import ray

        workers, self._workers = self._workers, []
        if workers and self._addresses and self._answering:
            ray.wait([worker.run.remote("stop") for worker in workers], num_returns=len(workers), timeout=_STOP_SECONDS)
        for worker in workers:
            ray.kill(worker)
        if workers and not self._answering:
            kill_processes(self._addresses)  # one that a signal has stopped does not hear Ray

    def _find(self, seconds: float) -> None:
        """Wait until the processes have started and imported what they need."""
        import ray

        self._answering = False
        end, waiting = time.monotonic() + seconds, self._address_references
        watch = CallWatch([], "start", self._config.fault.probe_seconds)
        try:
            while waiting:
                ready, waiting = ray.wait(waiting, num_returns=1, timeout=_LOOK_SECONDS)
                ray.get(ready, timeout=seconds)
                raise_if_requested()
                if waiting and time.monotonic() >= end:
                    raise ActorError(
                        f"the actor's {len(self._workers)} processes did not start within {seconds:g} seconds; is the "
                        "cluster too small for actor.processes, or deadlines.start_seconds too short?"
                    )
                if not ready and watch.is_due:  # one that was stopped never says where it is
                    self._look_at_started(watch)
            self._addresses = ray.get(self._address_references, timeout=seconds)
        except ENDED as error:
            raise ActorLostError(f"start: a process of the actor died ({why_ended(error)})") from None
        self._gather(self._importing, seconds, "start")

    def _look_at_started(self, watch: CallWatch) -> None:
        """At those processes of which Ray knows where they run. Raises what `watch` does."""
        places = (address_in_table(worker, f"actor-{rank}") for rank, worker in enumerate(self._workers))
        self._addresses = watch.workers = [place for place in places if place is not None]
        watch.look()

    def _check_steps(
        self, packs_by_data_rank: Sequence[Sequence[Sequence[PackFrame]]], algorithm: AlgorithmConfig
    ) -> None:
        counts = [len(steps) for steps in packs_by_data_rank]
        if not counts or min(counts) != max(counts) or not counts[0]:
            raise ActorError(
                f"train: data-parallel ranks have {counts} optimizer steps; all need the same, at least one"
            )
        for index in range(counts[0]):
            step = [steps[index] for steps in packs_by_data_rank]
            self.layout.check_packs(step, f"train, optimizer step {index}")
            if needs_reference(algorithm):
                for packs in step:
                    self.layout.check_reference(packs, f"train, optimizer step {index}")

    def _check_skipped(self, rank: RankTrainReport, report: TrainReport) -> None:
        if rank.counts.skipped_in_a_row < self._config.actor.max_skipped_updates:
            return
        last = report.steps[-1]
        raise ActorError(
            f"{rank.counts.skipped_in_a_row} updates in a row were skipped, the last one because {last.skip_reason} in "
            f"the packs of samples {', '.join(last.culprit_sample_ids) or '(no single pack)'}; look at these samples, "
            "lower the learning rate, or raise actor.max_skipped_updates"
        )

    def _by_data_rank(self, method: str, values: Sequence[Any], *arguments: Any) -> list[Any]:
        """Call `method` on all processes; each gets the value of its data rank, which Ray stores once."""
        import ray

        stored = [ray.put(value) for value in values]
        return [
            worker.run.remote(method, stored[self.layout.place(rank).data], *arguments)
            for rank, worker in enumerate(self._workers)
        ]

    def check_alive(self, phase: str) -> None:
        """Raises ActorLostError where a process has ended, which may be why others failed in `phase`."""
        CallWatch(self._addresses, phase, self._config.fault.probe_seconds).check_alive()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return [worker.run.remote(method, *arguments) for worker in self._workers]

    def _all(self, method: str, deadline_seconds: float, *arguments: Any) -> list[Any]:
        return self._gather(self._call(method, *arguments), deadline_seconds, method)

    def _gather(self, references: list[Any], deadline_seconds: float, phase: str) -> list[Any]:
        """Answers in rank order; an error that a worker meant for the user is raised as that error."""
        self._answering = False
        watch = CallWatch(self._addresses, phase, self._config.fault.probe_seconds)
        answers = gather(references, self._addresses[: len(references)], deadline_seconds, phase, watch)
        self._answering = True
        return answers


class _Process:
    """What Ray starts: imports torch and Megatron only inside its own process, never where the driver runs."""

    def __init__(self, config: Config, rank: int, log_directory: str | None) -> None:
        os.environ.setdefault(
            "CUDA_DEVICE_MAX_CONNECTIONS", "1"
        )  # orders Megatron's overlapped kernels and collectives
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        # SGLang sets this in its processes; ranks of one NCCL group that differ in it fail with a CUDA error.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        # Megatron-core imports it where it exists: half a second, and folders that stay when the process is killed.
        # Nothing here uses it.
        sys.modules["wandb"] = None  # type: ignore[assignment]
        begin = time.perf_counter()
        with imports_kept():
            from actor.worker import ActorWorker

        self._worker = ActorWorker(config, rank, log_directory, begin)

    def run(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)


def _start_process(config: Config, rank: int, placement: ActorPlacement | None, log_directory: str | None) -> Any:
    import ray

    options: dict[str, Any] = {"name": f"actor-{rank}", "num_cpus": 1}
    if placement is not None:
        options |= {"num_gpus": placement.gpus_per_bundle, "scheduling_strategy": placement.strategy(rank)}
    caches = worker_caches(config.jit.cache_directory, cluster_accelerator())
    if caches:  # read by compilers when they are imported, so they must be there before
        options["runtime_env"] = {"env_vars": caches}
    return ray.remote(_Process).options(**options).remote(config, rank, log_directory)


def _merge_sent(reports: Sequence[WeightSendReport]) -> WeightSendReport:
    """Of all processes: the most bytes and seconds of one, each bucket's checksum from one that sent it, and all
    failures."""
    failures = dict.fromkeys(report.failure for report in reports if report.failure)
    return WeightSendReport(
        size_bytes=max(report.size_bytes for report in reports),
        seconds=max(report.seconds for report in reports),
        checksums=tuple(max(sums) for sums in zip(*(report.checksums for report in reports), strict=True)),
        failure="; ".join(failures),
    )


def _merge(reports: Sequence[RankTrainReport], layout: ActorLayout) -> TrainReport:
    steps = reports[layout.reporting_ranks[0]].steps
    counts = reports[0].counts
    return TrainReport(
        steps=steps,
        updates_attempted=counts.attempted,
        updates_applied=counts.applied,
        updates_skipped=counts.skipped,
    )
