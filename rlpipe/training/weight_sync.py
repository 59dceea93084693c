"""Sending the actor's weights to all engines, with the version they then sample under."""

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlpipe.config.root import Config
from rlpipe.shared.errors import RlpipeError, WeightSyncError
from rlpipe.shared.remote import together
from rlpipe.shared.weights import BUFFERS, WeightContent, WeightGroup
from rlpipe.training.memory_sharing import MemorySharing
from rlpipe.training.placement import cluster_gpus

if TYPE_CHECKING:
    from actor.group import ActorGroup
    from actor.train_report import WeightSendReport
    from rollout.engine_calls import EngineCalls
    from rollout.fleet import RunningEngine
    from rollout.pool import RolloutPool


class WeightSync:
    """Holds the groups in which the actor meets the engines: where they share devices, one for each engine whose
    processes read buffers of the actor's; else one in which those processes of the actor that hold a copy of the
    weights together broadcast, each its part, to every engine process.

    The groups are made anew when other engines are to receive than last time. An engine that is lost in an update is
    left out, and the update done again where it did not reach the others whole; they answer nothing in between.

    adapters_alone: an engine that has the model gets the policy's adapters and nothing else.
    """

    def __init__(self, config: Config, actor: "ActorGroup", pool: "RolloutPool", memory_sharing: MemorySharing) -> None:
        self._config = config
        self._memory_sharing = memory_sharing
        self._actor = actor
        self._pool = pool
        self._plans = actor.weight_plans()
        self._joined: list[RunningEngine] = []
        self._with_model: set[RunningEngine] = set()
        self.adapters_alone = config.weight_sync.adapters == "alone"
        self.version = -1

    @property
    def can_send_adapters(self) -> bool:
        """Whether engines have room for the policy's adapters."""
        return "adapters" in self._plans and all(engine.setup.adapter is not None for engine in self._pool.up())

    def push(self, version: int) -> dict[str, float]:
        """Returns the metrics of the transfer once all engines that are up hold `version`."""
        self._pool.note_sent_weights()  # also for an engine that is lost or starting now, and comes back later
        with self._memory_sharing.during_weight_sync():
            transfer = self._deliver(self._pool.up, version)
        self.version = version
        return {"weight_sync/version": float(version), **transfer}

    def catch_up(self) -> None:
        """Engines in the places of lost ones receive the weights that the others sample with.

        Call it while the actor holds these: not between an update of the actor and its push.
        """
        if self.version >= 0 and self._pool.awaiting_weights():
            everybody = self._config.ray.colocate  # each actor process feeds the engine beside it
            with self._memory_sharing.during_catch_up():
                self._deliver(self._pool.up if everybody else self._pool.awaiting_weights, self.version)

    def _deliver(self, wanted: Callable[[], list["RunningEngine"]], version: int) -> dict[str, float]:
        """Until the engines that are wanted and not lost have `version`; metrics of the transfer, where there was
        one."""
        while engines := wanted():
            content = self._content(engines)
            if content != "adapters":
                self._with_model -= set(engines)
            report = self._send(version, content) if self._join(engines) else None
            if report is not None:
                self._with_model |= set(engines) if content == "model_and_adapters" else set()
                return self._metrics(report, content)
            self._joined = []
        return {}

    def _metrics(self, report: "WeightSendReport", content: WeightContent) -> dict[str, float]:
        size = sum(bucket.size_bytes for bucket in self._plans[content])
        return {
            "weight_sync/bytes": float(size),
            "weight_sync/sender_max_bytes": float(report.size_bytes),
            "weight_sync/gigabytes_per_second": size / report.seconds / 1e9,
        }

    def _content(self, engines: Sequence["RunningEngine"]) -> WeightContent:
        if not self.adapters_alone:
            return "merged"
        return "adapters" if self._with_model.issuperset(engines) else "model_and_adapters"

    def _send(self, version: int, content: WeightContent) -> "WeightSendReport | None":
        """None when an engine was lost before all others had everything."""
        in_flight = self._config.rollout.mode == "async"
        calls = self._pool.weights.start_receiving(self._plans[content], version, in_flight)
        sending = self._actor.begin_send_weights(self._config.weight_sync.verify, calls.references, content)
        failed = threading.Event()

        def sent() -> "WeightSendReport":
            report = sending.result()
            if report.failure:
                failed.set()
            return report

        report, receipts = together(sent, lambda: self._collect(calls, "weight_sync", failed.is_set))
        if self._is_incomplete(calls.engines, receipts, report.failure, "weight_sync"):
            return None
        if self._config.weight_sync.verify:
            _compare(report.checksums, receipts)
        self._pool.serve(list(receipts))
        return report

    def _join(self, engines: list["RunningEngine"]) -> bool:
        """Whether they can be sent to now; not when one was lost meanwhile."""
        if engines == self._joined:
            return True
        self._pool.weights.leave()
        groups = self._shared_buffers(engines) if self._config.ray.colocate else [self._broadcast_group(len(engines))]
        calls = self._pool.weights.join(groups, engines)
        joining = self._actor.begin_join_weight_groups(groups, calls.references)
        phase = "joining the weight group"
        failure, joined = together(joining.result, lambda: self._collect(calls, phase))
        if self._is_incomplete(engines, joined, failure, phase):
            return False
        self._joined = engines
        return len(joined) == len(engines)

    def _collect(
        self, calls: "EngineCalls", phase: str, in_vain: Callable[[], bool] = lambda: False
    ) -> dict["RunningEngine", Any]:
        return self._pool.collect(calls, self._config.deadlines.weight_sync_seconds, phase, in_vain)

    def _is_incomplete(
        self, engines: Sequence["RunningEngine"], answers: Mapping["RunningEngine", Any], failure: str, phase: str
    ) -> bool:
        """Whether a call did not work because an engine was lost. Raises the error where none was.

        failure: of the actor's side, empty where there is none.
        """
        errors = [answer for answer in answers.values() if isinstance(answer, RlpipeError)]
        if not errors and not failure:
            return False
        if any(engine.is_lost for engine in engines):
            return True
        self._actor.check_alive(phase)  # one that had answered when it was lost has no call that would tell
        raise errors[0] if errors else WeightSyncError(failure)

    def _shared_buffers(self, engines: Sequence["RunningEngine"]) -> list[WeightGroup]:
        """For each engine it and the actor's processes on its devices, which are the next ones in order."""
        size = self._config.rollout.engine.tensor_parallel
        addresses = self._actor.listen_for_engines()
        groups = []
        for engine in engines:
            senders = range(engine.index * size, (engine.index + 1) * size)
            own = tuple(addresses[sender] for sender in senders)
            groups.append(WeightGroup(_new_name(), own, 0, tuple(senders), size, BUFFERS))
        return groups

    def _broadcast_group(self, engines: int) -> WeightGroup:
        store = self._actor.endpoint
        return WeightGroup(
            name=_new_name(),
            addresses=(store.address,),
            port=store.port,
            senders=tuple(sorted({bucket.sender for plan in self._plans.values() for bucket in plan})),
            readers=engines * self._config.rollout.engine.tensor_parallel,
            backend="nccl" if cluster_gpus() else "gloo",
            in_flight_bytes=2 * self._config.weight_sync.bucket_bytes,
            key=store.key,
        )


def _new_name() -> str:
    """The store outlives a group, and a second one of the same name would find the first one's entries."""
    return f"rlpipe-weights-{uuid.uuid4().hex[:8]}"


def _compare(sent: Sequence[str], receipts: Mapping["RunningEngine", Any]) -> None:
    for receipt in receipts.values():
        different = [index for index, (a, b) in enumerate(zip(sent, receipt.checksums, strict=True)) if a != b]
        if different:
            raise WeightSyncError(
                f"engine {receipt.engine} received other bytes than were sent for version {receipt.version} in "
                f"{len(different)} of {len(sent)} buckets, the first is bucket {different[0]}; check "
                "the network and the memory of the nodes"
            )
