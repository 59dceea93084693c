"""How much memory an engine's pools take: on a CPU checked before SGLang takes it, on a GPU what the run can use."""

import math
from pathlib import Path

import psutil

from rlpipe.estimate.engine_pools import EnginePools, forgets_prefixes, needed_pools, pools_within, room_beside
from rlpipe.estimate.parameters import fp8_parameters
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.errors import ResourceError
from rollout.arguments import EngineSetup, running_slots
from rollout.engine_memory import total_gpu_bytes, visible_gpus

_KEEP_FREE_BYTES = 512 * 2**20


def check(setup: EngineSetup, tokens: int) -> None:
    """Raises ResourceError when a pool of `tokens` does not fit into free memory. Linux would kill the engine later."""
    per_token = _needed(setup).token_bytes
    free = psutil.virtual_memory().available - _KEEP_FREE_BYTES
    if tokens * per_token > free:
        fits = max(0, free // per_token)
        raise ResourceError(
            f"engine {setup.index}: no free memory for a KV pool of {tokens} tokens ({tokens * per_token / 2**30:.1f} "
            f"GiB, free: {max(0, free) / 2**30:.1f} GiB); set rollout.engine.kv_cache_tokens to at most {fits}, or "
            "lower rollout.engine.max_running_requests"
        )


def gpu_pools(setup: EngineSetup) -> EnginePools | None:
    """What the run can use of a GPU's memory for keys, values and states; None where the driver does not tell the GPU's
    size, and SGLang is left to fill its share."""
    room = _gpu_room(setup)
    return None if room is None else pools_within(_needed(setup), room)


def room_beside_bytes(setup: EngineSetup) -> float:
    """Device memory that others may take while this engine starts, without any other pools: those that its requests
    need are given to SGLang, which only looks whether its share of what is free holds them.

    0 where SGLang is left to measure; with adapters, whose memory is not planned; and with tensor parallelism, since it
    refuses GPUs of which one has less free memory. Without end on a CPU, where `check` has looked.
    """
    if setup.device == "cpu":
        return math.inf
    if setup.engine.tensor_parallel > 1 or setup.adapter is not None:
        return 0
    room = _gpu_room(setup)
    return 0 if room is None else room_beside(_needed(setup), room)


def shortage(engine: int, wanted: int | None, tokens: int, page_tokens: int) -> tuple[str, ...]:
    """A sentence for the user where SGLang made a pool of fewer tokens than it was told to.

    wanted: None where it was left to fill its share. page_tokens: to a multiple of which it rounds pools down.
    """
    if wanted is None or tokens > wanted - page_tokens:
        return ()
    return (
        f"warning: engine {engine} has a KV pool of {tokens} tokens, its requests can need {wanted}: when it started, "
        "its share of the free device memory did not hold more; end what else is on the GPU, raise "
        "rollout.engine.memory_fraction, or set ray.start to 'after'",
    )


def does_without_prefixes(setup: EngineSetup) -> bool:
    """Whether the engine gets no cache of prefixes."""
    architecture = describe_model(setup.model_path).architecture
    return has_recurrent_states(setup) and forgets_prefixes(setup.engine, architecture, setup.reuses_prefixes)


def has_recurrent_states(setup: EngineSetup) -> bool:
    """Whether layers of the model keep a state of each sequence besides keys and values."""
    return _needed(setup).states is not None


def _gpu_room(setup: EngineSetup) -> int | None:
    """Of a GPU's memory, the engine's share without its weights; None where the driver does not tell its size."""
    size = min(total_gpu_bytes(visible_gpus()))
    if not size:
        return None
    weights = sum(file.stat().st_size for file in Path(setup.model_path).glob("*.safetensors"))
    weights -= fp8_parameters(describe_model(setup.model_path).shape, setup.engine.quantization)  # of two bytes one
    return int(size * setup.engine.memory_share - weights / setup.engine.tensor_parallel)


def _needed(setup: EngineSetup) -> EnginePools:
    model = describe_model(setup.model_path)
    requests, tokens = running_slots(setup), setup.request_tokens
    return needed_pools(model.shape, setup.engine, model.architecture, requests, tokens, setup.reuses_prefixes)
