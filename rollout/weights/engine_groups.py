"""The driver's side of weight updates: which engines belong to which group, and their calls to join and to receive."""

from collections.abc import Sequence

from rlpipe.shared.errors import WeightSyncError
from rlpipe.shared.weights import WeightBucket, WeightGroup
from rollout.engine_calls import EngineCalls, FleetCalls
from rollout.fleet import Fleet, RunningEngine


class EngineWeightGroups:
    """Of the engines of `fleet`, each with `tensor_parallel` ranks."""

    def __init__(self, fleet: Fleet, calls: FleetCalls, tensor_parallel: int, deadline_seconds: float) -> None:
        self._fleet = fleet
        self._calls = calls
        self._tensor_parallel = tensor_parallel
        self._deadline_seconds = deadline_seconds
        self._groups: dict[RunningEngine, WeightGroup] = {}

    def join(self, groups: Sequence[WeightGroup], engines: Sequence[RunningEngine]) -> EngineCalls:
        """A call that ends when all ranks, the senders' included, have joined: one group for all `engines`, or one for
        each."""
        if len(groups) == 1:
            places = [(groups[0], place * self._tensor_parallel) for place in range(len(engines))]
        else:
            places = [(group, 0) for group in groups]
        self._groups = {engine: group for engine, (group, _) in zip(engines, places, strict=True)}
        return EngineCalls(
            tuple(engines),
            tuple(
                engine.actor.join_weight_group.remote(group, reader)
                for engine, (group, reader) in zip(engines, places, strict=True)
            ),
        )

    def start_receiving(self, plan: tuple[WeightBucket, ...], version: int, in_flight: bool = False) -> EngineCalls:
        """A call for each joined engine's WeightReceipt of `plan`; the sender may begin right after it.

        Engines finish their running requests first, or interrupt them where `in_flight`; these then go on, and later
        requests are answered, with the new weights.
        """
        if not self._groups:
            raise WeightSyncError("engines have not joined a weight group; join one first")
        self._fleet.note_sent_weights()
        return EngineCalls(
            tuple(self._groups),
            tuple(
                engine.actor.receive.remote(plan, version, group.name, in_flight)
                for engine, group in self._groups.items()
            ),
        )

    def leave(self) -> None:
        """Those engines leave that are there yet."""
        up = set(self._fleet.up())
        here = [(engine, group) for engine, group in self._groups.items() if engine in up]
        self._groups = {}
        references = tuple(engine.actor.leave_weight_group.remote(group.name) for engine, group in here)
        calls = EngineCalls(tuple(engine for engine, _ in here), references)
        self._calls.collect(calls, self._deadline_seconds, "leaving the weight group")
