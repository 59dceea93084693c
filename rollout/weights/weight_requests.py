"""What an engine asks of SGLang about weights: to join and leave groups, to receive an update, and to make room for an
adapter."""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from rlpipe.shared.errors import EngineFailure, WeightSyncError
from rlpipe.shared.guarded_port import Endpoint
from rlpipe.shared.weights import BUFFERS, EngineAdapter, WeightBucket, WeightGroup
from rollout.weights.update_messages import Answer, group_text, plan_fields

ADAPTER_NAME = "policy"
"""Of the one adapter that an engine has, in SGLang's words the `lora_path` of a request."""


class WeightRequests:
    """Of engine `index`. call: awaits an answer of SGLang's `manager`, or raises when SGLang dies."""

    def __init__(self, index: int, manager: Any, call: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]) -> None:
        self._index = index
        self._manager = manager
        self._call = call

    async def join(self, group: WeightGroup, reader: int) -> None:
        """Its ranks are readers `reader` and the following ones. Raises WeightSyncError when a rank could not join."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        reached = group
        if group.backend != BUFFERS:
            address, port = Endpoint(group.address_of(0), group.port, group.key).reach()
            reached = replace(group, addresses=(address,), port=port)
        request = InitWeightsUpdateGroupReqInput(
            master_address=group_text(reached),
            master_port=reached.port,
            rank_offset=reader,
            world_size=group.readers,
            group_name=group.name,
            backend=group.backend,
        )
        joined, message = await self._call(self._manager.init_weights_update_group(request, None))
        if not joined:
            raise WeightSyncError(
                f"engine {self._index} could not join weight group {group.name!r} at "
                f"{', '.join(group.addresses)}:{group.port}: {message}"
            )

    async def open_adapter(self, adapter: EngineAdapter, tensor_parallel: int) -> None:
        """Has SGLang make the adapter, all zeros; updates fill it where it is. Raises EngineFailure."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        request = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=ADAPTER_NAME,
            config_dict={
                "peft_type": "LORA",
                "r": adapter.rank,
                # SGLang divides by the rank whatever `use_rslora` says.
                "lora_alpha": adapter.scale * adapter.rank,
                "target_modules": list(adapter.modules),
            },
            serialized_named_tensors=[MultiprocessingSerializer.serialize({})] * tensor_parallel,
        )
        answer = await self._call(self._manager.load_lora_adapter_from_tensors(request, None))
        if not answer.success:
            raise EngineFailure(f"engine {self._index}: SGLang made no room for an adapter: {answer.error_message}")

    async def leave(self, name: str) -> None:
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        request = DestroyWeightsUpdateGroupReqInput(group_name=name)
        await self._call(self._manager.destroy_weights_update_group(request, None))

    async def receive(self, plan: tuple[WeightBucket, ...], version: int, group_name: str) -> tuple[str, ...]:
        """Has all ranks receive everything, while SGLang is idle and its cache empty; returns the checksums, if they
        are asked for. Raises WeightSyncError when a rank could not load a bucket, or received other bytes."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        names, dtypes, shapes = plan_fields(plan)
        request = UpdateWeightsFromDistributedReqInput(
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            group_name=group_name,
            load_format="flattened_bucket",
            flush_cache=False,
        )
        _, message = await self._call(self._manager.update_weights_from_distributed(request, None))
        answer = Answer.of_text(message)
        if problem := answer.failure or answer.disagreement:
            raise WeightSyncError(f"engine {self._index} could not load version {version}: {problem}")
        return answer.checksums
