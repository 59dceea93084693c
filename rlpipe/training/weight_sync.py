"""Sending the actor's weights to all engines, with the version they then sample under."""

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlpipe.config.root import Config
from rlpipe.shared.errors import WeightSyncError
from rlpipe.shared.remote import together
from rlpipe.shared.weights import BUFFERS, WeightGroup
from rlpipe.training.memory_sharing import MemorySharing
from rlpipe.training.placement import cluster_gpus

if TYPE_CHECKING:
    from actor.group import ActorGroup
    from rollout.pool import RolloutPool
    from rollout.requests import WeightReceipt


class WeightSync:
    """Holds the groups in which the actor meets the engines: where they share devices, one for each engine whose
    processes read buffers of the actor's; else one in which actor rank 0 broadcasts to every engine process."""

    def __init__(self, config: Config, actor: "ActorGroup", pool: "RolloutPool", memory_sharing: MemorySharing) -> None:
        self._config = config
        self._memory_sharing = memory_sharing
        self._actor = actor
        self._pool = pool
        self._plan = actor.weight_plan()
        self.version = -1
        self._join()

    def push(self, version: int) -> dict[str, float]:
        """Returns the metrics of the transfer once all engines hold `version`."""
        in_flight = self._config.rollout.mode == "async"
        with self._memory_sharing.during_weight_sync():
            receiving = self._pool.start_receiving(self._plan, version, in_flight)
            sending = self._actor.begin_send_weights(self._config.weight_sync.verify)
            report, receipts = together(sending.result, lambda: self._gather(receiving, "weight_sync"))
        if self._config.weight_sync.verify:
            _compare(report.checksums, receipts)
        self.version = version
        return {
            "weight_sync/version": float(version),
            "weight_sync/bytes": float(report.size_bytes),
            "weight_sync/gigabytes_per_second": report.size_bytes / report.seconds / 1e9,
        }

    def _join(self) -> None:
        groups = self._shared_buffers() if self._config.ray.colocate else self._broadcast_group()
        engines = self._pool.join_weight_groups(groups)
        actor = self._actor.begin_join_weight_groups(groups)
        together(actor.result, lambda: self._gather(engines, "joining the weight group"))

    def _gather(self, references: list[Any], phase: str) -> list[Any]:
        return self._pool.gather(references, self._config.deadlines.weight_sync_seconds, phase)

    def _shared_buffers(self) -> list[WeightGroup]:
        """Each engine and the actor's processes on its devices, which are the next ones in order."""
        size = self._config.rollout.engine.tensor_parallel
        addresses = self._actor.listen_for_engines()
        parts = [addresses[index * size :][:size] for index in range(self._config.rollout.engines)]
        return [
            WeightGroup(f"rlpipe-weights-{index}", ",".join(part), 0, 2 * size, BUFFERS)
            for index, part in enumerate(parts)
        ]

    def _broadcast_group(self) -> list[WeightGroup]:
        address, port = self._actor.endpoint
        engine_processes = self._config.rollout.engines * self._config.rollout.engine.tensor_parallel
        backend = "nccl" if cluster_gpus() else "gloo"
        # The store outlives a group, and a second one of the same name would find the first one's entries.
        return [WeightGroup(f"rlpipe-weights-{uuid.uuid4().hex[:8]}", address, port, 1 + engine_processes, backend)]


def _compare(sent: Sequence[str], receipts: Sequence["WeightReceipt"]) -> None:
    for receipt in receipts:
        different = [index for index, (a, b) in enumerate(zip(sent, receipt.checksums, strict=True)) if a != b]
        if different:
            raise WeightSyncError(
                f"engine {receipt.engine} received other bytes than were sent for version {receipt.version} in "
                f"{len(different)} of {len(sent)} buckets, the first is bucket {different[0]}; check "
                "the network and the memory of the nodes"
            )
